"""``skipdecode plan``: predict speed-ups on the clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from ..errors import ScheduleError
from . import options as o
from .console import out, say

Measured = Annotated[str | None, Argument(metavar="MODEL", help="Directory, hub name, or 'demo'.")]
Batches = Annotated[str, Option("--batch", help="Batch sizes.")]
PromptTokens = Annotated[int, Option(min=1, max=o.MOST, help="Prompt tokens of each row, padding included.")]
NewTokens = Annotated[int, Option(min=2, max=o.MOST, help="New tokens of each row.")]


def plan(
    model: Measured = None,
    profile: Annotated[Path, Option(help="What skipdecode profile wrote.")] = Path("profile.json"),
    speedups: Annotated[str, Option(help="Targets.")] = "1,1.5,2,2.5,3,4,5",
    clock: Annotated[Literal["step", "job"], Option(help="What they are of: a decode step, or a whole job.")] = "step",
    batch: Batches = "1,8,32",
    prompt_tokens: PromptTokens = 64,
    new_tokens: NewTokens = 128,
    prompt_layers: o.PromptLayers = None,
    decay: o.Decay = None,
    as_json: o.Json = False,
) -> None:
    """Show which depths give which speed-up on the clock, what cannot be had, and what to train a model with.

    skipdecode plan --profile opt.json --clock job --prompt-layers max
    """
    from ..latency.planner import Predictor, Workload
    from ..latency.planner import plan as plan_depths
    from ..latency.profile import Profile, shape_of
    from ..latency.resolve import new_schedule
    from ..loading.device import is_here, machine
    from ..loading.load import read_config, refuse_adapter

    targets, measured = o.parse_numbers(speedups), Profile.load(profile)
    style: dict[str, Any] = {**o.style_options(decay=decay, prompt_layers=prompt_layers)}
    if model is not None:
        refuse_adapter(model, "plan, which takes other depths,")
    config = None if model is None else read_config(model)
    if config is not None:
        measured.check(shape=shape_of(config))
    rows: list[dict[str, Any]] = []
    lines: list[list[str]] = []
    notes: list[str] = []
    for size in o.parse_numbers(batch, "--batch", int):
        predictor = Predictor(measured, [Workload(size, prompt_tokens, new_tokens)], clock)
        refused, had = "", {1.0}
        for target in targets:
            start = {"batch_size": size, "asked": target, "asked_of": clock}
            lines.append([str(size), f"{target:g}x {clock}"])
            try:
                schedule = (
                    plan_depths(predictor, target, **style)
                    if config is None
                    else new_schedule(config, target, predictor, **style)
                )
            except ScheduleError as error:
                rows.append(start | {"refused": str(error)})
                lines[-1] += ["cannot be had", *[""] * 6]
                refused = refused or str(error)
                continue
            ratios = {of: round(ratio, 3) for of, ratio in predictor.ratios(schedule).items()}
            seconds = round(predictor.seconds(schedule).job, 4)
            had.add(ratios["layers"])
            start |= {f"{of}_ratio": ratio for of, ratio in ratios.items()}
            rows.append(start | {"job_seconds": seconds, "schedule": schedule.to_dict()})
            lines[-1] += [f"{schedule.max_depth} to {schedule.min_depth}", str(schedule.horizon), str(schedule.deepest)]
            lines[-1] += [*(f"{ratios[of]:.2f}x" for of in ("layers", "step", "job")), f"{seconds:.2f}"]
        if refused:
            notes.append(f"batch {size}: {refused}")
        if max(had) > 1:
            layers = ",".join(f"{ratio:.3g}" for ratio in sorted(had))
            notes.append(f"batch {size}: train a model for these with --speedups {layers}")
    heads = ["batch", "asked", "depths", "over steps", "prompt", "layers", "step", "job", "job s"]
    _show(f"{measured.model}: {prompt_tokens} prompt tokens, {new_tokens} new; of full depth, predicted", heads, lines)
    for note in notes:
        out.print(note, markup=False, soft_wrap=True)
    if measured.warning:
        say(measured.warning)
    here = machine(measured.device if is_here(measured.device) else "cpu")  # plan is for other machines too
    out.print(f"measured on: {measured.machine}", markup=False, soft_wrap=True)
    if here != measured.machine:
        say(f"this is another machine ({here}): what is planned holds there, not here")
    if as_json:
        print(json.dumps({"machine": measured.machine, "model": measured.model, "rows": rows}))


def _show(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table whose lines are not cut to the terminal's width."""
    from ..evaluation.report import markdown_table

    out.print(f"{title}\n\n{markdown_table(heads, rows)}\n", soft_wrap=True, markup=False)
