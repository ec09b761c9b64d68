"""Rounds of measuring, kept as they come: a killed run loses the one that it was at, and a later run adds more."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import skipdecode
from skipdecode.errors import UsageError
from skipdecode.files import parse_json, write

Row = dict[str, Any]
#: vLLM without the plugin.
STOCK = "stock"


class Rounds:
    """The rounds of one folder, all with the same settings.

    Raises:
        UsageError: those on the disk have others.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.settings = settings
        self._file = folder / "rounds.jsonl"
        text = self._file.read_text(encoding="utf-8") if self._file.exists() else ""
        self.lines: list[dict[str, Any]] = [parse_json(line, self._file) for line in text.splitlines()]
        for name in {*settings}.union(*(line["settings"] for line in self.lines)):
            value = settings.get(name)
            if other := next((line for line in self.lines if line["settings"].get(name) != value), None):
                raise UsageError(
                    f"{self._file} was measured with {name} {other['settings'].get(name)}, not {value}: give another "
                    "--output, or remove that folder"
                )
        self.code = _code()
        if other := next((line for line in self.lines if line.get("code") != self.code), None):
            raise UsageError(f"{self._file} was measured with the code of {other.get('code')}, not {self.code}")

    def add(self, rows: Sequence[Row], **about: Any) -> None:
        """One more, on the disk when this returns."""
        self.lines.append({"settings": self.settings, "code": self.code, **about, "rows": list(rows)})
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self._file, "".join(f"{json.dumps(line)}\n" for line in self.lines))

    def medians(self, names: Sequence[str], ratios: dict[str, bool]) -> list[Row]:
        """A row for each of its kind: medians over the rounds that have it.

        Args:
            names: the fields that say which kind a row is.
            ratios: fields that are compared with the first row of the same round; whether less is better. ``1.5`` in
                ``NAME_ratio`` is half as much again, or two thirds of the time.
        """
        pairs: dict[tuple[Any, ...], list[tuple[Row, Row]]] = {}
        for line in self.lines:
            for row in line["rows"]:
                pairs.setdefault(tuple(row.get(name) for name in names), []).append((row, line["rows"][0]))
        return [_median(dict(zip(names, kind, strict=True)), found, ratios) for kind, found in pairs.items()]

    def about(self) -> dict[str, str]:
        """What stands below a table."""
        settings = {name.replace("_", " "): str(value) for name, value in self.settings.items()}
        versions = "; ".join(dict.fromkeys(line["versions"] for line in self.lines))
        return settings | {"engines": versions, "command": "; ".join(dict.fromkeys(x["command"] for x in self.lines))}


def shown(row: Row, name: str, form: str) -> str:
    """A value as a table's cell; empty where the row has none."""
    return form.format(row[name]) if row.get(name) is not None else ""


def _code() -> str:
    """Which code is measured: that of the package and of vLLM's plugin."""
    package = Path(skipdecode.__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*package.glob("core/*.py"), *package.glob("serving/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _median(kind: Row, pairs: Sequence[tuple[Row, Row]], ratios: dict[str, bool]) -> Row:
    values: Row = kind | {"rounds": len(pairs)}
    for name in dict.fromkeys(name for row, _ in pairs for name in row if name not in kind):
        found = [(row[name], base.get(name)) for row, base in pairs if row.get(name) is not None]
        values[name] = statistics.median(mine for mine, _ in found) if found else None
        if name in ratios:
            both = [(mine, theirs) for mine, theirs in found if mine and theirs]
            if both:
                values[f"{name}_ratio"] = statistics.median(b / a if ratios[name] else a / b for a, b in both)
    return values
