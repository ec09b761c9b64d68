"""Rounds of servers under arrivals as a table, beside stock vLLM at the same rate."""

from __future__ import annotations

from skipdecode.evaluation.report import save_tables

from .rounds import STOCK, Rounds, Row, shown

#: What is compared, and whether less is better.
RATIOS = {"request_throughput": False, "output_throughput": False, "request_goodput": False}
RATIOS |= {"median_ttft_ms": True, "median_tpot_ms": True}
HEADS = ["arrivals", "server", "requests/s", "tokens/s", "of stock", "good/s", "first token, ms", "p99"]
HEADS += ["per token, ms", "p99", "mean speed-up", "layers", "moved"]
ABOUT = {
    "arrivals": "requests a second as a share of what stock vLLM finishes when it gets all at once (inf), at random",
    "server": "stock, or the speed-up of every request; 1x to 5x: 5x for requests that begin under load",
    "tokens/s": "written; of stock: over stock's in the same round",
    "first token, per token": "medians over requests, beside them the 99th percentile; per token after the first",
    "mean speed-up": "over requests, by the server's /metrics; layers: how many times fewer in their decode steps",
    "moved": "requests that the load policy made faster",
}


def rows_of(rounds: Rounds) -> list[Row]:
    """A row for each rate and server."""
    rows = rounds.medians(["arrivals", "engine"], RATIOS)
    order = {name: place for place, name in enumerate(dict.fromkeys(row["arrivals"] for row in rows))}
    rows.sort(key=lambda row: order[row["arrivals"]])
    return [{name: rounds.settings[name] for name in ("model", "slots")} | row for row in rows]


def save(rounds: Rounds) -> None:
    """table.md, table.csv and table.json beside the rounds."""
    rows = rows_of(rounds)
    top = rounds.lines[0]["saturation"]
    good = "first token within {ttft:g} ms, each further one, on average within {tpot:g} ms".format(**top["good"])
    found = {"good": good, "stock at saturation": f"{top['requests_per_second']:.2f} requests/s"}
    save_tables(rounds.folder, rows, HEADS, [_cells(row) for row in rows], rounds.about() | ABOUT | found)


def server_name(row: Row) -> str:
    """As a table has it."""
    return "stock" if row["engine"] == STOCK else " to ".join(f"{speedup}x" for speedup in row["engine"].split("-"))


def _cells(row: Row) -> list[str]:
    return [
        row["arrivals"] + ("" if row["rate"] is None else f" ({row['rate']:.2f}/s)"),
        server_name(row),
        shown(row, "request_throughput", "{:.2f}"),
        shown(row, "output_throughput", "{:.1f}"),
        shown(row, "output_throughput_ratio", "{:.2f}x"),
        shown(row, "request_goodput", "{:.2f}"),
        shown(row, "median_ttft_ms", "{:.0f}"),
        shown(row, "p99_ttft_ms", "{:.0f}"),
        shown(row, "median_tpot_ms", "{:.1f}"),
        shown(row, "p99_tpot_ms", "{:.1f}"),
        shown(row, "mean_speedup", "{:.2f}x"),
        shown(row, "decode_layer_ratio", "{:.2f}x"),
        shown(row, "moved", "{:.0f}"),
    ]
