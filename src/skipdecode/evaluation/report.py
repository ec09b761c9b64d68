"""Tables and plots of an evaluation's rows."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.metrics import DEFAULT, Agreement, Metric, Repetition
from ..files import write

Row = Mapping[str, Any]
METRICS: tuple[Metric, ...] = (*DEFAULT, Agreement(), Repetition())
#: Columns for texts without references: key in JSON, heading, format.
DISTANCES = (
    ("kl", "KL", "{:.3f}"),
    ("top_1", "same next token", "{:.1f}%"),
    ("text_loss", "loss under the full model", "{:.3f}"),
)
#: Timings of fewer examples or batches than this are rough.
FEW_EXAMPLES, FEW_BATCHES = 32, 5


def columns(rows: Sequence[Row], *, brief: bool = False) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the table of an evaluation's rows, the full model's first; ``brief``: for a terminal."""
    several = any(row["token_layer_ratio"] != row["step_layer_ratio"] for row in rows)  # sequences exit alone
    lines = [_cells(row, several) for row in rows]
    if not brief:
        return [*lines[0]], [[line.get(name, "") for name in lines[0]] for line in lines]
    left_out = ("layers", "s per 1k tokens")
    kept = [name for name in lines[0] if name not in left_out and not name.endswith("difference (95%)")]
    return kept, [[line.get(name, "").split(" (")[0] for name in kept] for line in lines]


def _cells(row: Row, several: bool) -> dict[str, str]:
    cells = {"method": row["label"], "speed-up": f"{row['target']:g}x", "layers": f"{row['step_layers']:.2f}"}
    cells["fewer layers"] = f"{row['step_layer_ratio']:.2f}x"
    if several:
        cells["fewer layers, one sequence"] = f"{row['token_layer_ratio']:.2f}x"
    for name, label in ((metric.name, metric.label) for metric in METRICS if metric.name in row):
        low, high = row[f"{name}_interval"]
        cells[label] = f"{row[name]:.2f}"
        cells[f"{label}, difference (95%)"] = f"{row[f'{name}_difference']:+.2f} ({low:+.2f} to {high:+.2f})"
    for name, heading, form in DISTANCES:
        if name in row:
            low, high = row.get(f"{name}_interval", (0, 0))
            cells[heading] = form.format(row[name]) + (f" ({low:.3f} to {high:.3f})" if high else "")
    cells["decoding speed-up"], cells["end-to-end speed-up"] = _speedups(row)
    cells["s per 1k tokens"] = f"{row['job_seconds_per_1k_tokens']:.2f}"
    cells["peak KV"] = f"{row['peak_kv_bytes'] / 1e6:.1f} MB"
    if peak := row.get("peak_memory_bytes"):  # on a GPU
        cells["peak memory beside the weights"] = f"{peak / 1e6:.1f} MB"
    return cells


def _speedups(row: Row) -> list[str]:
    """Decoding and end-to-end speed-ups, with an asterisk on more than the skipped layers explain."""
    ratios = [row[f"{what}_clock_ratio"] for what in ("step", "job")]
    return [f"{ratio:.2f}x" + "*" * (round(ratio, 2) > round(row["timed_step_layer_ratio"], 2)) for ratio in ratios]


def notes(rows: Sequence[Row]) -> dict[str, str]:
    """Notes by name: how the ratios were timed, what they and the asterisk mean, and whether timings are rough."""
    steps, examples = rows[0]["timed_steps"], rows[0]["timed_rows"]
    batches = min(row["timed_batches"] for row in rows)
    found = {
        "clock": f"{steps} decode steps of {examples} inputs, in turn with the full model, medians",
        "ratios": "the full model's figure divided by the row's; end to end counts prompts too",
    }
    if any("*" in text for row in rows for text in _speedups(row)):
        found["*"] = "more than the skipped layers explain: noise, or fewer layers fit better into the caches"
    if examples < FEW_EXAMPLES or batches < FEW_BATCHES:
        found["rough"] = f"timed on {examples} examples and {batches} batches only"
    return found


def save(rows: Sequence[Row], about: Mapping[str, Any], folder: Path) -> None:
    """Write ``table.md``, with ``about`` below the table, and ``table.json``, with one row a line and without texts."""
    note = "  \n".join(f"{name}: {value}" for name, value in about.items())
    write(folder / "table.md", f"{markdown_table(*columns(rows))}\n\n{note}\n")
    kept = [{name: value for name, value in row.items() if name not in ("variant", "texts")} for row in rows]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in kept)
    head = json.dumps(dict(about), ensure_ascii=False)
    write(folder / "table.json", f'{{"about": {head},\n"rows": [\n{lines}\n]}}\n')


def markdown_table(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Padded Markdown table. The first column is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for first, *others in (headings, rule, *cells):
        padded = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        lines.append(f"| {' | '.join([first.ljust(widths[0]), *padded])} |")
    return "\n".join(lines)


def plot_tradeoff(rows: Sequence[Row], path: Path) -> None:
    """Plot each metric of an evaluation's rows against the end-to-end speed-up, a line for each label."""
    from matplotlib.figure import Figure

    metrics = [metric for metric in METRICS if metric.name in rows[0]]
    figure = Figure(figsize=(6 * len(metrics), 4), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        for name in dict.fromkeys(row["label"] for row in rows):
            points = sorted((row["job_clock_ratio"], row[metric.name]) for row in rows if row["label"] == name)
            axes.plot(*zip(*points, strict=True), "o-", label=name)
        axes.set(xlabel="end-to-end speed-up", ylabel=metric.label)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=140)
