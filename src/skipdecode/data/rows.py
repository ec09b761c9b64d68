"""Read rows of JSONL, CSV or lines of text: with an error per bad row for generation, strictly for training."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO

from ..errors import DataError

FORMATS = ("jsonl", "csv", "text")
SUFFIXES = {".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".txt": "text"}

#: The line at which a row begins (from 1), its columns, and its error or None.
Row = tuple[int, dict[str, Any], str | None]


def read_rows(
    source: Path | bytes,
    format: str | None = None,
    *,
    name: str | None = None,
    strict: bool = False,
    text_column: str = "prompt",
) -> Iterator[Row]:
    """Yield each row of a file or of bytes, with the columns that could be read; skip blank lines of JSONL and CSV.

    Args:
        source: a file, which is read row by row, or its content.
        format: ``jsonl``, ``csv`` or ``text``; by default guessed from the file's suffix, else from the content.
        name: the source's name in error messages.
        strict: raise a row's error in place of yielding it.
        text_column: the name of the one column of ``text``.

    Raises:
        DataError: the source cannot be read, is a JSON array, or is a CSV with a repeated column or unmatched quotes;
            ``format`` is unknown; or, if strict, a row has an error.
    """
    name = name or (str(source) if isinstance(source, Path) else "the input")
    try:
        if format not in (None, *FORMATS):
            raise DataError(f"the input's format is {', '.join(FORMATS)}, not {format!r}")
        with source.open("rb") if isinstance(source, Path) else io.BufferedReader(io.BytesIO(source)) as binary:
            format = format or SUFFIXES.get(Path(name).suffix.lower())
            format = _format(binary.peek(), format, name, text_column)
            # surrogateescape reads a bad byte as a lone surrogate, so that only its row gets an error.
            file = io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline="")
            rows = _text(file, text_column) if format == "text" else {"csv": _csv, "jsonl": _jsonl}[format](file, name)
            for line, row, error in rows:
                if strict and error is not None:
                    raise DataError(f"{name}, line {line}: {error}")
                yield line, row, error
    except OSError as problem:
        raise DataError(f"{name} cannot be read: {problem.strerror}") from None


def _format(begins: bytes, format: str | None, name: str, text_column: str) -> str:
    """Return the format of content that begins so. Raises DataError if it is UTF-16, or a CSV that nothing calls so."""
    if begins.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{name} is UTF-16: UTF-8 is wanted, as iconv -f UTF-16 -t UTF-8 writes it")
    if format is not None:
        return format
    header = [each.strip(b' "\r\xef\xbb\xbf') for each in re.split(rb"[,\t]", begins.partition(b"\n")[0])]
    if len(header) > 1 and text_column.encode() in header:
        raise DataError(
            f"{name} begins like a CSV: separate its columns by commas, and name it .csv (generate: --format csv; or "
            "--format text, if each line is a prompt)"
        )
    return "jsonl" if re.match(rb"(\xef\xbb\xbf)?\s*(\[\s*)?\{", begins) else "text"


def is_text(value: str) -> bool:
    """Return whether UTF-8 can encode ``value``: it has no lone surrogates, from a bad byte or a JSON escape."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _text(file: TextIO, column: str) -> Iterator[Row]:
    for number, line in enumerate(file, 1):
        yield number, {column: _clean(line.rstrip("\r\n"))}, None if is_text(line) else "not UTF-8"


def _jsonl(file: TextIO, name: str) -> Iterator[Row]:
    first = True
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        if first and line.lstrip().startswith("["):
            raise DataError(f"{name} is a JSON array: one object per line is wanted, as jq -c '.[]' writes them")
        first = False
        yield number, *_object(line)


def _object(line: str) -> tuple[dict[str, Any], str | None]:
    if not is_text(line):
        return {}, "not UTF-8"
    try:
        row = json.loads(line)
        written = json.dumps(row, ensure_ascii=False)
    except RecursionError:
        return {}, "nested too deep"
    except ValueError as problem:
        return {}, f"not JSON: {problem}"
    if not isinstance(row, dict):
        return {}, "not a JSON object"
    if not is_text(written):
        return json.loads(_clean(written)), "not UTF-8: it escapes half a character (a lone surrogate)"
    return row, None


def _csv(file: TextIO, name: str) -> Iterator[Row]:
    records = _records(file, name)
    _, header = next(records, (1, []))
    header = [_clean(column) for column in header]
    if len(set(header)) < len(header):
        raise DataError(f"{name} has a column twice: {', '.join(header)}")
    for line, fields in records:
        row = dict(zip_longest(header, map(_clean, fields[: len(header)])))
        if len(fields) > len(header):
            yield line, row, f"{len(fields)} fields where the header has {len(header)}: quote text with commas"
        else:
            yield line, row, None if all(map(is_text, fields)) else "not UTF-8"


def _records(file: TextIO, name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line at which it begins, fields) for each record of a CSV. Raises DataError for unmatched quotes."""
    csv.field_size_limit(2**31 - 1)  # C's long is 32 bits on Windows
    reader = csv.reader(file, strict=True)  # else a stray quote swallows the rows up to the next quote
    begin = 1
    try:
        for fields in reader:
            if fields:
                yield begin, fields
            begin = reader.line_num + 1
    except csv.Error as problem:
        raise DataError(
            f"{name}, line {begin}: the row that begins here cannot be read: {problem} "
            "(a quote that is not closed, or not doubled)"
        ) from None
