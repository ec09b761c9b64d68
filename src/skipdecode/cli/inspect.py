"""``skipdecode schedule`` and ``check``: show a schedule, and check a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from typer import Argument, Exit, Option

from ..errors import UsageError
from . import options as o
from .console import out, say

if TYPE_CHECKING:
    from ..schedule import Schedule


def schedule(
    model: Annotated[
        str | None, Argument(help="Take the number of layers and the trained schedules from this model.")
    ] = None,
    speedup: o.Speedup = None,
    layers: Annotated[int | None, Option(min=1, help="Decoder layers, instead of MODEL.")] = None,
    horizon: Annotated[int | None, Option(min=1, help="Decode steps over which the depth falls (default 64).")] = None,
    order: o.Order = None,
    decay: o.Decay = None,
    warmup_layers: Annotated[
        int | None, Option(min=0, help="Bottom layers that order top keeps first (default: the model's, else 1).")
    ] = None,
    prompt_layers: o.PromptLayers = None,
    save: Annotated[Path | None, Option(help="Write it as JSON, for --schedule.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print the schedule's JSON.")] = False,
) -> None:
    """Show which layers each decode step runs.

    skipdecode schedule --speedup 3 --layers 24
    """
    from ..model.config import DEFAULT_HORIZON, DEFAULT_SPEEDUP, schedule_for
    from ..schedule import Schedule

    if (model is None) == (layers is None):
        raise UsageError("give either MODEL or --layers")
    style: dict[str, Any] = o.style_options(order, decay, prompt_layers)
    style |= {} if warmup_layers is None else {"warmup": warmup_layers}
    if layers is not None:
        target = DEFAULT_SPEEDUP if speedup is None else speedup
        shown = Schedule.for_speedup(target, layers, horizon or DEFAULT_HORIZON, **style)
    else:
        from ..loading.load import read_config
        from ..model.inspect import with_lenders_first

        config = read_config(str(model))
        shown = schedule_for(config, speedup, horizon=horizon, **style)
    if save:
        shown.save(save)
        say(f"wrote {save}")
    if as_json:
        print(shown.to_json())
    else:
        _print_schedule(shown if layers is not None else with_lenders_first(shown, config))


def _print_schedule(schedule: Schedule) -> None:
    length = schedule.horizon
    out.print(
        f"[bold]{schedule.max_depth} to {schedule.min_depth} of {schedule.num_layers} layers[/] over "
        f"{schedule.horizon} decode steps, {schedule.decay} decay, order {schedule.order}; "
        f"the prompt runs {schedule.deepest}"
    )
    # One character per step, or per several steps if the horizon is longer than 64.
    stride = -(-length // 64)
    steps = range(0, length, stride)
    for layer in reversed(range(schedule.num_layers)):
        cells = "".join("█" if layer in schedule.layers(schedule.depth(g)) else "·" for g in steps)
        out.print(f"layer {layer:3d} {cells}")
    out.print(f"          {'each column is ' + str(stride) + ' steps' if stride > 1 else 'one column per step'}")
    depths = ", ".join(map(str, schedule.distinct_depths))
    out.print(
        f"target {schedule.target:g}x; over {length} steps {schedule.average_depth(length):.2f} layers on average, "
        f"a layer reduction of [bold]{schedule.layer_ratio(length):.2f}x[/]; distinct depths {depths}"
    )


def check(
    model: o.Model,
    speedup: o.Speedup = None,
    dtype: o.Dtype = "float32",
    device: o.Device = None,
    revision: o.Revision = None,
    as_json: Annotated[bool, Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Prove on your own model that skipping is exact: compare it with the stock model, in batches and alone.

    Logits are equal within ten times what the stock model's own cached and uncached ones differ by; what float32
    cannot tell is computed in float64. The exit code is 1 if a claim does not hold, or if the model cannot skip.

    skipdecode check facebook/opt-1.3b
    """
    from ..evaluation.exactness import check_model
    from ..loading.load import read_config
    from ..model.config import is_trained

    findings = []
    for finding in check_model(model, speedup, dtype=dtype, device=device, revision=revision):
        findings.append(finding)
        if not as_json:
            mark = "[green]holds[/]" if finding.held else "[bold red]FAILS[/]"
            out.print(f"{mark}  {finding.claim:44s} {escape(finding.detail)}", soft_wrap=True)
    if as_json:
        print(json.dumps([vars(finding) for finding in findings]))
    if not all(finding.held for finding in findings):
        raise Exit(1)
    if not is_trained(read_config(model, revision)):
        say(
            "exact, but not trained to skip: texts get worse with every layer that is left out. skipdecode probe "
            f"{model} measures how much, and skipdecode train teaches it to skip"
        )
