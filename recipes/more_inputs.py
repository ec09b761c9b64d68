"""Inputs that nobody has written a text for: python recipes/more_inputs.py E2E_DIR OUTPUT.csv COUNT

First every training input once, then COUNT new ones, drawn value by value from the training set's, with as many
attributes as the validation inputs have. None is in the validation or the test set.
"""

from __future__ import annotations

import csv
import random
import re
from collections import Counter
from pathlib import Path

import typer

PART = re.compile(r"(?:^|, )([^\[\],]+)\[([^\]]*)\]")


def inputs(path: Path) -> list[str]:
    """The distinct inputs of a release file, in its order."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(dict.fromkeys(row["mr"] for row in csv.DictReader(file)))


def main(folder: Path, target: Path, count: int) -> None:
    """Write the training inputs of the E2E release in FOLDER, and COUNT new ones, to TARGET."""
    train, validation, test = (inputs(folder / name) for name in ("trainset.csv", "devset.csv", "testset_w_refs.csv"))
    rng = random.Random(0)
    values: dict[str, Counter[str]] = {}
    for attribute, value in (part for row in train for part in PART.findall(row)):
        values.setdefault(attribute, Counter())[value] += 1
    longest = max((PART.findall(row) for row in train), key=len)  # has every attribute, in the order all inputs keep
    order = [attribute for attribute, _ in longest]
    sizes = [len(PART.findall(row)) for row in validation]
    known, made = {*train, *validation, *test}, dict.fromkeys(train)
    while len(made) < len(train) + count:
        others = rng.sample([a for a in order if a != "name"], rng.choice(sizes) - 1)
        chosen = [a for a in order if a == "name" or a in others]
        row = ", ".join(f"{a}[{rng.choices(*zip(*values[a].items(), strict=True))[0]}]" for a in chosen)
        if row not in known:
            made[row] = None
    with target.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["mr"], *([row] for row in made)])


if __name__ == "__main__":
    typer.run(main)
