"""Write the results of an evaluation as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import FileError
from ..files import check_target, has_key, write
from ..latency.timing import remarks, shown

Row = Mapping[str, Any]
#: Files of :func:`save_tables`.
FILES = ("table.md", "table.csv", "table.json")
#: Columns of rows without references: their names in JSON, and their heads.
DISTANCES = {"kl": "KL", "top_1": "same token", "text_loss": "nats of its texts", "distinct": "distinct 2-grams"}


def columns(rows: Sequence[Row], metrics: Sequence[tuple[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells of the full table.

    Every ratio is the full model's figure divided by the row's, per decode step, per token or per job (prompt and
    decode steps). ``layers`` belong to the scored texts, ``timed … layers`` and ``clock`` to the timed runs.

    Args:
        rows: table rows of an evaluation, the full model first.
        metrics: (key in the table rows, label) of each metric.
    """
    heads = ["method", "target", "layers per step", "step layers", "token layers", "job layers"]
    heads += [cell for _, label in metrics for cell in (label, "vs full (95%)")]
    distances = [name for name in DISTANCES if any(name in row for row in rows)]
    heads += [*(DISTANCES[name] for name in distances), "loss", "job s / 1k tokens"]
    heads += ["timed step layers", "timed job layers", "step clock", "job clock", "peak KV"]
    cells = []
    for row in rows:
        line = [row["label"], f"{row['target']:g}x", f"{row['step_layers']:.2f}"]
        line += [f"{row[name]:.2f}x" for name in ("step_layer_ratio", "token_layer_ratio", "job_layer_ratio")]
        for name, _ in metrics:
            low, high = row[f"{name}_interval"]
            line += [f"{row[name]:.2f}", f"{row[f'{name}_difference']:+.2f} ({low:+.2f} to {high:+.2f})"]
        digits = {name: 1 if name in ("top_1", "distinct") else 3 for name in (*distances, "loss")}
        line += [f"{row[name]:.{count}f}" if name in row else "" for name, count in digits.items()]
        if row.get("kl_interval", (0, 0))[1]:  # full depth's is 0
            low, high = row["kl_interval"]
            line[heads.index(DISTANCES["kl"])] += f" ({low:.3f} to {high:.3f})"
        line += [
            f"{row['job_seconds_per_1k_tokens']:.2f}",
            f"{row['timed_step_layer_ratio']:.2f}x",
            f"{row['timed_job_layer_ratio']:.2f}x",
            shown(row["step_clock_ratio"], row["timed_step_layer_ratio"]),
            shown(row["job_clock_ratio"], row["timed_step_layer_ratio"]),
        ]
        cells.append([*line, f"{row['peak_kv_bytes'] / 1e6:.1f} MB"])
    return heads, cells


def brief(rows: Sequence[Row], metrics: Sequence[tuple[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells of a table for 80 columns; below a score stand its difference and interval.

    Rows without references have distances from full depth in the place of these.
    """
    heads, cells = columns(rows, metrics)
    distances = [DISTANCES[name] for name in ("kl", "top_1") if DISTANCES[name] in heads]
    for line in cells:
        for i, head in enumerate(heads):
            if head == DISTANCES["kl"]:
                line[i] = line[i].split(" ")[0]
            elif head == "vs full (95%)" and not distances:
                line[i - 1] += "\n" + line[i].replace(" (", "\n").rstrip(")")
    labels = [label for _, label in metrics]
    shown = ("method", "target", "step layers", *labels, *distances, "step clock", "job clock", "peak KV")
    return [*shown], [[line[heads.index(head)] for head in shown] for line in cells]


def notes(rows: Sequence[Row]) -> dict[str, str]:
    """Return notes by name: how the rows were timed, what the ratios mean, how reliable the timings are."""
    first = rows[0]
    figures = [
        shown(row[f"{what}_clock_ratio"], row["timed_step_layer_ratio"]) for row in rows for what in ("step", "job")
    ]
    timed = (
        f"{first['timed_steps']} decode steps for each of the same {first['timed_rows']} inputs, end-of-sequence "
        "suppressed; each method in turn with the full model, medians"
    )
    ratios = (
        "the full model's layers or seconds divided by the row's; step: a decode step of a batch; job: the prompt and "
        "the decode steps, whose positions all count alike in its layers"
    )
    return {"clock": timed, "ratios": ratios} | remarks(
        figures, first["timed_rows"], min(row["timed_batches"] for row in rows)
    )


def save(rows: Sequence[Row], metrics: Sequence[tuple[str, str]], about: Mapping[str, Any], folder: Path) -> None:
    """Write ``table.md``, ``table.csv`` and ``table.json`` to ``folder``, with notes on how the rows were measured."""
    rows = [{name: value for name, value in row.items() if name not in ("job", "texts", "checksum")} for row in rows]
    rows = [{**row, "model": Path(row["model"]).name} for row in rows]  # local paths mean nothing elsewhere
    flat = [{k: v for k, v in row.items() if not isinstance(v, (dict, list))} for row in rows]
    for values, row in zip(flat, rows, strict=True):
        for name in (*(name for name, _ in metrics), *(["kl"] if "kl_interval" in row else [])):
            values[f"{name}_low"], values[f"{name}_high"] = row[f"{name}_interval"]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    head = f'"about": {json.dumps(dict(about), ensure_ascii=False)}'
    save_tables(folder, flat, *columns(rows, metrics), about, f'{{{head},\n"rows": [\n{lines}\n]}}\n')


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
