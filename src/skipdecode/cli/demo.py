"""``skipdecode demo``: show on the embedded model, in half a minute, what skipping layers does."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ..errors import UsageError
from . import options as o
from .console import Bar, out, print_table, say

if TYPE_CHECKING:
    from ..generation.stats import GenerationOutput
    from ..latency.timing import Timing


def demo(
    model: o.Model = "demo",
    speedups: Annotated[str, Option(help="Target layer reductions, 1 among them.")] = "1,2,3,4,5",
    repeats: Annotated[int, Option(min=1, help="Rounds timed alternately; medians are shown.")] = 5,
    png: Annotated[
        Path | None, Option(help="The picture (default: skipdecode-demo.png, where matplotlib is installed).")
    ] = None,
) -> None:
    """Write the same inputs at 1x to 5x, time them alternately, and draw what it gave.

    The texts are those that the model ends by itself. All speeds are then timed over as many decode steps as the
    median batch takes at 1x, so that a speed whose texts are shorter does not look faster for it.
    """
    from ..data.inputs import read_items
    from ..data.tasks import get_task
    from ..generation.generate import generate
    from ..latency.timing import alternate, forced, typical_steps
    from ..loading.device import machine
    from ..loading.load import DEMO, adapter_of, load, read_config
    from ..model.adapter import trained_schedule

    targets = o.parse_numbers(speedups)
    if 1 not in targets:
        raise UsageError("--speedups needs 1 among them: it is what the others are compared with")
    if png is None and find_spec("matplotlib"):  # no base requirement, and the texts and the table need none
        png = Path("skipdecode-demo.png")
    if png is not None:
        from ..evaluation.plots import check_picture, draw_demo

        check_picture(png)
    task = get_task("e2e")
    items = [item for item in read_items(str(DEMO / "inputs.csv"), task) if item.error is None]
    schedules = {speedup: trained_schedule(read_config(model), speedup, adapter_of(model)) for speedup in targets}
    loaded, tokenizer = load(model)
    write = partial(generate, loaded, tokenizer, [item.prompt for item in items], batch_size=32)
    written: dict[float, GenerationOutput] = {}
    with Bar() as bar:
        bar.show("writing, then timing alternately", 0, (repeats + 2) * len(schedules))
        for speedup, schedule in schedules.items():
            written[speedup] = write(schedule=schedule, max_new_tokens=task.max_new_tokens)
            bar.advance()
        same = forced(typical_steps(written[1].lengths))
        runs = {speedup: partial(write, schedule=schedule, **same) for speedup, schedule in schedules.items()}
        timings = alternate(runs, repeats, on_run=bar.advance)
    for i, item in enumerate(items[:3]):
        out.print(f"\n{item.columns['mr']}", style="bold", markup=False)
        for speedup, result in written.items():
            out.print(f"  {speedup:g}x  {result.completions[i].text}", markup=False)
    out.print(
        f"\n{len(items)} inputs, batch 32, {same['max_new_tokens'] - 1} decode steps at every speed, "
        f"medians of {repeats} rounds"
    )
    _print_table(timings, repeats)
    out.print(f"[dim]{machine()}[/]")
    if png is not None:
        draw_demo(schedules, timings, png, machine())
        say(f"wrote {png}")


def _print_table(timings: dict[float, Timing], repeats: int) -> None:
    """Print the timings by target speed-up as a table, with notes. Ratios are relative to 1x."""
    from ..latency.timing import compare, remarks, shown

    cells, figures, full = [], [], timings[1]
    for speedup, timing in timings.items():
        cost, clock = timing.stats, compare(full, timing)
        step, whole = (shown(ratio, clock.layer_ratio) for ratio in (clock.decode_ratio, clock.ratio))
        figures += [step, whole]
        layers = (f"{speedup:g}x", f"{cost.average_depth:.2f}", f"{cost.layer_ratio:.2f}x")
        clock_cells = (f"{timing.step_ms:.2f}", step, f"{timing.seconds:.3f}", whole)
        cells.append([*layers, *clock_cells, f"{cost.peak_kv_bytes / 1e6:.1f} MB"])
    heads = "target layers/step layer_reduction ms/step step_faster seconds all_faster peak_KV".split()
    print_table([head.replace("_", " ") for head in heads], cells)
    out.print("step: one decode step; all: the whole run, prompts included")
    for name, remark in remarks(figures, full.stats.rows, len(full.result.lengths) * repeats).items():
        out.print(f"{name}: {remark}", markup=False)
