"""Rows of files and of data sets on the Hub, and the examples that a task makes of them."""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO, TypeVar

from ..errors import DataError
from .chat import Prompt
from .tasks import Example, Task, split_answer

T = TypeVar("T")
#: Where a row stands, for messages, and its columns.
Row = tuple[str, Mapping[str, Any]]
#: Names of a split's file in a folder, without the suffix; the first that exists is read.
SPLITS = {
    "train": ("train", "trainset"),
    "validation": ("validation", "valid", "dev", "devset", "validation_300"),
    "test": ("test", "testset_w_refs"),
}
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".csv.gz", ".json.gz", ".txt", ".txt.gz")


def read_rows(path: str | Path, text_column: str = "prompt") -> Iterator[Row]:
    """Rows of a ``.jsonl``, ``.csv``, ``.txt`` or ``.parquet`` file; the first three may be compressed (``.gz``).

    Lines of text are rows with one column, ``text_column``. JSON and CSV are read without ``datasets``, which turns
    texts that look like dates, numbers or ``NA`` into other values, and counts bad rows from the start of a block.

    Raises:
        DataError: the file cannot be read, or a row is bad; the message has its number.
    """
    name = str(path).lower()
    kind = Path(name.removesuffix(".gz")).suffix
    readers = {".jsonl": _jsonl, ".json": _jsonl, ".csv": _csv, ".txt": _text}
    if kind not in {*readers, ".parquet"}:
        raise DataError(f"{path} is none of {', '.join(readers)} and .parquet: name it by what it holds")
    if kind == ".parquet":
        yield from _from_datasets(str(path), "parquet", None, data_files=str(path), split="train")
        return
    try:
        with (gzip.open if name.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig", newline="") as file:
            for number, row in readers[kind](file):
                yield f"{path}, row {number}", row if isinstance(row, Mapping) else {text_column: row}
    except (OSError, EOFError, ValueError, zlib.error, csv.Error) as error:
        raise DataError(f"{path}: {error}") from error


def _jsonl(file: TextIO) -> Iterator[tuple[int, Any]]:
    for number, line in _text(file):
        try:
            row = json.loads(line, parse_constant=_finite, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"row {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is not a JSON object: one object a line is expected")
        yield number, row


def _finite(number: str) -> float:
    if math.isfinite(value := float(number)):
        return value
    raise ValueError(f"{number} is no finite number: write null")


def _csv(file: TextIO) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(file, strict=True)
    header = next(reader, [])
    if twice := [name for name in header if name and header.count(name) > 1]:
        raise ValueError(f"the header names {twice[0]!r} twice: rename one")
    for number, fields in enumerate((fields for fields in reader if fields), 1):
        if len(fields) > len(header):
            raise ValueError(f"row {number} has {len(fields)} fields, the header {len(header)}: quote commas")
        yield number, dict(zip_longest(header, fields))


def _text(file: TextIO) -> Iterator[tuple[int, str]]:
    return ((number, line.rstrip("\r\n")) for number, line in enumerate(file, 1) if line.strip())


def _from_datasets(name: str, builder: str, config: str | None, **options: Any) -> Iterator[Row]:
    import datasets

    try:
        try:
            rows = datasets.load_dataset(builder, config, **options)
        except RuntimeError:  # it runs no loading scripts: the Hub has their data as Parquet on this branch
            rows = datasets.load_dataset(name, revision="refs/convert/parquet", data_dir=config, **options)
    except Exception as error:  # datasets and its readers have many
        raise DataError(f"{name} cannot be read: {' '.join(str(error).split())}") from error
    for number, row in enumerate(rows, 1):
        try:
            yield f"{name}, row {number}", json.loads(json.dumps(row, default=_json_text), parse_constant=_json_null)
        except TypeError as error:
            raise DataError(f"{name}, row {number}: {error}") from None


def _json_text(value: Any) -> str:
    """Text of a date, a time or a decimal number, for JSON."""
    if isinstance(value, date | time | timedelta | Decimal):
        return str(value)
    raise TypeError(f"a column holds {type(value).__name__}, which JSON has not: leave it out")


def _json_null(constant: str) -> None:
    """NaN stands for a missing number in a column of numbers."""
    if constant != "NaN":
        raise TypeError(f"a column holds {constant}, which JSON has not: leave it out")


def read_examples(source: str | Path, task: Task, split: str = "test", *, references: bool = True) -> list[Example]:
    """Examples of a file, of a folder's split, or of a split of a data set on the Hub, one a row.

    A last message of the assistant is the reference of a conversation that has no other.

    Args:
        source: file, folder, or name on the Hub (``owner/name``).
        task: how prompts and references are made of rows.
        split: ``train``, ``validation`` or ``test``; of a file all rows are read.
        references: whether a row without a reference is an error.

    Raises:
        DataError: the data is missing, or a row is bad; the message has its number.
    """
    examples = []
    for place, row in _split_rows(source, split, task):
        try:
            example = split_answer(task.example(row))
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
        if references and not example.references:
            raise DataError(f"{place}: no response to learn or to compare with")
        examples.append(replace(example, cut=row.get("finish_reason") == "length"))
    if not examples:
        raise DataError(f"{source} holds no rows" + f" of the {split} split" * (not Path(source).is_file()))
    return examples


def _split_rows(source: str | Path, split: str, task: Task) -> Iterator[Row]:
    path, name = Path(source), str(source)
    if path.is_dir():
        files = {file.name.lower(): file for file in sorted(path.iterdir()) if file.is_file()}
        found = [files[stem + suffix] for stem in SPLITS[split] for suffix in SUFFIXES if stem + suffix in files]
        if not found:
            raise DataError(f"{path} holds no {split} split: expected a file such as {split}.jsonl")
        path = found[0]
    elif not path.exists() and not name.lower().endswith(SUFFIXES) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        return _from_datasets(name, name, task.hub_config, split=split)
    return read_rows(path, task.text_column)


def merge_references(examples: Iterable[Example]) -> list[Example]:
    """One example for each prompt, with the references of all its rows, in order of first appearance."""
    merged: dict[Prompt, Example] = {}
    for example in examples:
        if (first := merged.setdefault(example.prompt, example)) is not example:
            merged[example.prompt] = replace(first, references=first.references + example.references)
    return list(merged.values())


def split_references(examples: Iterable[Example]) -> list[Example]:
    """One example for each reference, as training takes them."""
    return [replace(example, references=(text,)) for example in examples for text in example.references]


def subsample(examples: Sequence[T], count: int) -> list[T]:
    """``count`` evenly spaced examples: data sets are often sorted by length."""
    count = min(count, len(examples))
    return [examples[i * len(examples) // count] for i in range(count)]
