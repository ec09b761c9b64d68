"""Write table rows of plain values as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import FileError
from ..files import check_target, has_key, write

Row = Mapping[str, Any]
#: Files of :func:`save_tables`.
FILES = ("table.md", "table.csv", "table.json")


def markdown_table(heads: Sequence[str], cells: Sequence[Sequence[str]], words: int = 1) -> str:
    """Return a padded Markdown table; the first ``words`` columns are left-aligned, the others right-aligned."""
    widths = [max(len(line[i]) for line in (heads, *cells)) for i in range(len(heads))]
    rule = ["-" * width if i < words else "-" * (width - 1) + ":" for i, width in enumerate(widths)]

    def line(parts: Sequence[str]) -> str:
        columns = enumerate(zip(parts, widths, strict=True))
        return f"| {' | '.join(part.ljust(w) if i < words else part.rjust(w) for i, (part, w) in columns)} |"

    return "\n".join([line(heads), line(rule), *map(line, cells)])


def check_folder(folder: Path, key: str | None = None) -> None:
    """Create ``folder``. Raises OSError or FileError if :func:`save_tables` cannot write to it.

    With ``key``, files that are there may be replaced only if their ``table.json`` has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        check_target(folder / name)
    there, record = [name for name in FILES if (folder / name).exists()], folder / "table.json"
    if key and there and not (record.exists() and has_key(key)(record.read_bytes())):
        raise FileError(f"{folder / there[0]} is there, and of another command: give another folder")


def save_tables(
    folder: Path, rows: Sequence[Row], heads: Sequence[str], cells: Any, about: Mapping[str, Any], text: str = ""
) -> None:
    """Write table.md (``cells``, ``about`` below), table.csv (``rows``), table.json (``text``, else rows and about)."""
    check_folder(folder)
    note = "  \n".join(f"{name}: {value}" for name, value in about.items())
    write(folder / "table.md", f"{markdown_table(heads, cells)}\n\n{note}\n")
    lines = io.StringIO()
    writer = csv.DictWriter(lines, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write(folder / "table.csv", lines.getvalue())
    write(folder / "table.json", text or json.dumps({**about, "rows": list(rows)}, indent=1) + "\n")
