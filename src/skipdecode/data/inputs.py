"""Read the inputs of a generation job, one item per row; a bad row gives an item with an error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DataError
from .chat import Prompt
from .rows import read_rows
from .tasks import Example, Task
from .tasks.base import gather

#: Columns that a job adds to its output; the input's columns of these names are not copied.
OUTPUT_COLUMNS = ("text", "tokens", "finish_reason", "error")


@dataclass
class Item:
    """One input: its line in the file (from 1), the columns to copy to the output, and its prompt or error."""

    line: int
    columns: dict[str, Any]
    prompt: Prompt = ""
    error: str | None = None
    references: list[str] = field(default_factory=list)


def read_items(source: str, task: Task, format: str | None = None) -> list[Item]:
    """Read all items of ``source``, a path or ``-`` for standard input; a row that cannot be used has an ``error``.

    If ``task.distinct`` is set, rows with the same prompt become one item with the references of all of them.

    Args:
        format: ``jsonl``, ``csv`` or ``text``; None: by the file's suffix, else by the content.

    Raises:
        DataError: the file is missing, has no rows, or has none of the task's columns; it holds a JSON array, not lines
            of JSON; it is a CSV with unmatched quotes or a repeated column; or the format is unknown.
    """
    if source == "-" and sys.stdin is None:
        raise DataError("standard input is closed: give --input FILE")
    data, name = (sys.stdin.buffer.read(), "standard input") if source == "-" else (Path(source), source)
    items: list[Item] = []
    seen: dict[Prompt, Item] = {}
    fits = False  # whether a row has the task's columns, or could not be read at all
    for line, row, error in read_rows(data, format, name=name, text_column=task.prompt_columns[0][0]):
        fits |= not row or any(set(columns) <= set(row) for columns in task.prompt_columns)
        item = to_item(line, row, task, error)
        if task.distinct and item.error is None:
            first = seen.setdefault(item.prompt, item)
            if first is not item:
                first.references += item.references
                continue
        items.append(item)
    if not items:
        raise DataError(f"{name} holds no rows")
    if not fits:
        columns = " or ".join(" and ".join(columns) for columns in task.prompt_columns)
        raise DataError(f"{name} has no column {columns}; it has {', '.join(row)[:200] or 'none'}")
    return items


def read_examples(task: Task, source: Path, split: str, say: Callable[[str], object]) -> list[Example]:
    """Read the examples of a split, or all valid examples of a file; those with equal prompts in a file are merged.

    Args:
        task: how the data is read and prompted.
        source: folder with the task's files, hub name, or one file, in which prompts are enough.
        split: ``validation`` or ``test``; ignored for a file.
        say: called with a message about each bad line of a file.

    Raises:
        DataError: the data cannot be read.
    """
    if not source.is_file():
        return task.read(source, split)
    items = read_items(str(source), task)
    for item in items:
        if item.error:
            say(f"{source}, line {item.line}: {item.error}")
    return gather((item.prompt, item.references) for item in items if not item.error)


def to_item(line: int, row: dict[str, Any], task: Task, error: str | None = None) -> Item:
    """Make the item of a row; it gets ``error`` (not None: the row could not be read), or one that the task finds.

    The item has the row's columns but those in ``OUTPUT_COLUMNS``; a prompt from ``text`` is kept as ``prompt``.
    """
    item = Item(line, {name: value for name, value in row.items() if name not in OUTPUT_COLUMNS}, error=error)
    if error is None:
        try:
            example = task.example(row)
            item.prompt, item.references = example.prompt, list(example.references)
        except DataError as problem:
            item.error = str(problem)
    if "text" in row and "prompt" not in item.columns:
        item.columns = {"prompt": item.prompt or row["text"]} | item.columns
    return item
