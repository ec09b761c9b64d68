"""Rows for a generation job: JSONL, CSV or lines of text. A bad row is reported, never fatal."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError, TaskError
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
        InputError: no such file, an unknown format, a JSON array, a CSV without the task's columns or with quotes that
            do not match, or no rows at all.
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
    form = _form(row, task)
    own = {name: row.get(column) for column, name in form.items()}
    columns = {column: row.get(column) for column in _prompt_columns(form, task)}
    item = Item(line, columns, error=error)
    for column, value in columns.items():
        if isinstance(value, str) and not _is_text(value):
            item.error, columns[column] = "not UTF-8", value.encode("utf-8", "replace").decode()
    reference = own.get(task.reference)
    if isinstance(reference, str) and not _is_text(reference):
        item.error, reference = "not UTF-8", None
    missing = [column for column, value in columns.items() if not _holds_text(value)]
    if item.error is None and missing:
        item.error = f"no {' and no '.join(missing)}"
    if item.error is None:
        try:
            item.prompt = task.prompt({name: value for name, value in own.items() if isinstance(value, str)})
        except TaskError as problem:
            item.error = str(problem)
    item.references = [" ".join(reference.split())] if isinstance(reference, str) and reference.strip() else []
    return item


def _form(row: dict[str, Any], task: Task) -> Mapping[str, str]:
    """The task's form that most of the row's text is in, that of its prompt above all."""

    def fills(form: Mapping[str, str]) -> tuple[bool, int]:
        return (
            all(_holds_text(row.get(column)) for column in _prompt_columns(form, task)),
            sum(_holds_text(row.get(column)) for column in form),
        )

    return max(task.forms, key=fills)


def _prompt_columns(form: Mapping[str, str], task: Task) -> list[str]:
    return [column for column, name in form.items() if name != task.reference]


def _holds_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _bytes(source: str) -> bytes:
    if source == "-":
        if sys.stdin is None:
            raise InputError("standard input is closed: give --input FILE")
        return sys.stdin.buffer.read()
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror}") from None


def _guess(source: str, data: bytes) -> str:
    known = {".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".txt": "text"}
    begins_like_json = re.match(rb"(\xef\xbb\xbf)?\s*(\[\s*)?\{", data)
    return known.get(Path(source).suffix.lower()) or ("jsonl" if begins_like_json else "text")


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
        yield number, {_prompt_columns(task.forms[0], task)[0]: line}, error


def _jsonl(data: bytes, task: Task) -> Rows:
    if data.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        raise InputError("the input is a JSON array: one object per line is wanted, as jq -c '.[]' writes them")
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
    text = io.StringIO(data.decode("utf-8-sig", errors="surrogateescape"), newline="")
    before = csv.field_size_limit(2**31 - 1)  # the most that C's long holds everywhere
    try:
        reader = csv.DictReader(text, strict=True)
        header = list(reader.fieldnames or [])
        wanted = [_prompt_columns(form, task) for form in task.forms]
        if not any(set(columns) <= set(header) for columns in wanted):
            named = " or ".join(dict.fromkeys(" and ".join(columns) for columns in wanted))
            raise InputError(f"the CSV has no column {named}; it has {', '.join(header) or 'none'}")
        for row in reader:
            # A row's own line is the one its last line break ends; quoted breaks are counted back.
            inside = sum(str(value).count("\n") for value in row.values())
            more = len(row.pop(None, []))
            error = f"{len(header) + more} fields where the header has {len(header)}: quote text with commas"
            yield reader.line_num - inside, row, error if more else None
    except csv.Error as problem:
        raise InputError(
            f"the CSV's row that begins at line {reader.line_num + 1} cannot be read: {problem} "
            "(a quote that is not closed, or not doubled)"
        ) from None
    finally:
        csv.field_size_limit(before)
