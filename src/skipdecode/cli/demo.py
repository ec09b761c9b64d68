"""``skipdecode demo``: what it does, on the embedded model, in half a minute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ..errors import UsageError
from . import options as o
from .console import Bar, out, say

if TYPE_CHECKING:
    from ..evaluation.speeds import Speeds


def demo(
    model: o.Model = "demo",
    speedups: Annotated[str, Option(help="Target layer reductions, 1 among them.")] = "1,2,3,4,5",
    input: Annotated[Path | None, Option(help="CSV with an mr column (default: 32 inputs of our own).")] = None,
    batch_size: o.BatchSize = 32,
    repeats: Annotated[int, Option(min=1, help="Rounds timed alternately; medians are shown.")] = 5,
    png: Annotated[Path, Option(help="The picture.")] = Path("skipdecode-demo.png"),
    show: Annotated[int, Option(min=0, help="Inputs whose texts are shown.")] = 3,
    as_json: o.Json = False,
) -> None:
    """Write the same inputs at 1x to 5x, time them alternately, and draw what it gave.

    The texts are those that the model ends by itself. All speeds are then timed over as many decode steps as the
    median batch takes at 1x, so that a speed whose texts are shorter does not look faster for it.
    """
    from ..core.checkpoint_config import schedule_for
    from ..data.inputs import read_items
    from ..data.tasks import get_task
    from ..evaluation.plots import check_picture, draw_demo
    from ..evaluation.speeds import compare_speeds
    from ..weights.device import machine
    from ..weights.loading import DEMO, load, read_config

    targets = o.parse_speedups(speedups)
    if 1 not in targets:
        raise UsageError("--speedups needs 1 among them: it is what the others are compared with")
    check_picture(png)
    task = get_task("e2e")
    items = [item for item in read_items(str(input or DEMO / "inputs.csv"), task) if item.error is None]
    prompts = [item.prompt for item in items]
    config = read_config(model)
    schedules = {k: schedule_for(config, k) for k in targets}
    loaded, tokenizer = load(model)
    decoding = {"batch_size": batch_size, "max_new_tokens": task.max_new_tokens}
    with Bar() as bar:
        bar.show("writing, then timing alternately", 0, (repeats + 2) * len(schedules))
        speeds = compare_speeds(loaded, tokenizer, prompts, schedules, repeats=repeats, on_run=bar.advance, **decoding)
    for i, item in enumerate(items[:show]):
        _print_texts(item.columns["mr"], {k: own.completions[i].text for k, own in speeds.written.items()})
    _print_table(speeds, len(items), batch_size, repeats)
    out.print(f"[dim]{machine()}[/]", highlight=False)
    draw_demo(schedules, speeds.timings, png, machine())
    say(f"wrote {png}")
    if as_json:
        print(json.dumps({"machine": machine(), "batch_size": batch_size, "repeats": repeats, "rows": speeds.rows()}))


def _print_texts(source: str, texts: dict[float, str]) -> None:
    from rich.markup import escape

    out.print(f"\n[bold]{escape(source)}[/]", highlight=False)
    for speedup, text in texts.items():
        out.print(f"  [cyan]{speedup:g}x[/]  {escape(text)}", highlight=False)


def _print_table(speeds: Speeds, rows: int, batch_size: int, repeats: int) -> None:
    """Ratios are against 1x; what an asterisk means stands below."""
    from rich.table import Table

    from ..clock.timing import remarks, shown

    table = Table(
        title=f"\n{rows} inputs, batch {batch_size}, {speeds.steps} decode steps at every speed, "
        f"medians of {repeats} rounds"
    )
    for name in (
        "target",
        "layers/step",
        "layer reduction",
        "ms/step",
        "step faster",
        "seconds",
        "all faster",
        "peak KV",
    ):
        table.add_column(name, justify="right")
    figures = []
    for speedup, timing in speeds.timings.items():
        cost, clock = timing.cost, speeds.clocks[speedup]
        step, whole = (shown(ratio, clock.layer_ratio) for ratio in (clock.decode_ratio, clock.ratio))
        figures += [step, whole]
        table.add_row(
            f"{speedup:g}x",
            f"{cost.average_depth:.2f}",
            f"{cost.layer_ratio:.2f}x",
            f"{timing.step_ms:.2f}",
            f"[bold]{step}[/]",
            f"{timing.seconds:.3f}",
            whole,
            f"{cost.peak_kv_bytes / 1e6:.1f} MB",
        )
    out.print(table)
    out.print("step: one decode step; all: the whole run, prompts included", highlight=False)
    for name, remark in remarks(figures, rows, speeds.clocks[1].batches).items():
        out.print(f"{name}: {remark}", highlight=False, markup=False)
