"""``skipdecode calibrate``: fit a schedule so that it achieves its speed-up on the user's data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from ..errors import UsageError
from . import options as o
from .console import Bar, out, print_table, say

if TYPE_CHECKING:
    from ..evaluation.calibration import Calibration
    from ..schedule import Schedule

Rows = Annotated[Path, Option(help="Rows like those to come: a file (prompts are enough), or the task's folder.")]
Target = Annotated[float, Option(help="Target: times fewer layers, or of --clock.")]
Limit = Annotated[int, Option(min=1, max=o.MOST, help="Use so many inputs, evenly drawn.")]
Order = Annotated[
    Literal["top", "bottom", "even"] | None,
    Option(help="Layer order (default: as trained, else top; with --search those that it tries)."),
]
Search = Annotated[
    bool,
    Option(
        "--search",
        help="Try orders of layers and falls of the depth, all at this speed-up, and take what writes nearest to full "
        "depth.",
    ),
]
File = Annotated[
    Path | None, Option(help="The schedule, for --schedule. A search keeps what it measured in FILE.search.json.")
]
Save = Annotated[bool, Option("--save", help="Save it in MODEL's config: --speedup of every verb then uses it.")]
Force = Annotated[bool, Option("--force", help="Save it even if the texts get worse.")]

#: Options that :class:`CalibrationPlan` takes under the same names.
PLAN = "limit batch_size max_new_tokens decay order search prompt_layers clock output save device".split()


def calibrate(
    model: o.Model,
    data: Rows,
    speedup: Target = 2.0,
    output: File = None,
    save: Save = False,
    force: Force = False,
    task: o.Task = "jsonl",
    limit: Limit = 256,
    batch_size: o.BatchSize = 32,
    max_new_tokens: o.MaxNewTokens = None,
    decay: o.Decay = None,
    order: Order = None,
    search: Search = False,
    prompt_layers: o.PromptLayers = None,
    clock: o.Clock = "layers",
    profile: o.ProfileFile = None,
    prompt_column: o.PromptColumn = None,
    response_column: o.ResponseColumn = None,
    prompt_share: o.PromptShare = None,
    device: o.Device = None,
    as_json: o.Json = False,
) -> None:
    """Fit the schedule to the lengths of the texts that MODEL writes, so that it skips as much as --speedup asks.

    What was trained stays: order, decay, warm-up, the prompt's layers, and the depths if a horizon fits them.
    Quality before and after stands beside the ratio. --search tries other forms too, which takes a while: on a model
    that was not trained to skip it saves much of the quality.

    skipdecode calibrate demo --task e2e --data e2e-dataset --speedup 5 --output schedule.json
    """
    given = locals()
    if output is None and not save:
        raise UsageError("give --output FILE for the schedule, --save to put it into MODEL's config, or both")
    if force and not save:
        raise UsageError("--force goes with --save")
    if search and output is None:
        raise UsageError("--search keeps what it has measured beside --output: give one")
    from ..data.tasks import task_from
    from ..evaluation.calibration import CalibrationPlan
    from ..evaluation.calibration import calibrate as run
    from ..latency.profile import Profile

    options = {name: given[name] for name in PLAN} | {"profile": Profile.load(profile) if profile else None}
    plan = CalibrationPlan(model, data, speedup, task_from(given), **options)
    with Bar() as bar:
        calibration = run(plan, say=say, on_progress=bar.show)
    if output:
        say(f"wrote {output}")
    _show(calibration)
    if as_json:
        print(json.dumps(calibration.summary()))
    if save:
        say(f"wrote the schedule for {speedup:g}x into {calibration.save(force)}")


def _show(calibration: Calibration) -> None:
    """Print the fitted schedule, and a table that compares full depth, the previous schedule and the fitted one."""
    schedule, plan, after = calibration.schedule, calibration.plan, calibration.after
    order = name_of(schedule)
    out.print(
        f"{schedule.max_depth} to {schedule.min_depth} of {schedule.num_layers} layers over {schedule.horizon} steps, "
        f"{schedule.decay} decay, order {order}\n"
        + (
            f"[bold]{after.ratio:.2f}x[/] faster {plan.clock}s are predicted"
            if plan.clock != "layers"
            else f"a decode step runs [bold]{after.step_layer_ratio:.2f}x[/] fewer layers"
        )
        + f" ({after.ratio / plan.speedup - 1:+.1%}) over {len(after.texts)} texts "
        f"in batches of {plan.batch_size}, {min(after.lengths)} to {max(after.lengths)} steps each",
    )
    columns = (calibration.full, calibration.before, after)
    rows = [["step layers", *(f"{each.step_layer_ratio:.2f}x" for each in columns), ""]]
    rows += [["job layers", *(f"{each.job_layer_ratio:.2f}x" for each in columns), ""]]
    for label, each in calibration.quality.items():
        rows.append([label, *(f"{value:.2f}" for value in (each.full, each.before, each.after)), each.change])
    print_table(["", "full depth", "before", "after", "after - before (95%)"], rows)
    if calibration.trials:
        ratio = "step layers" if plan.clock == "layers" else f"faster {plan.clock}s"
        print_table(
            ["found by the search", "order", ratio, "KL", "same token"],
            [
                [
                    f"{each.schedule.max_depth} to {each.schedule.min_depth}, {each.schedule.decay}",
                    name_of(each.schedule),
                    f"{each.ratio:.2f}x",
                    f"{each.damage.kl:.3f}",
                    f"{each.damage.agreement:.0%}",
                ]
                for each in calibration.trials
            ],
        )
    for line in calibration.remarks():
        say(line)


def name_of(schedule: Schedule) -> str:
    """Return a short name of a schedule's order."""
    if isinstance(schedule.order, str):
        return f"top, {schedule.warmup} warm-up" if schedule.order == "top" else schedule.order
    return "keeps " + ",".join(map(str, schedule.layers(schedule.min_depth)))
