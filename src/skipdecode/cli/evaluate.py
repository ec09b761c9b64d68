"""``skipdecode evaluate``: what each speed costs in quality, and saves in layers, time and memory."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

from typer import Context, Option

from . import options as o
from .console import Bar, print_table, say


def evaluate(
    context: Context,
    model: o.Model,
    data: o.Data = Path("."),
    task: o.Task = "jsonl",
    adapter: o.Adapter = None,
    speedups: o.Speedups = None,
    methods: Annotated[str | None, Option(help="skipdecode, multi_exit; default: the trained one.")] = None,
    reference: Annotated[str | None, Option(help="Another full model to compare with.")] = None,
    output: Annotated[Path, Option(help="Folder for the table and finished rows.")] = Path("evaluation"),
    limit: o.Limit = None,
    batch_size: o.BatchSize = 32,
    max_new_tokens: o.MaxNewTokens = None,
    timing_rounds: Annotated[int, Option(min=1, help="Timed rounds, in turn with the full model.")] = 5,
    dtype: o.Dtype = "auto",
    quantization: o.Quantization = None,
    overwrite: o.Overwrite = False,
    as_json: o.Json = False,
) -> None:
    """Compare each speed's quality, layers, time and memory with the full model. The same command resumes.

    skipdecode evaluate demo --task e2e --data e2e --speedups 1,2,3,4,5
    """
    from ..evaluation.evaluate import EvaluateConfig
    from ..evaluation.evaluate import evaluate as run
    from ..evaluation.report import columns

    options = {name: value for name, value in context.params.items() if name != "as_json"}
    options |= {"speedups": o.parse_speedups(speedups), "methods": methods.split(",") if methods else ()}
    command = f"skipdecode {shlex.join(sys.argv[1:])}"
    with Bar() as bar:
        results = run(EvaluateConfig(**options), command=command, say=say, on_progress=bar.show)
    print_table(*columns(results.rows, brief=True))
    for mark in ("*", "rough"):
        if mark in results.about:
            say(f"{mark}: {results.about[mark]}")
    say(f"wrote table.md, table.json and tradeoff.png to {output}")
    if as_json:
        print(json.dumps({"about": results.about, "rows": results.rows}))
