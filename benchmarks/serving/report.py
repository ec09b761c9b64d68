"""Rounds of offline runs as a table: each figure beside its ratio to stock vLLM in the same round."""

from __future__ import annotations

from skipdecode.evaluation.report import save_tables

from .processes import PLUGIN
from .rounds import STOCK, Rounds, Row, shown

#: What is compared, and whether less is better.
RATIOS = {"tokens_per_second": False, "step_ms": True, "forward_ms": True}
FORMS = {"prompt": "flat, prompt too"}
HEADS = ["schedule", "layers", "tokens/s", "of stock", "step, ms", "faster", "forward, ms", "faster"]
HEADS += ["layers run", "in prompts", "rounds"]
ABOUT = {
    "layers": "fewer layers in a decode step: the model's over those that the schedule runs on average",
    "of stock, faster": "stock's time over the row's, or the row's tokens/s over stock's, in the same round; medians",
    "step, forward": "the mean step in which every slot writes and none reads a prompt; the model alone, without "
    "head, sampling and scheduling",
    "layers run": "tokens times layers that ran, of full depth's, prompts included",
    "in prompts": "the share of the time that steps with prompts took",
}


def rows_of(rounds: Rounds) -> list[Row]:
    """A row for each engine and schedule."""
    rows = rounds.medians(["engine", "form", "speedup", "serving"], RATIOS)
    keys = ("serving", "speedup", "form", "engine")
    rows.sort(key=lambda row: (row["engine"] != STOCK, *(row[key] for key in keys)))
    names = ("model", "slots", "load")
    return [{name: rounds.settings[name] for name in names} | row for row in rows]


def save(rounds: Rounds) -> None:
    """table.md, table.csv and table.json beside the rounds."""
    rows = rows_of(rounds)
    save_tables(rounds.folder, rows, HEADS, [_cells(row) for row in rows], rounds.about() | ABOUT)


def schedule_name(row: Row) -> str:
    """As a table's first column has it."""
    if row["engine"] == STOCK:
        return "stock"
    form = FORMS.get(row["form"], row["form"])
    adapter = row["engine"] * (row["engine"] not in (STOCK, PLUGIN))
    return ", ".join(filter(None, (f"{row['speedup']:g}x {form}".strip(), adapter, row["serving"])))


def _cells(row: Row) -> list[str]:
    return [
        schedule_name(row),
        f"{row['step_layer_ratio']:.2f}x",
        shown(row, "tokens_per_second", "{:.1f}"),
        shown(row, "tokens_per_second_ratio", "{:.2f}x"),
        shown(row, "step_ms", "{:.1f}"),
        shown(row, "step_ms_ratio", "{:.2f}x"),
        shown(row, "forward_ms", "{:.1f}"),
        shown(row, "forward_ms_ratio", "{:.2f}x"),
        shown(row, "layers_run", "{:.0%}"),
        shown(row, "prompt_share", "{:.0%}"),
        str(row["rounds"]),
    ]
