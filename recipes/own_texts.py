"""A training file with a model's own texts.

    python recipes/own_texts.py TRAIN OUTPUTS.jsonl REFERENCE TARGET TIMES OWN_TIMES

OUTPUTS is what `skipdecode generate --full` wrote: sequence-level distillation (Kim & Rush, 2016). People's texts,
TRAIN's column REFERENCE, go in TIMES times, the model's OWN_TIMES; of the other columns those that OUTPUTS has too.
A text that was cut off keeps its finish_reason, so that no end is learnt there. CSV or JSONL, as the files' names say.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import typer

from skipdecode.data.inputs import OUTPUT_COLUMNS
from skipdecode.data.rows import read_rows


def main(train: Path, outputs: Path, reference: str, target: Path, times: int, own_times: int) -> None:
    """Write TARGET: the rows of TRAIN, TIMES over, and the texts of OUTPUTS as their REFERENCE, OWN_TIMES over."""
    people = [row for _, row, _ in read_rows(train, strict=True)]
    texts = [row for _, row, _ in read_rows(outputs, strict=True) if (row.get("text") or "").strip()]
    written = (reference, *OUTPUT_COLUMNS)
    columns = [name for name in people[0] if name not in written and all(name in row for row in texts)]
    if not texts or not columns or reference not in people[0]:
        raise typer.BadParameter(
            f"{train} needs the column {reference}, and one of the prompts that the rows of {outputs} have too"
        )
    cut = any(row.get("finish_reason") == "length" for row in texts)
    kept = [*columns, reference, *(["finish_reason"] if cut else [])]
    rows = [{**row, "finish_reason": ""} for row in people] * times
    rows += [{**row, reference: row["text"]} for row in texts] * own_times
    rows = [{name: row[name] for name in kept} for row in rows]
    with target.open("w", encoding="utf-8", newline="") as file:
        if target.suffix == ".csv":
            writer = csv.DictWriter(file, kept)
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    typer.run(main)
