"""The form of a task."""

from __future__ import annotations

import csv
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ...errors import FileError, MissingExtra, TaskError
from ...files import parse_json

# Articles are longer than csv's 131,072 characters; a C long may have 32 bits.
csv.field_size_limit(2**31 - 1)


@dataclass(frozen=True)
class Example:
    """One prompt and the responses that people wrote for it (at least one)."""

    prompt: str
    references: tuple[str, ...]


class Task(ABC):
    """How a task is read, prompted and scored."""

    name: str
    #: Columns of an input row that the prompt is made of.
    columns: tuple[str, ...]
    #: Column that holds a reference text, where the data has one.
    reference: str
    #: For each form that rows come in, what its columns are called here.
    forms: Sequence[Mapping[str, str]]
    #: Whether inputs repeat, one row per reference, and are meant to be generated once.
    distinct: bool = False
    #: How many new tokens its texts need at most.
    max_new_tokens: int

    @abstractmethod
    def prompt(self, row: Mapping[str, str]) -> str:
        """The text given to the model for one input row."""

    @abstractmethod
    def read(self, folder: Path, split: str) -> list[Example]:
        """Examples of a split (``train``, ``validation`` or ``test``) from the task's own files, or from the hub.

        ``train`` keeps one example per row; the others gather all references of an input. Raises TaskError.
        """

    def score(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        """Corpus BLEU (lower-cased sacrebleu) and mean ROUGE-L, 0 to 100: each text against all its references."""
        from ..metrics import DEFAULT

        return {metric.name: metric.score(texts, references) for metric in DEFAULT}


#: Files of a split, in the order they are looked for.
JSONL: dict[str, tuple[str, ...]] = {
    "train": ("train.jsonl",),
    "validation": ("validation.jsonl", "valid.jsonl"),
    "test": ("test.jsonl",),
}


def read_split(
    source: Path, split: str, files: Sequence[str], forms: Sequence[Mapping[str, str]], config: str | None = None
) -> Iterator[dict[str, str]]:
    """Rows of a split, from a folder or from the hub.

    Args:
        source: a folder, or the name of a data set on the hub (``owner/name``) if there is no such folder.
        split: ``train``, ``validation`` or ``test``.
        files: names the split's file may have in a folder; the first that is there is read.
        forms: for each form that rows come in, what its columns are called here. All of them must hold text.
        config: the configuration a data set on the hub needs.

    Raises:
        TaskError: no such data, or a row in none of the forms.
    """
    rows: Iterable[Mapping[str, Any]]
    if not source.exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source.as_posix()):
        where, rows = f"{source.as_posix()} ({split})", _from_hub(source.as_posix(), split, config)
    else:
        path = find(source, files)
        where, rows = str(path), read_rows(path)
    for number, row in enumerate(rows, 2 if where.lower().endswith(".csv") else 1):
        form = next((form for form in forms if has_text(row, form)), None)
        if form is None:
            wanted = " or ".join(" and ".join(columns) for columns in forms)
            there = f"it has {', '.join(map(str, row))[:200]}" if isinstance(row, Mapping) else "it is no JSON object"
            raise TaskError(f"{where}, row {number}: needs text under the columns {wanted}; {there}")
        yield {name: row[column] for column, name in form.items()}


def find(folder: Path, files: Sequence[str]) -> Path:
    """The first of these files that a folder holds. Raises TaskError."""
    if not folder.exists():
        raise TaskError(f"there is no {folder}: give the folder that holds {' or '.join(files)}")
    if not folder.is_dir():
        raise TaskError(f"{folder} is no folder: give the one that holds {' or '.join(files)}")
    path = next((path for name in files if (path := folder / name).exists()), None)
    if path is None:
        raise TaskError(f"{folder} holds no {' or '.join(files)}")
    return path


def has_text(row: Any, columns: Iterable[str]) -> bool:
    """Whether there is more than white space under all these columns."""
    return isinstance(row, Mapping) and all(isinstance(row.get(c), str) and row[c].strip() for c in columns)


def _from_hub(name: str, split: str, config: str | None) -> Iterable[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise MissingExtra(
            f"{name} is no folder here, and the hub needs datasets: pip install 'skipdecode[train]'"
        ) from None
    try:
        try:
            return datasets.load_dataset(name, config, split=split)
        except RuntimeError:
            # Loading scripts are no longer run; the hub keeps what they made of the data on a branch of its own.
            return datasets.load_dataset(name, split=split, revision="refs/convert/parquet")
    except (OSError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise TaskError(f"{name} is no folder here, and the hub's cannot be loaded ({split}): {why}") from None


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    """Rows of a CSV or JSONL file that has to be whole: training and test data. Raises TaskError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from (_csv if path.suffix.lower() == ".csv" else _jsonl)(path, file)
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8: {error}") from None
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from None


def _csv(path: Path, file: TextIO) -> Iterator[dict[str, str]]:
    # Strict, or a stray quote would swallow the rows up to the next one.
    reader = csv.DictReader(file, strict=True)
    line = 1
    try:
        names = reader.fieldnames or []
        if len(set(names)) < len(names):
            raise TaskError(f"{path} has a column twice: {', '.join(names)}")
        line = reader.line_num + 1
        for row in reader:
            if None in row:
                fields = len(names) + len(row[None])
                raise TaskError(f"{path}, line {line}: has {fields} fields, the header {len(names)}: quote the commas")
            yield row
            line = reader.line_num + 1
    except csv.Error as error:
        raise TaskError(f"{path}, line {line}: a quote is missing, or one too many: {error}") from None


def _jsonl(path: Path, file: TextIO) -> Iterator[dict[str, str]]:
    first = True
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        if first and line.lstrip().startswith("["):
            raise TaskError(f"{path} holds an array: JSONL has one object per line")
        first = False
        try:
            row = parse_json(line, f"{path}, line {number}")
        except FileError as error:
            raise TaskError(str(error)) from None
        if "\\u" in line and not _is_utf8(row):
            raise TaskError(f"{path}, line {number}: not UTF-8: it escapes half a character (a lone surrogate)")
        yield row


def _is_utf8(value: Any) -> bool:
    """Whether a value of JSON can be written: an escape may stand for half a character, which no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def examples(pairs: Iterable[tuple[str, str]], split: str) -> list[Example]:
    """Prompts and references as ``Task.read`` gives them: one by one to train on, else gathered."""
    if split == "train":
        return [Example(prompt, (reference,)) for prompt, reference in pairs]
    return gather(pairs)


def subsample(examples: Sequence[Example], count: int) -> list[Example]:
    """So many of them, from beginning to end: data sets are often sorted by length."""
    count = min(count, len(examples))
    return [examples[i * len(examples) // count] for i in range(count)]


def gather(pairs: Iterable[tuple[str, str]]) -> list[Example]:
    """One example per distinct prompt, with all its references, in order of first appearance."""
    references: dict[str, list[str]] = {}
    for prompt, reference in pairs:
        references.setdefault(prompt, []).append(reference)
    return [Example(prompt, tuple(texts)) for prompt, texts in references.items()]


def normalize_whitespace(text: str, words: int | None = None) -> str:
    """One space between words and no line breaks; with ``words``, only the first so many, each up to 30 characters.

    A path or a link can have hundreds of tokens, and a model has only so many positions.
    """
    parts = text.split()
    return " ".join(parts if words is None else [part[:30] for part in parts[:words]])
