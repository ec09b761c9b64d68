"""Write a checkpoint for ``skipdecode train`` to train by the rule of a baseline.

    python experiments/prepare.py hsd MODEL OUTPUT --speedups 2,3
    python experiments/prepare.py static MODEL OUTPUT --speedups 3

With a depth rule, the checkpoint is MODEL with the rule's schedules in its config, which training keeps. With static or
scratch it is a model of fewer layers, for one speed-up, which is then trained at 1x.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from depth_rules import RULES
from pruned import prune, small_model
from skipdecode import Schedule, load
from skipdecode.model.config import num_layers, set_entry, to_config_entry


def main() -> None:
    """Write the checkpoint that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rule", choices=[*RULES, "static", "scratch"])
    parser.add_argument("model")
    parser.add_argument("output", type=Path)
    parser.add_argument("--speedups", default="2", help="target speed-ups, with commas")
    parser.add_argument("--steps", type=int, default=64, help="decode steps over which the speed-up is fitted")
    args = parser.parse_args()
    speedups = [float(part) for part in args.speedups.split(",")]
    model, tokenizer = load(args.model, dtype="float32", device="cpu")
    layers = num_layers(model.config)
    if args.rule in RULES:
        schedules = {speedup: RULES[args.rule](layers, speedup, args.steps) for speedup in speedups}
        set_entry(model.config, to_config_entry(schedules))
    else:
        (speedup,) = speedups
        kept = Schedule.for_speedup(speedup, layers)
        make = prune if args.rule == "static" else small_model
        model = make(model, kept.layers(kept.max_depth))
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
