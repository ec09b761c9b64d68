"""``skipdecode calibrate``: make a schedule achieve its speed-up on texts like those to come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from ..errors import UsageError
from ..methods import MethodName
from .console import out, progress_bar, say
from .options import (
    MOST,
    BatchSize,
    Device,
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
    from ..evaluation.calibration import Calibration


def calibrate(
    model: Model,
    data: Annotated[Path, Option(help="Rows like those to come: a file (prompts are enough), or the task's folder.")],
    speedup: Annotated[float, Option(help="Target reduction of layers per decode step.")] = 2.0,
    task: Task = "jsonl",
    method: Annotated[
        MethodName, Option(help="Whose depths to fit; full, calm, static and scratch have none.")
    ] = "skipdecode",
    limit: Annotated[int, Option(min=1, max=MOST, help="Use so many inputs, evenly drawn.")] = 256,
    prompt_column: PromptColumn = None,
    response_column: ResponseColumn = None,
    prompt_share: PromptShare = None,
    max_source_words: MaxSourceWords = None,
    batch_size: BatchSize = 32,
    max_new_tokens: MaxNewTokens = None,
    decay: Annotated[
        Literal["linear", "cosine", "exponential", "power", "step", "constant"] | None,
        Option(help="Shape of the fall (default: as trained, else linear)."),
    ] = None,
    order: Annotated[
        Literal["top", "bottom", "even", "search"] | None,
        Option(help="Layer order (default: as trained, else top). search finds one from the loss on the responses."),
    ] = None,
    search_rows: Annotated[int, Option(min=1, max=MOST, help="Rows that the search computes its losses on.")] = 64,
    output: Annotated[Path, Option(help="The schedule, for --schedule.")] = Path("schedule.json"),
    save: Annotated[
        bool, Option("--save", help="Also save it in MODEL's config: --speedup of every verb then uses it.")
    ] = False,
    force: Annotated[bool, Option("--force", help="Save it even if the texts get worse.")] = False,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Set the horizon from the lengths that MODEL really writes, so that SPEEDUP is achieved.

    What the model was trained with stays: order, decay, warm-up, and the depths if a horizon can be found for them.
    Quality before and after stands beside the ratio.

    skipdecode calibrate demo --task e2e --data e2e-dataset --speedup 5
    """
    if force and not save:
        raise UsageError("--force goes with --save")
    from ..data.tasks import get_task
    from ..evaluation.calibration import CalibrationPlan
    from ..evaluation.calibration import calibrate as run

    plan = CalibrationPlan(
        model,
        data,
        speedup,
        get_task(
            task,
            max_source_words=max_source_words,
            prompt_column=prompt_column,
            response_column=response_column,
            prompt_share=prompt_share,
        ),
        method,
        limit=limit,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        decay=decay,
        order=order,
        search_rows=search_rows,
        output=output,
        save=save,
        device=device,
    )
    with progress_bar() as on_progress:
        calibration = run(plan, say=say, on_progress=on_progress)
    say(f"wrote {output}")
    _show(calibration)
    if as_json:
        print(json.dumps(calibration.summary()))
    if save:
        say(f"wrote the schedule for {speedup:g}x into {calibration.save(force)}")


def _show(calibration: Calibration) -> None:
    """The schedule, and full depth, the schedule there was and the fitted one side by side."""
    from rich.table import Table

    schedule, plan, after = calibration.schedule, calibration.plan, calibration.after
    out.print(
        f"{schedule.max_depth} to {schedule.min_depth} of {schedule.num_layers} layers over {schedule.horizon} tokens, "
        f"{schedule.decay} decay, order {schedule.order}\nachieved [bold]{after.layer_ratio:.2f}x[/] fewer layers "
        f"({after.layer_ratio / plan.speedup - 1:+.1%}) over {len(after.texts)} texts in batches of {plan.batch_size}, "
        f"{min(after.lengths)} to {max(after.lengths)} steps each",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(("", "full depth", "before", "after")):
        table.add_column(head, justify="right" if number else "left")
    columns = (calibration.full, calibration.before, after)
    table.add_row("fewer layers", *(f"{each.layer_ratio:.2f}x" for each in columns))
    for label, each in calibration.quality.items():
        table.add_row(label, *(f"{value:.2f}" for value in (each.full, each.before, each.after)))
    out.print(table)
    for line in calibration.remarks():
        say(line)
