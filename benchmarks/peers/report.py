"""The table of all engines: medians over rounds, each beside the baseline's of the same rounds."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skipdecode.evaluation.report import markdown_table
from skipdecode.files import write

Row = Mapping[str, Any]

#: (key, heading, digits) of what a table shows for each batch size; the ratio to the baseline stands behind it.
MEASURES = (
    ("decode_tokens_per_second", "Decoding (the step): new tokens per second after the first of each row", 1),
    ("job_tokens_per_second", "The whole job, prompt included: new tokens per second", 1),
    ("prompt_seconds", "The prompt and the first token: seconds", 2),
    ("peak_rss_gb", "Most memory resident: GB", 1),
    (
        "agreement",
        "Tokens before the first that differs: share, from transformers' (1x) or from ours at equal depths",
        2,
    ),
)


def summaries(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Plain figures of all cells.

    ``agreement`` is the share of tokens before the first that differs: at full depth from the baseline's, at other
    depths from those that SkipDecode wrote with the same schedule, where it is among the rows.
    """
    ours = {(row["shape"], row["batch"], row["speedup"]): row for row in rows if row["engine"] == "skipdecode"}
    cells = []
    for row in rows:
        cells.append(summary(row))
        reference = ours.get((row["shape"], row["batch"], row["speedup"]), {}).get("tokens")
        if row["speedup"] == 1:
            reference = row.get("baseline_tokens")
        if reference and "tokens" in row:
            cells[-1]["agreement"] = agreement(row["tokens"], reference)
    return cells


def agreement(own: list[list[int]], others: list[list[int]]) -> float:
    """Share of the tokens that come before the first difference, over all rows."""
    same = 0
    for row, other in zip(own, others, strict=True):
        same += next((n for n, (a, b) in enumerate(zip(row, other, strict=True)) if a != b), len(row))
    return same / sum(map(len, own))


def summary(row: Row) -> dict[str, Any]:
    """Plain figures of a cell. Ratios are faster-than: the baseline's seconds over the row's, medians of the rounds."""
    names = ("shape", "engine", "precision", "speedup", "batch")
    plain = {name: row[name] for name in names}
    if "failed" in row:
        return plain | {"failed": row["failed"]}
    settings = row["settings"]
    steps = row["batch"] * (settings["new_tokens"] - 1)
    tokens = row["batch"] * settings["new_tokens"]
    own, base = row["rounds"], row["baseline_rounds"]
    decode = [_decode(r) for r in own]
    base_decode = [_decode(r) for r in base]
    middle = statistics.median
    if min(*decode, *base_decode) > 0:  # else the texts are too short for this clock: no figure
        plain |= {
            "decode_tokens_per_second": steps / middle(decode),
            "decode_spread": (max(decode) - min(decode)) / middle(decode),
            "decode_ratio": middle(b / o for b, o in zip(base_decode, decode, strict=True)),
            "step_ms": 1e3 * middle(decode) / (settings["new_tokens"] - 1),
            "baseline_decode_tokens_per_second": steps / middle(base_decode),
            "baseline_decode_spread": (max(base_decode) - min(base_decode)) / middle(base_decode),
        }
    plain |= {
        "job_tokens_per_second": tokens / middle(r["job_seconds"] for r in own),
        "job_ratio": middle(b["job_seconds"] / o["job_seconds"] for b, o in zip(base, own, strict=True)),
        "prompt_seconds": middle(r["prompt_seconds"] for r in own),
        "prompt_ratio": middle(b["prompt_seconds"] / o["prompt_seconds"] for b, o in zip(base, own, strict=True)),
        "peak_rss_gb": max(r["peak_rss"] for r in own) / 1e9,
        "baseline_job_tokens_per_second": tokens / middle(b["job_seconds"] for b in base),
        "baseline_prompt_seconds": middle(b["prompt_seconds"] for b in base),
    }
    return plain | {f"{name} version": number for name, number in row["versions"].items()}


def _decode(timed: Mapping[str, float]) -> float:
    """Seconds of all steps after the first token."""
    return timed["job_seconds"] - timed["prompt_seconds"]


def markdown(cells: Sequence[Row], notes: Mapping[str, str]) -> str:
    """A table for each shape and measure: engines down, batch sizes across; then the notes."""
    parts = []
    for shape in dict.fromkeys(cell["shape"] for cell in cells):
        inside = [cell for cell in cells if cell["shape"] == shape]
        parts.append(f"# {shape}\n")
        for key, heading, digits in MEASURES:
            parts += [f"## {heading}\n", _table(inside, key, digits), ""]
        reasons = {(cell["engine"], cell["failed"]): None for cell in inside if "failed" in cell}
        parts += [f"- not run: {engine}: {reason}" for engine, reason in reasons]
        parts.append("")
    return "\n".join([*parts, *(f"{name}: {text}  " for name, text in notes.items()), ""])


def _table(cells: Sequence[Row], key: str, digits: int) -> str:
    """One measure: a line for each engine and speed."""
    batches = sorted({cell["batch"] for cell in cells})
    by_place = {(cell["engine"], cell["speedup"], cell["batch"]): cell for cell in cells}
    heads, lines = ["engine", "precision", "layers", *(f"batch {batch}" for batch in batches)], []
    if f"baseline_{key}" in {name for cell in cells for name in cell}:
        lines.append(["transformers, median of all", "", "1x", *(_baseline(cells, key, n, digits) for n in batches)])
    for engine, speedup in dict.fromkeys((cell["engine"], cell["speedup"]) for cell in cells):
        found = [by_place.get((engine, speedup, batch)) for batch in batches]
        precision = next(cell["precision"] for cell in found if cell is not None)
        lines.append([engine, precision, f"{speedup}x", *(_shown(cell, key, digits) for cell in found)])
    return markdown_table(heads, lines, words=2)


def _baseline(cells: Sequence[Row], key: str, batch: int, digits: int) -> str:
    """The baseline's figure over all engines that it was timed beside."""
    values = [cell[f"baseline_{key}"] for cell in cells if cell["batch"] == batch and f"baseline_{key}" in cell]
    return f"{statistics.median(values):.{digits}f} (1)" if values else ""


def _shown(cell: Row | None, key: str, digits: int) -> str:
    """The figure, and behind it how many times faster than the baseline beside it."""
    if cell is None:
        return ""
    if "failed" in cell:
        return "not run"
    if key not in cell:
        return "too short" if key == "decode_tokens_per_second" else ""
    ratio = cell.get(key.split("_")[0] + "_ratio")
    return f"{cell[key]:.{digits}f}" + ("" if ratio is None else f" ({ratio:.2f}x)")


def save(cells: Sequence[Row], notes: Mapping[str, str], folder: Path) -> None:
    """Write ``table.md``, ``table.csv`` and ``table.json`` to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "table.md", markdown(cells, notes))
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(_columns(cells)))
    writer.writeheader()
    writer.writerows(cells)
    write(folder / "table.csv", file.getvalue())
    lines = ",\n".join(json.dumps(dict(cell)) for cell in cells)
    write(folder / "table.json", f'{{"about": {json.dumps(dict(notes))},\n"rows": [\n{lines}\n]}}\n')


def _columns(cells: Iterable[Row]) -> dict[str, None]:
    return dict.fromkeys(name for cell in cells for name in cell)
