"""One table of several checkpoints, each at every speed-up, compared with one full model.

    python experiments/compare.py MODEL --data DATA --speedups 2,3 skipdecode=DIR calm=DIR static=DIR-{speedup}

A row is NAME=CHECKPOINT. NAME is skipdecode, multi_exit, calm, a depth rule, or anything else for a label. A CHECKPOINT
with {speedup} is another model for each speed-up; if it has no schedules, all its layers run. A depth rule alone runs
on MODEL, untrained.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from calm import CalmVariant
from depth_rules import RULES
from skipdecode.evaluation.evaluate import METHODS, EvaluateConfig, Variant, evaluate
from skipdecode.loading.load import Checkpoint
from skipdecode.schedule import choose_schedule

LABELS = METHODS | {"unified": "Unified Layer Skipping", "d3": "D3", "hsd": "HSD"}
LABELS |= {"calm": "CALM", "static": "static pruning", "scratch": "small model from scratch"}


def variants(full: Checkpoint, rows: list[str], speedups: list[float], steps: int = 64) -> list[Variant]:
    """Variants of an evaluation, the full model first."""
    found = [Variant("full-1x", full, "full", 1.0, None, "full model")]
    for row in rows:
        name, _, path = row.partition("=")
        for speedup in speedups:
            checkpoint = Checkpoint.resolve(path.replace("{speedup}", f"{speedup:g}")) if path else full
            if name == "calm" or ("{speedup}" in path and not checkpoint.schedules):
                schedule = None
            elif path:
                schedule = choose_schedule(checkpoint.schedules, checkpoint.num_layers, speedup)
            else:
                schedule = RULES[name](full.num_layers, speedup, steps)
            label = LABELS.get(name, name) + ("" if path else ", untrained")
            kind = CalmVariant if name == "calm" else Variant
            found.append(kind(f"{name}-{speedup:g}x", checkpoint, name, speedup, schedule, label))
    return found


def main() -> None:
    """Measure the rows that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--task", default="jsonl")
    parser.add_argument("--speedups", default="2,3")
    parser.add_argument("--output", type=Path, default=Path("comparison"))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--timing-rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    args = vars(parser.parse_args())
    speedups = [float(part) for part in args.pop("speedups").split(",")]
    rows = args.pop("rows")
    config = EvaluateConfig(**args)
    evaluate(config, variants(Checkpoint.resolve(config.model), rows, speedups), say=print)
    print((Path(config.output) / "table.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
