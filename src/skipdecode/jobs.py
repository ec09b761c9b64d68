"""A generation job over many rows: with its journal, a killed job goes on without losing or repeating a row."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .errors import JobError
from .generation import Cost, Row, batches, positions
from .inputs import Item
from .prompts import encode_prompts
from .schedule import Schedule


class Journal:
    """Finished batches, one JSON line each, in ``OUTPUT.partial``; its first line names the job it belongs to."""

    def __init__(self, output: Path, job: str) -> None:
        self.path = output.with_name(output.name + ".partial")
        self.rows: dict[int, Row] = {}
        self.costs: list[Cost] = []
        good = self._read(job) if self.path.exists() else 0
        self._file = self.path.open("r+b" if good else "wb")
        # A line cut short by the kill is dropped: its batch is done again, whole.
        self._file.truncate(good)
        self._file.seek(good)
        if not good:
            self._append({"job": job})

    def _read(self, job: str) -> int:
        """Take in the whole lines; returns how many bytes they are, 0 to start anew."""
        good, entries = 0, []
        with self.path.open("rb") as file:
            for line in file:
                try:
                    entry = json.loads(line) if line.endswith(b"\n") else None
                except json.JSONDecodeError:
                    entry = None
                if entry is None:
                    break
                entries.append(entry)
                good += len(line)
        if not entries or entries[0].get("job") != job:
            if len(entries) > 1:
                raise JobError(
                    f"{self.path} belongs to a job with another input, model or options; "
                    "run that one to its end, or give --overwrite to drop it"
                )
            return 0
        for entry in entries[1:]:
            self.rows.update({int(i): Row(**row) for i, row in entry["rows"].items()})
            self.costs.append(Cost(**entry["cost"]))
        return good

    def add(self, indices: Sequence[int], rows: Sequence[Row], cost: Cost) -> None:
        """Keep one finished batch; on return it is on the disk."""
        self._append({"rows": {i: asdict(row) for i, row in zip(indices, rows, strict=True)}, "cost": asdict(cost)})
        self.rows.update(zip(indices, rows, strict=True))
        self.costs.append(cost)

    def _append(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """The output is written: the journal goes."""
        self._file.close()
        self.path.unlink()


def check_lengths(items: Sequence[Item], ids: Sequence[Sequence[int]], limit: int | None, new_tokens: int) -> None:
    """Mark the rows that the model has no positions for."""
    for item, row in zip(items, ids, strict=True):
        if item.error is None and limit is not None and len(row) + new_tokens > limit:
            item.error = (
                f"too long: {len(row)} prompt tokens and {new_tokens} new ones, but the model has {limit} positions"
            )


def run(
    items: Sequence[Item],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    schedule: Schedule | None,
    *,
    batch_size: int,
    max_new_tokens: int,
    journal: Journal | None = None,
    on_batch: Callable[[Cost], None] | None = None,
    seed: int = 0,
    **options: Any,
) -> tuple[dict[int, Row], Cost]:
    """Generate what the journal does not hold yet.

    Returns the rows by index of their item (bad items have none) and what they cost, earlier runs included.
    """
    ids = encode_prompts(tokenizer, [item.prompt for item in items]) if items else []
    check_lengths(items, ids, positions(model), max_new_tokens)
    total = Cost(model.config.get_text_config(decoder=True).num_hidden_layers)
    rows: dict[int, Row] = dict(journal.rows) if journal else {}
    for cost in journal.costs if journal else []:
        total += cost
    todo = {i: ids[i] for i, item in enumerate(items) if item.error is None and i not in rows}
    for keys, done, cost in batches(
        model, tokenizer, todo, schedule, batch_size, seed, max_new_tokens=max_new_tokens, **options
    ):
        if journal:
            journal.add(keys, done, cost)
        rows.update(zip(keys, done, strict=True))
        total += cost
        if on_batch:
            on_batch(cost)
    return rows, total


def lines(items: Sequence[Item], rows: dict[int, Row]) -> list[str]:
    """The output's JSONL, in the input's order."""
    made = [
        item.columns | ({"error": f"line {item.line}: {item.error}"} if item.error else asdict(rows[i]))
        for i, item in enumerate(items)
    ]
    return [json.dumps(line, ensure_ascii=False) for line in made]
