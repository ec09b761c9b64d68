"""``skipdecode evaluate``: what a budget costs in quality, and what it gives in layers, seconds and memory."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from ..methods import METHODS
from . import options as o
from .console import Bar, out, say

if TYPE_CHECKING:
    from ..evaluation.evaluate import Results

Speedups = Annotated[str, Option(help="Targets of every method: times fewer layers, or of --clock.")]
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
Folder = Annotated[Path, Option(help="Folder for tables, plots and finished rows.")]
Split = Annotated[Literal["test", "validation"], Option(help="The split that is scored.", rich_help_panel=o.DATA)]
HeldOutRows = Annotated[
    int,
    Option(
        min=1,
        max=o.MOST,
        help="Validation inputs for lengths, CALM's threshold and the loss by position.",
        rich_help_panel=o.DATA,
    ),
]
_CLOCK = "Clock and intervals"
TimingRows = Annotated[int, Option(min=1, max=o.MOST, help="Inputs that are timed.", rich_help_panel=_CLOCK)]
Repeats = Annotated[
    int, Option(min=1, max=1000, help="Rounds timed, the full model and the method in turn.", rich_help_panel=_CLOCK)
]
Samples = Annotated[
    int, Option(min=1, max=100_000, help="Bootstrap samples of the inputs for the intervals.", rich_help_panel=_CLOCK)
]
BertScore = Annotated[str | None, Option(help="Add BERTScore with this encoder: directory or hub name.")]
Overwrite = Annotated[
    bool, Option("--overwrite", help="Replace rows and tables of other settings or models in OUTPUT.")
]

#: What goes into the plan under its own name.
PLAN = (
    "methods serving output split limit held_out_rows batch_size max_new_tokens timing_rows repeats samples "
    "bert_score dtype device clock profile overwrite"
).split()


def evaluate(
    model: o.Model,
    data: o.Data = Path("."),
    task: o.Task = "jsonl",
    speedups: Speedups = "1,2,3,4,5",
    clock: o.Clock = "layers",
    profile: o.ProfileFile = None,
    methods: Methods = "skipdecode",
    schedule: Schedules = None,
    serving: Annotated[bool, Option("--serving", help="Add rows of flat schedules, which suit servers.")] = False,
    output: Folder = Path("evaluation"),
    limit: o.Limit = None,
    batch_size: o.BatchSize = 32,
    max_new_tokens: o.MaxNewTokens = None,
    bert_score: BertScore = None,
    split: Split = "test",
    held_out_rows: HeldOutRows = 256,
    prompt_column: o.PromptColumn = None,
    response_column: o.ResponseColumn = None,
    prompt_share: o.PromptShare = None,
    max_source_words: o.MaxSourceWords = None,
    timing_rows: TimingRows = 64,
    repeats: Repeats = 5,
    samples: Samples = 1000,
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
    targets = o.parse_speedups(speedups)
    from ..evaluation.evaluate import EvaluationPlan
    from ..evaluation.evaluate import evaluate as run
    from ..weights.optimize import optimizations

    files = [Path(name) for names in schedule or () for name in names.split(",")]
    rest = {name: given[name] for name in PLAN} | {"faster": optimizations(quantization, prepack)}
    plan = EvaluationPlan(model, data, o.task_of(given), targets, schedules=files, **rest)
    command = shlex.join(["skipdecode", *(_short(part) for part in sys.argv[1:])])
    with Bar() as bar:
        results = run(plan, command=command, say=say, on_progress=bar.show)
    _show(results)
    if as_json:
        print(json.dumps({"about": results.about, "rows": results.rows}))


def _show(results: Results) -> None:
    """The table, what its marks mean, and where everything is."""
    from rich.table import Table

    from ..evaluation.report import brief

    heads, cells = brief(results.rows, results.metrics)
    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    for line in cells:
        table.add_row(*line)
    out.print(table)
    for mark in ("*", "rough"):
        if mark in results.about:
            say(f"{mark}: {results.about[mark]}")
    say(f"wrote {', '.join(path.name for path in results.files)} to {results.files[0].parent}")


def _short(argument: str) -> str:
    """A path outside the working folder means nothing to other people: only its last part is kept."""
    return Path(argument).name if argument.startswith(("/", "..")) else argument
