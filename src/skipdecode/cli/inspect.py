"""``skipdecode schedule``, ``check`` and ``demo``: look before you run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from ..errors import UsageError
from .console import err, out, parse_speedups, say


def schedule(
    model: Annotated[str | None, Argument(help="Take the layers and the trained form from this model.")] = None,
    speedup: Annotated[
        float | None, Option(help="Target speed-up (default: the model's own schedule, else 2).")
    ] = None,
    layers: Annotated[int | None, Option(min=1, help="Decoder layers, instead of MODEL.")] = None,
    horizon: Annotated[
        int | None, Option(min=1, help="Generated tokens over which the depth falls (default 64).")
    ] = None,
    order: Annotated[str | None, Option(help="top, bottom or even (default: top, or the model's).")] = None,
    decay: Annotated[
        str | None,
        Option(help="linear, cosine, exponential, power, step or constant (default: linear, or the model's)."),
    ] = None,
    length: Annotated[int | None, Option(min=1, help="Steps to predict the cost for (default: the horizon).")] = None,
    png: Annotated[Path | None, Option(help="Draw it to this file.")] = None,
    save: Annotated[Path | None, Option(help="Write it as JSON, for --schedule.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print the schedule's JSON.")] = False,
) -> None:
    """Show a schedule as text and picture.

    skipdecode schedule --speedup 3 --layers 24
    """
    from ..core.schedule import Schedule

    if (model is None) == (layers is None):
        raise UsageError("give either MODEL or --layers")
    if png:
        from ..evaluation.plots import check_picture, draw_schedule

        check_picture(png)
    if layers is not None:
        plan = Schedule.for_speedup(
            2 if speedup is None else speedup, layers, horizon or 64, order=order or "top", decay=decay or "linear"
        )
    else:
        from ..core.checkpoint_config import resolve_schedule
        from ..generation.loading import read_config

        form: dict[str, Any] = {k: v for k, v in {"order": order, "decay": decay}.items() if v is not None}
        plan = resolve_schedule(read_config(str(model)), speedup, horizon=horizon, **form)
    if save:
        plan.save(save)
        say(f"wrote {save}")
    if png:
        draw_schedule(plan, png, length)
        say(f"wrote {png}")
    if as_json:
        print(plan.to_json())
        return
    _print_schedule(plan, length or plan.horizon)


def _print_schedule(plan: Any, length: int) -> None:
    out.print(
        f"[bold]{plan.max_depth} to {plan.min_depth} of {plan.num_layers} layers[/] over {plan.horizon} tokens, "
        f"{plan.decay} decay, order {plan.order}"
    )
    # One column of text per step, or per several where the line is too short for that.
    stride = -(-length // 64)
    steps = range(0, length, stride)
    for layer in reversed(range(plan.num_layers)):
        cells = "".join("█" if layer in plan.layers(plan.depth(g)) else "·" for g in steps)
        out.print(f"layer {layer:3d} {cells}", highlight=False)
    out.print(f"          {'each column is ' + str(stride) + ' tokens' if stride > 1 else 'one column per token'}")
    out.print(
        f"target {plan.target:g}x; over {length} tokens {plan.average_depth(length):.2f} layers on average, "
        f"[bold]{plan.layer_ratio(length):.2f}x[/] fewer; distinct depths {', '.join(map(str, plan.distinct_depths))}"
    )


def check(
    model: Annotated[str, Argument(help="Directory, hub name or 'demo'.")],
    speedup: Annotated[
        float | None, Option(help="Budget to check with (default: the model's schedule, else 2).")
    ] = None,
    dtype: Annotated[
        str, Option(help="float32 proves equality to 1e-5; other types are coarser than that.")
    ] = "float32",
    device: Annotated[str | None, Option(help="cpu, cuda, …; a GPU if there is one.")] = None,
    attention: Annotated[str | None, Option(help="eager, sdpa, …")] = None,
    as_json: Annotated[bool, Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Prove on your own model that skipping is exact: against its stock layers, batched, repeated, counted.

    Exit code 1 if a claim does not hold, or the model is of a kind that cannot skip.

    skipdecode check facebook/opt-1.3b
    """
    from ..core.checkpoint_config import resolve_schedule
    from ..errors import UnsupportedModel
    from ..evaluation.check import ATTACHES, Finding, run_checks
    from ..generation.loading import load, read_config

    plan = resolve_schedule(read_config(model), speedup)
    # A short horizon, so that the few tokens decoded here pass through every depth of the schedule.
    if plan.decay != "list":
        plan = plan.replace(horizon=min(plan.horizon, 8))
    if plan.is_full:
        raise UsageError("the schedule skips nothing, so there is nothing to check: give --speedup 2 or more")
    findings: list[Finding] = []

    def found() -> Iterator[Finding]:
        try:
            network, _ = load(model, dtype=dtype, device=device, attention=attention)
        except UnsupportedModel as error:
            yield Finding(ATTACHES, False, str(error))
        else:
            yield from run_checks(network, plan)

    for finding in found():
        findings.append(finding)
        if not as_json:
            mark = "[green]holds[/]" if finding.held else "[bold red]FAILS[/]"
            out.print(f"{mark}  {finding.claim:44s} {finding.detail}", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps([vars(finding) for finding in findings]))
    if not all(finding.held for finding in findings):
        raise Exit(1)


def demo(
    model: Annotated[str, Argument(help="The embedded checkpoint, or one trained on E2E.")] = "demo",
    speedups: Annotated[str, Option(help="Target speed-ups, 1 among them.")] = "1,2,3,4,5",
    input: Annotated[Path | None, Option(help="CSV with an mr column (default: 32 inputs of our own).")] = None,
    batch_size: Annotated[int, Option(min=1)] = 32,
    repeats: Annotated[int, Option(min=1, help="Rounds timed alternately; medians are shown.")] = 5,
    png: Annotated[Path, Option(help="The picture.")] = Path("skipdecode-demo.png"),
    show: Annotated[int, Option(min=0, help="Inputs shown side by side.")] = 3,
    as_json: Annotated[bool, Option("--json", help="The numbers as JSON on the last line.")] = False,
) -> None:
    """Write the same inputs at 1x to 5x; time equal numbers of steps alternately; show texts, seconds, layers; draw it.

    The texts are those that the model ends by itself. All speeds are then timed over as many decode steps as the
    median batch takes at 1x: whose texts are shorter is no faster for it.
    """
    from rich.markup import escape
    from rich.progress import Progress
    from rich.table import Table

    from ..core.checkpoint_config import resolve_schedule
    from ..data.inputs import read_items
    from ..data.tasks import get_task
    from ..evaluation.plots import check_picture, draw_demo
    from ..evaluation.timing import alternate, compare, forced, machine, remarks, shown, typical_steps
    from ..generation.generate import generate
    from ..generation.loading import DEMO, load

    wanted = parse_speedups(speedups)
    if 1 not in wanted:
        raise UsageError("--speedups needs 1 among them: it is what the others are compared with")
    check_picture(png)
    task = get_task("e2e")
    items = [item for item in read_items(str(input or DEMO / "inputs.csv"), task) if item.error is None]
    prompts = [item.prompt for item in items]
    network, tokenizer = load(model)
    plans = {k: resolve_schedule(network.config, k) for k in wanted}
    common: dict[str, Any] = {"batch_size": batch_size, "max_new_tokens": task.max_new_tokens, "do_sample": False}
    with Progress(*Progress.get_default_columns(), console=err, transient=True) as progress:
        bar = progress.add_task("writing, then timing alternately", total=(repeats + 2) * len(plans))
        written = {}
        for k, plan in plans.items():
            written[k] = generate(network, tokenizer, prompts, schedule=plan, **common)
            progress.advance(bar)
        steps = typical_steps(written[1].lengths)
        common |= forced(steps)
        runs = {k: partial(generate, network, tokenizer, prompts, schedule=plan, **common) for k, plan in plans.items()}
        timings = alternate(runs, repeats, on_run=lambda: progress.advance(bar))
    for i, item in enumerate(items[:show]):
        out.print(f"\n[bold]{escape(item.columns['mr'])}[/]", highlight=False)
        for speedup, own in written.items():
            out.print(f"  [cyan]{speedup:g}x[/]  {escape(own.completions[i].text)}", highlight=False)
    clocks = {speedup: compare(timings[1], timing, repeats) for speedup, timing in timings.items()}
    table = Table(
        title=f"\n{len(items)} inputs, batch {batch_size}, {steps} steps each at every speed, "
        f"medians of {repeats} rounds"
    )
    for name in ("target", "layers", "fewer", "seconds", "wall clock", "ms/step", "decoding", "peak KV"):
        table.add_column(name, justify="right")
    numbers, figures = [], []
    for speedup, timing in timings.items():
        cost, clock, texts = timing.cost, clocks[speedup], written[speedup].cost
        figures += [shown(clock.ratio, clock.layer_ratio), shown(clock.decode_ratio, clock.layer_ratio)]
        table.add_row(
            f"{speedup:g}x",
            f"{cost.average_depth:.2f}",
            f"{cost.layer_ratio:.2f}x",
            f"{timing.seconds:.3f}",
            figures[-2],
            f"{timing.step_ms:.2f}",
            f"[bold]{figures[-1]}[/]",
            f"{cost.peak_kv_bytes / 1e6:.1f} MB",
        )
        numbers.append(
            {
                "target": speedup,
                "average_depth": round(cost.average_depth, 3),
                "layer_ratio": round(cost.layer_ratio, 3),
                "tokens": cost.tokens,
                "steps": cost.steps,
                "seconds": round(timing.seconds, 4),
                "wall_clock_ratio": round(clock.ratio, 3),
                "step_ms": round(timing.step_ms, 3),
                "decoding_ratio": round(clock.decode_ratio, 3),
                "texts_layer_ratio": round(texts.layer_ratio, 3),
                "texts_tokens": texts.tokens,
                "peak_kv_bytes": cost.peak_kv_bytes,
            }
        )
    out.print(table)
    for name, remark in remarks(figures, len(items), clocks[1].batches).items():
        out.print(f"{name}: {remark}", highlight=False, markup=False)
    out.print(f"[dim]{machine()}[/]", highlight=False)
    draw_demo(plans, timings, png, machine())
    say(f"wrote {png}")
    if as_json:
        print(json.dumps({"machine": machine(), "batch_size": batch_size, "repeats": repeats, "rows": numbers}))
