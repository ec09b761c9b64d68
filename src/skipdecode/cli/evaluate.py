"""``skipdecode evaluate``: measure what skipping layers costs in quality and saves in layers, seconds and memory."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from ..evaluation.methods import METHODS
from . import options as o
from .console import Bar, print_table, say

Speedups = Annotated[
    str | None,
    Option(help="Targets of every method: times fewer layers (default: those that were trained, else 1,2,3,4,5)."),
]
Methods = Annotated[
    str,
    Option(
        help=f"Methods to compare with the full model, separated by commas: {', '.join(METHODS)}. "
        "METHOD=MODEL runs one on a checkpoint of its own; {speedup} in MODEL stands for the target."
    ),
]
Schedules = Annotated[
    list[str] | None,
    Option("--schedule", help="Compare the schedule in this JSON file too (several: repeat it, or use commas)."),
]
Folder = Annotated[Path, Option(help="Folder for tables, a plot and finished rows.")]
TimingRows = Annotated[int, Option(min=1, max=o.MOST, help="Inputs that are timed.")]
Repeats = Annotated[int, Option(min=1, max=1000, help="Rounds timed, the full model and the method in turn.")]
Overwrite = Annotated[
    bool, Option("--overwrite", help="Replace rows and tables of other settings or models in OUTPUT.")
]

#: Options that :class:`EvaluationPlan` takes under the same names.
PLAN = "methods output limit batch_size max_new_tokens timing_rows repeats dtype device overwrite".split()


def evaluate(
    model: o.Model,
    data: o.Data = Path("."),
    task: o.Task = "jsonl",
    speedups: Speedups = None,
    methods: Methods = "skipdecode",
    schedule: Schedules = None,
    output: Folder = Path("evaluation"),
    limit: o.Limit = None,
    batch_size: o.BatchSize = 32,
    max_new_tokens: o.MaxNewTokens = None,
    timing_rows: TimingRows = 64,
    repeats: Repeats = 5,
    prompt_column: o.PromptColumn = None,
    response_column: o.ResponseColumn = None,
    prompt_share: o.PromptShare = None,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    quantization: o.Quantization = None,
    prepack: o.Prepack = False,
    overwrite: Overwrite = False,
    as_json: o.Json = False,
) -> None:
    """Compare quality, layers, wall clock and memory with the full model: one row per method and target.

    After an interruption, the same command measures only the rows that OUTPUT does not hold yet.

    skipdecode evaluate demo --task e2e --data e2e-dataset --speedups 1,2,3,4,5
    """
    given = locals()
    targets = o.parse_numbers(speedups) if speedups else None
    from ..data.tasks import task_from
    from ..evaluation.evaluate import EvaluationPlan
    from ..evaluation.evaluate import evaluate as run
    from ..evaluation.report import brief
    from ..loading.optimize import optimizations

    files = [Path(name) for names in schedule or () for name in names.split(",")]
    rest = {name: given[name] for name in PLAN}
    rest["faster"] = optimizations(quantization, prepack)
    plan = EvaluationPlan(model, data, task_from(given), targets, schedules=files, **rest)
    command = f"skipdecode {shlex.join(sys.argv[1:])}"
    with Bar() as bar:
        results = run(plan, command=command, say=say, on_progress=bar.show)
    print_table(*brief(results.rows, results.metrics))
    for mark in ("*", "rough"):
        if mark in results.about:
            say(f"{mark}: {results.about[mark]}")
    say(f"wrote {', '.join(path.name for path in results.files)} to {output}")
    if as_json:
        print(json.dumps({"about": results.about, "rows": results.rows}))
