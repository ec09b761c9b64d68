"""Whether predicted speed-ups of a decode step hold at short and long contexts.

For each batch size and context one call of ``generate``: a prompt at full depth, some steps at full depth, then some at
each depth that the profile plans for a speed-up there. All steps of a call share its prompt and its minute.

    python benchmarks/contexts.py --shape opt-1.3b --profile opt-1.3b.json --output results/clock/opt-1.3b/contexts
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from skipdecode import Schedule
from skipdecode.clock.profile import STEPS, Profiler
from skipdecode.clock.shapes import random_model, shape_config
from skipdecode.clock.tables import save_tables
from skipdecode.core.cost import Profile
from skipdecode.core.planning import Predictor, Workload, plan
from skipdecode.errors import ScheduleError
from skipdecode.generation.machine import check_profile, machine

HEADS = ("batch", "context", "asked", "layers", "predicted", "got", "got / predicted", "ms / step", "ms at full depth")


def measure(
    profiler: Profiler, profile: Profile, size: int, context: int, speedups: list[float]
) -> list[dict[str, Any]]:
    """Rows of one batch size and context; none where the profile says that no speed-up can be had."""
    layers, depths = profile.num_layers, {}
    predictor = Predictor(profile, [Workload(size, context, 2 * STEPS)])
    for asked in speedups:
        try:
            depths[asked] = plan(predictor, asked, decay="constant").max_depth
        except ScheduleError:
            continue
    if not depths:
        return []
    stairs = [layers, *sorted(set(depths.values()), reverse=True)]
    timed = profiler.measure(size, context, Schedule.from_depths(layers, [d for d in stairs for _ in range(STEPS)]))
    seconds = {sum(counts): (at, took) for counts, at, took in timed.steps}
    rows = []
    for asked, depth in depths.items():
        at, took = seconds[depth]
        (full_at, full_took), here = seconds[layers], profile.step(size, at)
        full = profile.step(size, full_at)
        order = Schedule.full(layers).ranking
        cost = [
            one.beyond + sum(one.layers[profile.layers[layer]] for layer in order[:count])
            for one, count in ((full, layers), (here, depth))
        ]
        rows.append(
            {
                "batch_size": size,
                "context": context,
                "asked": asked,
                "depth": depth,
                "predicted_step_ratio": round(cost[0] / cost[1], 3),
                "step_ratio": round(full_took / took, 3),
                "step_ms": round(1e3 * took, 2),
                "full_step_ms": round(1e3 * full_took, 2),
            }
        )
    return rows


def main() -> None:
    """Measure all cells, and write the table after each of them.

    Raises:
        UsageError: the profile is of another shape or machine.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--cells", default="1x128,1x512,1x2000,8x128,8x512,8x2000,32x128,32x512")
    parser.add_argument("--speedups", default="2,3,5")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    profile = Profile.load(options.profile)
    check_profile(profile, shape_config(options.shape), profile.dtype, "cpu")
    model, tokenizer = random_model(options.shape, profile.dtype, "cpu")
    profiler = Profiler(model, tokenizer)
    about = {
        "model": f"{options.shape}, random weights, {profile.dtype}",
        "command": f"python benchmarks/contexts.py {shlex.join(sys.argv[1:])}",
        "machine": machine(str(model.device)),
        "ratios": "a decode step's seconds at full depth over those at this depth, in one call of generate each",
    }
    rows: list[dict[str, Any]] = []
    for cell in options.cells.split(","):
        size, context = map(int, cell.split("x"))
        measured = measure(profiler, profile, size, context, [float(each) for each in options.speedups.split(",")])
        if not measured:
            print(f"{cell}: none of {options.speedups} can be had", flush=True)
            continue
        rows += measured
        cells = [
            [
                str(row["batch_size"]),
                str(row["context"]),
                f"{row['asked']:g}x step",
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
        print(*cells[-len(measured) :], sep="\n", flush=True)


if __name__ == "__main__":
    main()
