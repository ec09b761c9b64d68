"""Whether predicted speed-ups of a decode step hold at contexts between those that were measured.

Steps are timed at full depth and at a half, a third, … of the layers, at the lengths that a profile is made of and at
those in question, in turn, several rounds of all: what drifts, drifts for all of them. What the first say of the second
stands beside what was measured. With --profile, what a stored profile says does too: that one has the drift in it.

    python benchmarks/contexts.py --shape opt-1.3b --output results/clock/opt-1.3b/contexts
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skipdecode.clock.layer_kv import measure_layer_kv
from skipdecode.clock.least_squares import Timed, fastest, fit_passes
from skipdecode.planning.kv_bytes import peak_kv_bytes

from skipdecode import Schedule
from skipdecode.clock.model_shapes import random_model, shape_config
from skipdecode.clock.profiler import STEPS, Profiler
from skipdecode.clock.tables import save_tables
from skipdecode.errors import UsageError
from skipdecode.planning.clock import check_profile
from skipdecode.planning.profile import Pass, Profile
from skipdecode.weights.device import machine
from skipdecode.weights.memory import available_memory

HEADS = ("batch", "context", "layers", "predicted", "got", "got / predicted", "ms / step", "ms at full depth")
#: Of the free memory, what keys and values may take.
SHARE = 0.8


def measure(
    profiler: Profiler, sizes: Sequence[int], lengths: Sequence[int], schedule: Schedule, rounds: int
) -> list[Timed]:
    """The fastest of several rounds over all cells; without the cells whose keys and values do not fit into memory."""
    kept = measure_layer_kv(profiler.model)
    room = SHARE * available_memory(profiler.model.device)
    cells: dict[tuple[int, int], list[Timed]] = {}
    for size in sizes:
        for length in lengths:
            if size * peak_kv_bytes(kept, schedule, length, schedule.horizon) < room:
                cells[size, length] = []
            else:
                print(f"{size}x{length}: keys and values do not fit into memory", flush=True)
    profiler.steps(1, lengths[0], schedule)  # warms up
    for round_ in range(rounds):
        for (size, length), timed in cells.items():
            timed.append(profiler.steps(size, length, schedule))
            print(f"round {round_ + 1}: {size}x{length}", flush=True)
    return [fastest(timed) for timed in cells.values()]


def rows_of(timed: Timed, profile: Profile, stored: Profile | None) -> list[dict[str, Any]]:
    """One cell at each depth, beside what the others say of it."""
    (_, full_at, full), *rest = timed.passes
    everything, rows = timed.passes[0][0], []
    for counts, at, took in rest:

        def says(profile: Profile, counts: tuple[int, ...] = counts, at: int = at) -> float:
            size = timed.batch_size
            return cost(profile.step(size, full_at), everything) / cost(profile.step(size, at), counts)

        row = {
            "batch_size": timed.batch_size,
            "context": timed.length,
            "depth": sum(counts),
            "predicted_step_ratio": round(says(profile), 3),
            "step_ratio": round(full / took, 3),
            "step_ms": round(1e3 * took, 2),
            "full_step_ms": round(1e3 * full, 2),
        }
        rows.append(row | ({"stored_step_ratio": round(says(stored), 3)} if stored else {}))
    return rows


def cost(one: Pass, counts: Sequence[int]) -> float:
    """Seconds of a pass with so many layers of each kind."""
    return one.beyond + sum(count * layer for count, layer in zip(counts, one.layers, strict=True))


def off(rows: Sequence[dict[str, Any]], name: str) -> str:
    """How far the ratios are off what was predicted, in words."""
    shares = [abs(row["step_ratio"] / row[name] - 1) for row in rows]
    within = sum(share <= 0.05 for share in shares)
    return f"{statistics.mean(shares):.1%} on average, {max(shares):.1%} at most, {within} of {len(shares)} within 5%"


def numbers(text: str) -> list[int]:
    """``"1,8"`` as whole numbers, ascending."""
    return sorted({int(part) for part in text.split(",")})


def main() -> None:
    """Measure all cells and write the table.

    Raises:
        UsageError: contexts outside the lengths measured, or a profile of another shape or machine.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32])
    parser.add_argument("--lengths", type=numbers, default=[64, 256, 1024, 2048], help="what a prediction is made of")
    parser.add_argument("--contexts", type=numbers, default=[128, 512, 1500], help="what is predicted")
    parser.add_argument("--speedups", type=numbers, default=[2, 3, 5, 8], help="of layers")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    asked = {*options.contexts} - {*options.lengths}
    if not asked or not options.lengths[0] < min(asked) <= max(asked) < options.lengths[-1]:
        raise UsageError("contexts lie between the lengths, and are others")
    stored = Profile.load(options.profile) if options.profile else None
    if stored:
        check_profile(stored, shape_config(options.shape), options.dtype, "cpu")
    model, tokenizer = random_model(options.shape, options.dtype, "cpu")
    profiler = Profiler(model, tokenizer)
    layers = len(profiler.layers)
    depths = sorted({layers, *(max(round(layers / speedup), 1) for speedup in options.speedups)}, reverse=True)
    schedule = Schedule.from_depths(layers, [depth for depth in depths for _ in range(STEPS)])
    timed = measure(profiler, options.batch, sorted({*options.lengths, *asked}), schedule, options.repeats)
    passes, error = fit_passes([each for each in timed if each.length in options.lengths])
    placed = {"machine": machine("cpu"), "dtype": options.dtype, "device": "cpu"}
    profile = Profile(
        options.shape, "", kinds=profiler.kinds, layers=profiler.layers, prompts=(), steps=passes, **placed
    )
    longest = {one.batch_size: one.length for one in passes}
    between = [each for each in timed if each.length in asked and each.length < longest.get(each.batch_size, 0)]
    rows = [row for each in between for row in rows_of(each, profile, stored)]
    about = {
        "model": f"{options.shape}, random weights, {options.dtype}",
        "command": f"python benchmarks/contexts.py {shlex.join(sys.argv[1:])}",
        "machine": machine("cpu"),
        "ratios": "a decode step's seconds at full depth over those at this depth, the fastest of each depth's rounds",
        "predicted": f"from contexts of {', '.join(map(str, options.lengths))}, timed in the same rounds",
        "off the prediction": off(rows, "predicted_step_ratio"),
        "a measurement off the others of its batch size": "unknown" if error is None else f"{error:.1%} on average",
    }
    if stored:
        about["off the stored profile"] = off(rows, "stored_step_ratio")
    cells = [
        [
            str(row["batch_size"]),
            str(row["context"]),
            str(row["depth"]),
            f"{row['predicted_step_ratio']:.2f}x",
            f"{row['step_ratio']:.2f}x",
            f"{row['step_ratio'] / row['predicted_step_ratio']:.3f}",
            f"{row['step_ms']:.1f}",
            f"{row['full_step_ms']:.1f}",
        ]
        for row in rows
    ]
    save_tables(options.output, rows, HEADS, cells, about)
    print((options.output / "table.md").read_text())


if __name__ == "__main__":
    main()
