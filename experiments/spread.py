"""How varied prompts are: first words, lengths, and how like each other.

python experiments/spread.py PROMPTS.jsonl [MORE.jsonl ...] [--sample 1000]
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from pathlib import Path

import torch
import typer

from skipdecode.data.examples import read_examples
from skipdecode.data.tasks import get_task


def main(files: list[Path], sample: int = 1000) -> None:
    """Print a line for each file, of as many of its prompts."""
    print("file | prompts | first words | of 1000, the commonest | words (5%, median, 95%) | nearest neighbour")
    for file in files:
        prompts = [each.prompt for each in read_examples(file, get_task(), "train", references=False)]
        texts = [prompt if isinstance(prompt, str) else prompt[-1].content for prompt in prompts]
        texts = random.Random(0).sample(texts, min(sample, len(texts)))
        first = Counter(text.split()[0] for text in texts if text.split())
        lengths = sorted(len(text.split()) for text in texts)
        low, middle, high = (lengths[int(share * (len(lengths) - 1))] for share in (0.05, 0.5, 0.95))
        word, count = first.most_common(1)[0]
        near = statistics.median(nearest(texts))
        share = f"{word} {1000 * count // len(texts)}"
        print(f"{file} | {len(texts)} | {len(first)} | {share} | {low}, {middle}, {high} | {near:.2f}")


def nearest(texts: list[str]) -> list[float]:
    """Cosine of each text to the one most like it, by words weighted by their rarity."""
    bags = [Counter(text.lower().split()) for text in texts]
    seen = Counter(word for bag in bags for word in bag)
    places = {word: place for place, word in enumerate(seen)}
    matrix = torch.zeros(len(texts), len(places))
    for row, bag in enumerate(bags):
        for word, count in bag.items():
            matrix[row, places[word]] = count * math.log(len(texts) / seen[word])
    matrix = torch.nn.functional.normalize(matrix)
    alike = matrix @ matrix.T
    return alike.fill_diagonal_(0).max(1).values.tolist()


if __name__ == "__main__":
    typer.run(main)
