"""Rows for a generation job: JSONL, CSV or lines of text. A bad row is reported, never fatal."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import InputError, TaskError
from .tasks import Task

FORMATS = ("jsonl", "csv", "text")


@dataclass
class Item:
    """One row: its line in the file (from 1), the columns the output repeats, its prompt or what is wrong with it."""

    line: int
    columns: dict[str, Any]
    prompt: str = ""
    error: str | None = None
    references: list[str] = field(default_factory=list)


def read_items(source: str, task: Task, form: str | None = None) -> list[Item]:
    """All rows of ``source`` (a path, or ``-`` for standard input).

    Where the task says that inputs repeat (one row per reference), each distinct input is kept once.

    Raises:
        InputError: no such file, an unknown format, a CSV without the task's columns, or no rows at all.
    """
    data = _bytes(source)
    form = form or _guess(source, data)
    if form not in FORMATS:
        raise InputError(f"the input's format is {', '.join(FORMATS)}, not {form!r}")
    reader = {"jsonl": _jsonl, "csv": _csv, "text": _text}[form]
    items: list[Item] = []
    seen: dict[str, Item] = {}
    for line, row, error in reader(data, task):
        item = _item(line, row, error, task)
        if task.distinct and item.error is None:
            first = seen.setdefault(item.prompt, item)
            if first is not item:
                first.references += item.references
                continue
        items.append(item)
    if not items:
        raise InputError(f"{'standard input' if source == '-' else source} holds no rows")
    return items


def _item(line: int, row: dict[str, Any], error: str | None, task: Task) -> Item:
    columns = {name: row.get(name) for name in task.columns}
    item = Item(line, columns, error=error)
    for name, value in columns.items():
        if isinstance(value, str) and not _is_text(value):
            item.error, columns[name] = "not UTF-8", value.encode("utf-8", "replace").decode()
    missing = [name for name, value in columns.items() if not isinstance(value, str) or not value.strip()]
    if item.error is None and missing:
        item.error = f"no {' and no '.join(missing)}"
    if item.error is None:
        try:
            item.prompt = task.prompt(row)
        except TaskError as problem:
            item.error = str(problem)
    reference = row.get(task.reference)
    item.references = [" ".join(reference.split())] if isinstance(reference, str) and reference.strip() else []
    return item


def _bytes(source: str) -> bytes:
    if source == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror}") from None


def _guess(source: str, data: bytes) -> str:
    known = {".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".txt": "text"}
    return known.get(Path(source).suffix.lower()) or (
        "jsonl" if data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{" else "text"
    )


def _is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: no lone surrogates, from a bad byte or from JSON's escapes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


Rows = Iterator[tuple[int, dict[str, Any], str | None]]


def _lines(data: bytes) -> Iterator[tuple[int, str, str | None]]:
    for number, raw in enumerate(data.splitlines(), 1):
        try:
            yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8"), None
        except UnicodeDecodeError:
            yield number, raw.decode("utf-8", errors="replace"), "not UTF-8"


def _text(data: bytes, task: Task) -> Rows:
    for number, line, error in _lines(data):
        yield number, {task.columns[0]: line}, error


def _jsonl(data: bytes, task: Task) -> Rows:
    for number, line, error in _lines(data):
        if not line.strip():
            continue
        if error is None:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as problem:
                row, error = {}, f"not JSON: {problem}"
            if not isinstance(row, dict):
                row, error = {}, "not a JSON object"
        else:
            row = {}
        yield number, row, error


def _csv(data: bytes, task: Task) -> Rows:
    # surrogateescape lets a bad byte through as a lone surrogate, so that only its own row is lost.
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(io.StringIO(data.decode("utf-8-sig", errors="surrogateescape"), newline=""))
    missing = [name for name in task.columns if name not in (reader.fieldnames or [])]
    if missing:
        raise InputError(f"the CSV has no column {' and no column '.join(missing)}; it has {reader.fieldnames}")
    while True:
        # A row's own line is the one its last line break ends; quoted breaks are counted back.
        try:
            row = next(reader, None)
        except csv.Error as problem:
            raise InputError(f"the CSV cannot be read at line {reader.line_num}: {problem}") from None
        if row is None:
            return
        inside = sum(str(value).count("\n") for value in row.values())
        yield reader.line_num - inside, {key: value for key, value in row.items() if key}, None
