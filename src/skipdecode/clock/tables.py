"""Rows of plain values as tables for people (Markdown), spreadsheets (CSV) and machines (JSON)."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import write

Row = Mapping[str, Any]


def markdown_table(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it reads as text too; the first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (heads, *cells)) for i in range(len(heads))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(parts: Sequence[str]) -> str:
        first, *rest = (
            part.ljust(w) if i == 0 else part.rjust(w) for i, (part, w) in enumerate(zip(parts, widths, strict=True))
        )
        return f"| {' | '.join((first, *rest))} |"

    return "\n".join([line(heads), line(rule), *map(line, cells)])


def save_tables(folder: Path, rows: Sequence[Row], heads: Sequence[str], cells: Any, about: Mapping[str, Any]) -> None:
    """``table.md`` (these cells, and below them what they are about), ``table.csv`` and ``table.json`` (all values)."""
    folder.mkdir(parents=True, exist_ok=True)
    note = "  \n".join(f"{name}: {value}" for name, value in about.items())
    write(folder / "table.md", f"{markdown_table(heads, cells)}\n\n{note}\n")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write(folder / "table.csv", text.getvalue())
    write(folder / "table.json", json.dumps({**about, "rows": list(rows)}, indent=1) + "\n")
