"""``skipdecode evaluate``: what skipping layers costs in quality, and saves in layers, seconds and memory."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from . import options as o
from .console import Bar, print_table, say

Speedups = Annotated[str | None, Option(help="Speed-ups in layers (default: the trained ones, else 1,2,3,4,5).")]
Methods = Annotated[str | None, Option(help="Methods: skipdecode, multi_exit, calm (default: the trained one).")]
Schedules = Annotated[list[str] | None, Option("--schedule", help="Further schedule, a JSON file; may be repeated.")]
Reference = Annotated[str | None, Option(help="Other full model to compare with.")]
Folder = Annotated[Path, Option(help="Folder for rows, tables and a plot.")]
TimingExamples = Annotated[int, Option(min=1, help="Examples to time.")]
TimingRounds = Annotated[int, Option(min=1, help="Timed rounds, in turn with the full model.")]

#: Options that EvaluateConfig takes under the same names.
SAME = """adapter reference output limit batch_size max_new_tokens timing_examples timing_rounds
    dtype device quantization prepack overwrite""".split()


def evaluate(
    model: o.Model,
    adapter: o.Adapter = None,
    data: o.Data = Path("."),
    task: o.Task = "jsonl",
    speedups: Speedups = None,
    methods: Methods = None,
    schedule: Schedules = None,
    reference: Reference = None,
    output: Folder = Path("evaluation"),
    limit: o.Limit = None,
    batch_size: o.BatchSize = 32,
    max_new_tokens: o.MaxNewTokens = None,
    timing_examples: TimingExamples = 64,
    timing_rounds: TimingRounds = 5,
    prompt_column: o.PromptColumn = None,
    response_column: o.ResponseColumn = None,
    prompt_share: o.PromptShare = None,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    quantization: o.Quantization = None,
    prepack: o.Prepack = False,
    overwrite: o.Overwrite = False,
    as_json: o.Json = False,
) -> None:
    """Compare quality, layers, seconds and memory with the full model.

    After an interruption, the same command measures only the rows that are missing.

    skipdecode evaluate demo --task e2e --data e2e-dataset --speedups 1,2,3,4,5
    """
    given = locals()
    from ..data.tasks import task_from
    from ..evaluation.evaluate import EvaluateConfig
    from ..evaluation.evaluate import evaluate as run
    from ..evaluation.report import brief

    config = EvaluateConfig(
        model,
        data=data,
        task=task_from(given),
        speedups=o.parse_numbers(speedups) if speedups else None,
        methods=methods.split(",") if methods else (),
        schedules=schedule or (),
        **{name: given[name] for name in SAME},
    )
    with Bar() as bar:
        results = run(config, command=f"skipdecode {shlex.join(sys.argv[1:])}", say=say, on_progress=bar.show)
    print_table(*brief(results.rows, results.metrics))
    for mark in ("*", "rough"):
        if mark in results.about:
            say(f"{mark}: {results.about[mark]}")
    say(f"wrote table.md, table.json and tradeoff.png to {output}")
    if as_json:
        print(json.dumps({"about": results.about, "rows": results.rows}))
