"""Which layers to keep at a constant depth: the layer whose loss diverges least is dropped, then the next.

    python experiments/search.py MODEL PROMPTS.txt --speedup 1.5 --output schedule.json

Divergence is measured on texts that the full model generates for the prompts. ``skipdecode generate --schedule`` takes
the result. Each dropped layer costs a pass per remaining layer and batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from skipdecode import Schedule, generate, load
from skipdecode.data.collator import batches_of
from skipdecode.data.tasks import Example
from skipdecode.evaluation.divergence import divergence
from skipdecode.model.config import num_layers
from skipdecode.model.teacher_forcing import PrefilledBatch


def drop_layers(layers: int, depth: int, kl: Callable[[Sequence[Schedule]], Sequence[float]]) -> Schedule:
    """Schedule of constant ``depth`` whose layers are left when those that ``kl`` misses least are dropped.

    The bottom layer is never dropped. Layers left come first in its ranking, then the dropped ones, last first.
    """
    left = list(range(layers))
    dropped: list[int] = []
    while len(left) > depth:
        ways = []
        for out in left[1:]:
            order = (*(layer for layer in left if layer != out), out, *reversed(dropped))
            ways.append(Schedule(layers, len(left) - 1, len(left) - 1, 1, decay="constant", order=order))
        distances = list(kl(ways))
        out = left[1 + distances.index(min(distances))]
        left.remove(out)
        dropped.append(out)
    return Schedule(layers, depth, depth, 1, decay="constant", order=(*left, *reversed(dropped)))


def main() -> None:
    """Search as the command line asks, and write the schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path, help="text file with one prompt a line")
    parser.add_argument("--speedup", type=float, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("schedule.json"))
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    prompts = args.prompts.read_text(encoding="utf-8").splitlines()
    output = generate(model, tokenizer, prompts, speedup=1, max_new_tokens=args.max_new_tokens)
    examples = [Example(prompt, (each.text,)) for prompt, each in zip(prompts, output.completions, strict=True)]
    batches = batches_of(examples, tokenizer, args.batch_size, device=model.device, as_written=True)

    def kl(schedules: Sequence[Schedule]) -> list[float]:
        prefilled = (PrefilledBatch(model, batch) for batch in batches)
        found = [each.kl for each in divergence(prefilled, schedules)]
        print(f"{schedules[0].max_depth} layers: KL {min(found):.3f}")
        return found

    layers = num_layers(model.config)
    schedule = drop_layers(layers, Schedule.for_speedup(args.speedup, layers).max_depth, kl)
    schedule.save(args.output)


if __name__ == "__main__":
    main()
