"""``skipdecode evaluate``: what a budget costs in quality, and what it gives in layers, seconds and memory."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from ..methods import METHODS
from .console import out, parse_speedups, progress_bar, say
from .options import (
    MOST,
    BatchSize,
    Device,
    Dtype,
    Json,
    MaxNewTokens,
    MaxSourceWords,
    Model,
    PromptColumn,
    PromptShare,
    ResponseColumn,
    Task,
)

if TYPE_CHECKING:
    from ..evaluation.evaluate import Results


def evaluate(
    model: Model,
    data: Annotated[
        Path, Option(help="Folder with the task's files, a hub name, or a file of rows (prompts are enough).")
    ] = Path("."),
    task: Task = "jsonl",
    speedups: Annotated[str, Option(help="Target speed-ups of every method.")] = "1,2,3,4,5",
    methods: Annotated[
        str,
        Option(
            help=f"Methods to compare with the full model, separated by commas: {', '.join(METHODS)}. "
            "METHOD=MODEL runs one on a checkpoint of its own; {speedup} in MODEL stands for the target."
        ),
    ] = "skipdecode",
    schedule: Annotated[
        list[str] | None,
        Option(help="Compare the schedule in this JSON file too (several: repeat the option, or use commas)."),
    ] = None,
    output: Annotated[Path, Option(help="Folder for tables, plots and finished rows.")] = Path("evaluation"),
    split: Annotated[Literal["test", "validation"], Option(help="The split that is scored.")] = "test",
    limit: Annotated[int | None, Option(min=1, max=MOST, help="Score only the first so many inputs.")] = None,
    held_out_rows: Annotated[
        int, Option(min=1, max=MOST, help="Validation inputs for lengths, CALM's threshold and the loss by position.")
    ] = 256,
    prompt_column: PromptColumn = None,
    response_column: ResponseColumn = None,
    prompt_share: PromptShare = None,
    max_source_words: MaxSourceWords = None,
    batch_size: BatchSize = 32,
    max_new_tokens: MaxNewTokens = None,
    timing_rows: Annotated[int, Option(min=1, max=MOST, help="Inputs that are timed.")] = 64,
    repeats: Annotated[int, Option(min=1, max=1000, help="Rounds timed, the full model and the method in turn.")] = 5,
    samples: Annotated[
        int, Option(min=1, max=100_000, help="Bootstrap samples of the inputs for the confidence intervals.")
    ] = 1000,
    bert_score: Annotated[str | None, Option(help="Add BERTScore with this encoder: directory or hub name.")] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace rows and tables of other settings or models in OUTPUT.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare quality, layers, wall clock and memory with the full model: one row per method and target speed-up.

    Resumes after interruption: finished rows are kept in OUTPUT.

    skipdecode evaluate demo --task e2e --data e2e-dataset --speedups 1,2,3,4,5
    """
    targets = parse_speedups(speedups)
    from ..data.tasks import get_task
    from ..evaluation.evaluate import EvaluationPlan
    from ..evaluation.evaluate import evaluate as run

    plan = EvaluationPlan(
        model,
        data,
        get_task(
            task,
            max_source_words=max_source_words,
            prompt_column=prompt_column,
            response_column=response_column,
            prompt_share=prompt_share,
        ),
        targets,
        methods,
        schedules=[Path(name) for names in schedule or () for name in names.split(",")],
        output=output,
        split=split,
        limit=limit,
        held_out_rows=held_out_rows,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        timing_rows=timing_rows,
        repeats=repeats,
        samples=samples,
        bert_score=bert_score,
        dtype=dtype,
        device=device,
        overwrite=overwrite,
    )
    command = shlex.join(["skipdecode", *(_short(part) for part in sys.argv[1:])])
    with progress_bar() as on_progress:
        results = run(plan, command=command, say=say, on_progress=on_progress)
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
