"""Read a split's rows from a folder's files or from the hub."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import DataError, MissingExtra
from ..rows import read_rows

SUFFIXES = (".jsonl", ".csv")
#: Possible file names of each split; the first that exists is read.
FILES = {
    split: tuple(f"{name}{suffix}" for name in names for suffix in SUFFIXES)
    for split, names in {"train": ["train"], "validation": ["validation", "valid", "dev"], "test": ["test"]}.items()
}


def split_rows(
    source: Path, split: str, files: Sequence[str], config: str | None, text_column: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of a split, each with its place for error messages.

    Args:
        source: a folder, or the name of a data set on the hub (``owner/name``) if there is no such folder.
        split: ``train``, ``validation`` or ``test``.
        files: possible names of the split's file in a folder; the first that exists is read.
        config: configuration name on the hub.
        text_column: column name for the lines of a text file.

    Raises:
        DataError: the data is missing, or a row cannot be read.
    """
    if not source.exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source.as_posix()):
        name = source.as_posix()
        for number, row in enumerate(_from_hub(name, split, config), 1):
            yield f"{name} ({split}), row {number}", row
    else:
        yield from file_rows(find(source, files), text_column)


def file_rows(path: Path, text_column: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (its place for error messages, row) for each row of a file. Raises DataError for a row with an error."""
    for line, row, _ in read_rows(path, strict=True, text_column=text_column):
        yield f"{path}, line {line}", row


def find(folder: Path, files: Sequence[str]) -> Path:
    """Return the first of ``files`` that exists in ``folder``. Raises DataError if none does."""
    if not folder.exists() and folder.suffix in SUFFIXES:
        raise DataError(f"there is no file {folder}")
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}: give the one that holds {' or '.join(files)}")
    for name in files:
        if (folder / name).exists():
            return folder / name
    raise DataError(f"{folder} holds no {' or '.join(files)}")


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
            # datasets no longer runs loading scripts; the hub has their data as Parquet on this branch.
            return datasets.load_dataset(name, split=split, revision="refs/convert/parquet", data_dir=config)
    except (OSError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise DataError(f"{name} is no folder here, and the hub's cannot be loaded ({split}): {why}") from None
