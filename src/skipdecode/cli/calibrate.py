"""``skipdecode calibrate``: make a schedule achieve its speed-up on texts like those to come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from ..errors import UsageError
from ..methods import MethodName
from . import options as o
from .console import Bar, out, say

if TYPE_CHECKING:
    from ..evaluation.calibration import Calibration

Rows = Annotated[Path, Option(help="Rows like those to come: a file (prompts are enough), or the task's folder.")]
Target = Annotated[float, Option(help="Target: times fewer layers, or of --clock.")]
Method = Annotated[MethodName, Option(help="Whose depths to fit; full, calm, static and scratch have none.")]
Limit = Annotated[int, Option(min=1, max=o.MOST, help="Use so many inputs, evenly drawn.")]
Order = Annotated[
    Literal["top", "bottom", "even", "search"] | None,
    Option(help="Layer order (default: as trained, else top). search finds one from the loss on the responses."),
]
SearchRows = Annotated[int, Option(min=1, max=o.MOST, help="Rows that the search computes its losses on.")]
File = Annotated[Path, Option(help="The schedule, for --schedule.")]
Save = Annotated[bool, Option("--save", help="Also save it in MODEL's config: --speedup of every verb then uses it.")]
Force = Annotated[bool, Option("--force", help="Save it even if the texts get worse.")]

#: What goes into the plan under its own name.
PLAN = "limit batch_size max_new_tokens decay order search_rows prompt_layers clock output save device".split()


def calibrate(
    model: o.Model,
    data: Rows,
    speedup: Target = 2.0,
    task: o.Task = "jsonl",
    method: Method = "skipdecode",
    limit: Limit = 256,
    batch_size: o.BatchSize = 32,
    max_new_tokens: o.MaxNewTokens = None,
    decay: o.Decay = None,
    order: Order = None,
    search_rows: SearchRows = 64,
    prompt_layers: o.PromptLayers = None,
    clock: o.Clock = "layers",
    profile: o.ProfileFile = None,
    output: File = Path("schedule.json"),
    save: Save = False,
    force: Force = False,
    prompt_column: o.PromptColumn = None,
    response_column: o.ResponseColumn = None,
    prompt_share: o.PromptShare = None,
    max_source_words: o.MaxSourceWords = None,
    device: o.Device = None,
    as_json: o.Json = False,
) -> None:
    """Fit the schedule to the lengths of the texts that MODEL writes, so that it skips as much as --speedup asks.

    What was trained stays: order, decay, warm-up, the prompt's layers, and the depths if a horizon fits them.
    Quality before and after stands beside the ratio.

    skipdecode calibrate demo --task e2e --data e2e-dataset --speedup 5
    """
    given = locals()
    if force and not save:
        raise UsageError("--force goes with --save")
    from ..evaluation.calibration import CalibrationPlan
    from ..evaluation.calibration import calibrate as run

    options = {name: given[name] for name in PLAN} | {"profile": o.load_profile(clock, profile)}
    plan = CalibrationPlan(model, data, speedup, o.task_of(given), method, **options)
    with Bar() as bar:
        calibration = run(plan, say=say, on_progress=bar.show)
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
        f"{schedule.max_depth} to {schedule.min_depth} of {schedule.num_layers} layers over {schedule.horizon} steps, "
        f"{schedule.decay} decay, order {schedule.order}\n"
        + (
            f"[bold]{after.ratio:.2f}x[/] faster {plan.clock}s are predicted"
            if plan.clock != "layers"
            else f"a decode step runs [bold]{after.step_layer_ratio:.2f}x[/] fewer layers"
        )
        + f" ({after.ratio / plan.speedup - 1:+.1%}) over {len(after.texts)} texts "
        f"in batches of {plan.batch_size}, {min(after.lengths)} to {max(after.lengths)} steps each",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(("", "full depth", "before", "after")):
        table.add_column(head, justify="right" if number else "left")
    columns = (calibration.full, calibration.before, after)
    table.add_row("step layers", *(f"{each.step_layer_ratio:.2f}x" for each in columns))
    table.add_row("job layers", *(f"{each.job_layer_ratio:.2f}x" for each in columns))
    for label, each in calibration.quality.items():
        table.add_row(label, *(f"{value:.2f}" for value in (each.full, each.before, each.after)))
    out.print(table)
    for line in calibration.remarks():
        say(line)
