"""Tables and plots of an evaluation's rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import MissingExtra
from ..files import write
from ..latency.timing import remarks, shown

Row = Mapping[str, Any]
#: Columns for texts without references: key in JSON, heading, format.
DISTANCES = (
    ("kl", "KL", "{:.3f}"),
    ("top_1", "top-1 agreement", "{:.1f}%"),
    ("text_loss", "loss under the full model", "{:.3f}"),
)
#: What the ratios of a table mean.
RATIOS = "the full model's figure divided by the row's; end to end counts prompts too"


def columns(rows: Sequence[Row], metrics: Sequence[tuple[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the full table.

    Args:
        rows: of an evaluation, the full model first.
        metrics: key in the rows, and label, of each score.
    """
    several = any(row["token_layer_ratio"] != row["step_layer_ratio"] for row in rows)  # sequences exit alone
    distances = [column for column in DISTANCES if any(column[0] in row for row in rows)]
    headings = ["method", "speed-up", "layers", "fewer layers"]
    headings += ["fewer layers, one sequence"] * several
    for _, label in metrics:
        headings += [label, "difference (95%)"]
    headings += [heading for _, heading, _ in distances]
    headings += ["decoding speed-up", "end-to-end speed-up", "s per 1k tokens", "peak KV"]
    return headings, [_cells(row, metrics, distances, several) for row in rows]


def _cells(row: Row, metrics: Sequence[tuple[str, str]], distances: Sequence[Any], several: bool) -> list[str]:
    cells = [row["label"], f"{row['target']:g}x", f"{row['step_layers']:.2f}", f"{row['step_layer_ratio']:.2f}x"]
    if several:
        cells.append(f"{row['token_layer_ratio']:.2f}x")
    for name, _ in metrics:
        low, high = row[f"{name}_interval"]
        cells += [f"{row[name]:.2f}", f"{row[f'{name}_difference']:+.2f} ({low:+.2f} to {high:+.2f})"]
    for name, _, form in distances:
        text = form.format(row[name]) if name in row else ""
        low, high = row.get(f"{name}_interval", (0, 0))
        cells.append(f"{text} ({low:.3f} to {high:.3f})" if high else text)
    cells += [shown(row[f"{what}_clock_ratio"], row["timed_step_layer_ratio"]) for what in ("step", "job")]
    return [*cells, f"{row['job_seconds_per_1k_tokens']:.2f}", f"{row['peak_kv_bytes'] / 1e6:.1f} MB"]


def brief(rows: Sequence[Row], metrics: Sequence[tuple[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of a table for a terminal, without intervals."""
    headings, cells = columns(rows, metrics)
    left_out = ("layers", "difference (95%)", "s per 1k tokens")
    kept = [index for index, heading in enumerate(headings) if heading not in left_out]
    return [headings[i] for i in kept], [[line[i].split(" (")[0] for i in kept] for line in cells]


def notes(rows: Sequence[Row]) -> dict[str, str]:
    """Notes by name: what the ratios mean, how they were timed, and whether the timings are rough."""
    first = rows[0]
    parts = ("step", "job")
    figures = [shown(row[f"{what}_clock_ratio"], row["timed_step_layer_ratio"]) for row in rows for what in parts]
    timed = f"{first['timed_steps']} decode steps of {first['timed_rows']} inputs, in turn with the full model, medians"
    batches = min(row["timed_batches"] for row in rows)
    return {"clock": timed, "ratios": RATIOS} | remarks(figures, first["timed_rows"], batches)


def save(rows: Sequence[Row], metrics: Sequence[tuple[str, str]], about: Mapping[str, Any], folder: Path) -> None:
    """Write ``table.md`` and ``table.json`` to ``folder``; texts stay out of both."""
    kept = [{name: value for name, value in row.items() if name not in ("variant", "texts")} for row in rows]
    save_tables(folder, kept, *columns(rows, metrics), about)


def save_tables(
    folder: Path, rows: Sequence[Row], headings: Sequence[str], cells: Sequence[Sequence[str]], about: Mapping[str, Any]
) -> None:
    """Write ``table.md``, with ``about`` below the table, and ``table.json``, with one row a line."""
    folder.mkdir(parents=True, exist_ok=True)
    note = "  \n".join(f"{name}: {value}" for name, value in about.items())
    write(folder / "table.md", f"{markdown_table(headings, cells)}\n\n{note}\n")
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    head = json.dumps(dict(about), ensure_ascii=False)
    write(folder / "table.json", f'{{"about": {head},\n"rows": [\n{lines}\n]}}\n')


def markdown_table(headings: Sequence[str], cells: Sequence[Sequence[str]], words: int = 1) -> str:
    """Padded Markdown table, whose first ``words`` columns are aligned left, the others right."""
    widths = [max(len(line[i]) for line in (headings, *cells)) for i in range(len(headings))]
    rule = ["-" * width if i < words else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lines = []
    for parts in (headings, rule, *cells):
        padded = [part.ljust(widths[i]) if i < words else part.rjust(widths[i]) for i, part in enumerate(parts)]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def plot_tradeoff(rows: Sequence[Row], metrics: Sequence[tuple[str, str]], path: Path) -> None:
    """Plot each metric of an evaluation's rows against the end-to-end speed-up."""
    panels = []
    for metric, label in metrics:
        by_method: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            by_method.setdefault(row["label"], []).append((row["job_clock_ratio"], row[metric]))
        panels.append((label, {name: sorted(points) for name, points in by_method.items()}))
    plot_lines(path, "end-to-end speed-up", panels)


def plot_lines(
    path: Path,
    xlabel: str,
    panels: Sequence[tuple[str, Mapping[str, Sequence[tuple[float, float]]]]],
    title: str = "",
) -> None:
    """Plot panels side by side, each a label of the y axis and its lines of (x, y) points by name.

    MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("plots need matplotlib: pip install 'skipdecode[cli]'") from None
    figure = Figure(figsize=(6 * len(panels), 4), layout="constrained")
    for axes, (label, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), "o-", label=name)
        axes.set(xlabel=xlabel, ylabel=label)
        axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=140)
