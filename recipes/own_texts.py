"""A data set with a model's own texts: python recipes/own_texts.py E2E_DIR OUTPUTS.jsonl FOLDER TIMES OWN_TIMES

OUTPUTS is what `skipdecode generate --full` wrote: sequence-level distillation (Kim & Rush, 2016). People's texts go in
TIMES times, the model's OWN_TIMES. Validation and test set are the release's.
"""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path


def main(release: str, outputs: str, folder: str, times: str, own_times: str) -> None:
    """Write FOLDER in the release's form."""
    source, target = Path(release), Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for name in ("devset.csv", "testset_w_refs.csv"):
        shutil.copyfile(source / name, target / name)
    with (source / "trainset.csv").open(encoding="utf-8", newline="") as file:
        rows = [(row["mr"], row["ref"]) for row in csv.DictReader(file)]
    with Path(outputs).open(encoding="utf-8") as file:
        own = [(row["mr"], row["text"]) for row in map(json.loads, file)]
    with (target / "trainset.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("mr", "ref"), *rows * int(times), *own * int(own_times)])


if __name__ == "__main__":
    main(*sys.argv[1:])
