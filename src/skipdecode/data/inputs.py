"""What a generation job is given: one item per row. A bad row is reported, never fatal."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import TaskError
from .chat import Prompt
from .rows import guess_format, read_rows
from .tasks import Task

#: Columns that an output has of its own: an input's of these names are not repeated there.
OUTPUT_COLUMNS = ("text", "tokens", "finish_reason", "error")


@dataclass
class Item:
    """One row: its line in the file (from 1), the columns the output repeats, its prompt or what is wrong with it."""

    line: int
    columns: dict[str, Any]
    prompt: Prompt = ""
    error: str | None = None
    references: list[str] = field(default_factory=list)


def read_items(source: str, task: Task, form: str | None = None) -> list[Item]:
    """All rows of ``source`` (a path, or ``-`` for standard input).

    Where the task says that inputs repeat (one row per reference), each distinct input is kept once.

    Raises:
        TaskError: no such file, an unknown format, a JSON array, a CSV without the task's columns or with quotes that
            do not match, or no rows at all.
    """
    data, name = _bytes(source), "standard input" if source == "-" else source
    form = form or guess_format(source, data)
    items: list[Item] = []
    seen: dict[Prompt, Item] = {}
    fits = False  # some row, or one that cannot be read, may have the columns
    for line, row, error in read_rows(data, form, name=name, text_column=task.prompt_columns[0][0]):
        has_columns = any(set(columns) <= set(row) for columns in task.prompt_columns)
        if form == "csv" and not has_columns:
            raise TaskError(_no_column(name, row, task))
        fits |= has_columns or error is not None
        item = to_item(line, row, task, error)
        if task.distinct and item.error is None:
            first = seen.setdefault(item.prompt, item)
            if first is not item:
                first.references += item.references
                continue
        items.append(item)
    if not items:
        raise TaskError(f"{name} holds no rows")
    if not fits:
        raise TaskError(_no_column(name, row, task))
    return items


def _no_column(name: str, row: dict[str, Any], task: Task) -> str:
    columns = " or ".join(" and ".join(columns) for columns in task.prompt_columns)
    return f"{name} has no column {columns}; it has {', '.join(row)[:200] or 'none'}"


def to_item(line: int, row: dict[str, Any], task: Task, error: str | None = None) -> Item:
    """The item of one row; ``error`` is what is wrong with it already.

    It has all columns of the row. A prompt that is in a column of the output's own (``text``) stands as ``prompt``.
    """
    item = Item(line, {name: value for name, value in row.items() if name not in OUTPUT_COLUMNS}, error=error)
    if error is None:
        try:
            example = task.example(row)
            item.prompt, item.references = example.prompt, list(example.references)
        except TaskError as problem:
            item.error = str(problem)
    if "text" in row and "prompt" not in item.columns:
        item.columns = {"prompt": item.prompt or row["text"]} | item.columns
    return item


def _bytes(source: str) -> bytes:
    if source == "-":
        if sys.stdin is None:
            raise TaskError("standard input is closed: give --input FILE")
        return sys.stdin.buffer.read()
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise TaskError(f"{source} cannot be read: {error.strerror}") from None
