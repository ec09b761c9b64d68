"""``skipdecode demo``: what skipping layers does, shown with the demo model in half a minute."""

import csv
import json
from functools import partial

from . import options as o
from .console import Bar, out, print_table

#: Timed rounds, examples printed, and the longest output in tokens.
ROUNDS = 5
SHOWN = 3
MAX_NEW_TOKENS = 80


def demo(speedups: o.Speedups = None, as_json: o.Json = False) -> None:
    """Generate from the same prompts at 1x to 5x with the demo model, and time each speed.

    skipdecode demo
    """
    from ..data.tasks import get_task
    from ..generation.generate import generate
    from ..latency.timing import alternate, compare, forced, typical_steps
    from ..loading.device import machine
    from ..loading.load import DEMO, Checkpoint

    checkpoint = Checkpoint.resolve("demo")
    speeds = sorted({1.0, *(o.parse_speedups(speedups) or checkpoint.schedules)})
    schedules = {speedup: checkpoint.schedule(speedup) for speedup in speeds}
    task = get_task("e2e")
    with (DEMO / "inputs.csv").open(encoding="utf-8", newline="") as file:
        prompts = [task.example(row).prompt for row in csv.DictReader(file)]
    run = partial(generate, checkpoint.load(), checkpoint.tokenizer, prompts, batch_size=len(prompts))
    with Bar() as bar:
        bar.show("generate, then time in turn", 0, (ROUNDS + 2) * len(schedules))
        outputs = {}
        for speedup, schedule in schedules.items():
            outputs[speedup] = run(schedule=schedule, max_new_tokens=MAX_NEW_TOKENS)
            bar.advance()
        same = forced(typical_steps(outputs[1.0].lengths))
        runs = {speedup: partial(run, schedule=schedule, **same) for speedup, schedule in schedules.items()}
        timings = alternate(runs, ROUNDS, on_run=bar.advance)
    for index, prompt in enumerate(prompts[:SHOWN]):
        out.print(f"\n{prompt}", style="bold", markup=False)
        for speedup, output in outputs.items():
            out.print(f"  {speedup:g}x  {output.completions[index].text.strip()}", markup=False)
    rows = []
    for speedup, timing in timings.items():
        against = compare(timings[1.0], timing)
        rows.append(
            {
                "speed": speedup,
                "layers": round(timing.stats.average_depth, 2),
                "ms per step": round(timing.step_ms, 2),
                "decoding speed-up": round(against.decoding, 2),
                "end-to-end speed-up": round(against.end_to_end, 2),
                "peak KV, MB": round(timing.stats.peak_kv_bytes / 1e6, 1),
            }
        )
    out.print(f"\n{len(prompts)} prompts in a batch, {same['max_new_tokens'] - 1} steps, medians of {ROUNDS} rounds")
    print_table([*rows[0]], [[f"{row['speed']:g}x", *map(str, [*row.values()][1:])] for row in rows])
    out.print(f"[dim]{machine()}[/]")
    if as_json:
        print(json.dumps(rows))
