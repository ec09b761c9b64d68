"""A training file with a model's own texts.

    python recipes/own_texts.py TRAIN OUTPUTS.jsonl REFERENCE TARGET TIMES OWN_TIMES

OUTPUTS is what `skipdecode generate --full` wrote: sequence-level distillation (Kim & Rush, 2016). People's texts,
TRAIN's column REFERENCE, go in TIMES times, the model's OWN_TIMES. CSV or JSONL, as the files' names say.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

from skipdecode.data.rows import read_rows


def main(train: str, outputs: str, reference: str, target: str, times: str, own_times: str) -> None:
    """Write TARGET."""
    people = [row for _, row, _ in read_rows(Path(train), strict=True)]
    columns = [name for name in people[0] if name in ("mr", "title", "post")]
    rows = [{name: row[name] for name in (*columns, reference)} for row in people] * int(times)
    texts = [row for _, row, _ in read_rows(Path(outputs), strict=True) if row.get("text", "").strip()]
    rows += [{name: row[name] for name in columns} | {reference: row["text"]} for row in texts] * int(own_times)
    with Path(target).open("w", encoding="utf-8", newline="") as file:
        if target.endswith(".csv"):
            writer = csv.DictWriter(file, [*columns, reference])
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
