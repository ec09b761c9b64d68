"""The tables of docs/serving.md and README.md that benchmarks/serving measures, printed between cog marks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from skipdecode.clock.tables import markdown_table

RESULTS = Path(__file__).resolve().parent.parent / "results" / "serving"


def serving(
    folder: str = "opt-1.3b-bfloat16-32",
    options: str = "admit_together 1",
    forms: Sequence[str] = ("flat", "falling"),
) -> None:
    """vLLM with the plugin, with these of its options, beside stock vLLM: a step, its forward pass, a queue."""
    of = {
        (load, row["engine"], row["form"], row["speedup"]): row
        for load in ("lockstep", "continuous")
        for row in _rows(f"{folder}/{load}")
        if row["engine"] == "stock" or row["serving"] == options
    }

    def ratio(*name: Any, field: str) -> str:
        return f"{value:.2f}x" if (value := of.get(name, {}).get(f"{field}_ratio")) else ""

    lines = {}
    for (_, *schedule), row in sorted(of.items(), key=lambda item: (item[0][1] != "stock", item[0][3], item[0][2:])):
        engine, form, speedup = schedule
        if form not in ("", *forms):
            continue
        lines[engine, form, speedup] = (
            "stock" if engine == "stock" else f"{speedup:g}x {form}".strip(),
            f"{row['step_layer_ratio']:.2f}x",
            ratio("lockstep", *schedule, field="forward_ms"),
            ratio("lockstep", *schedule, field="step_ms"),
            ratio("continuous", *schedule, field="tokens_per_second"),
            ratio("continuous", engine, "prompt", speedup, field="tokens_per_second") if form == "flat" else "",
        )
    heads = (
        *("schedule", "fewer layers, a step", "a forward pass is faster", "a step is faster"),
        *("tokens/s of a queue", "the prompt at the steps' depth too"),
    )
    _print(heads, lines.values(), words=1)


def load(folder: str = "demo-32") -> None:
    """Servers at fixed rates of arrivals and at saturation, with and without the load policy."""
    heads = (
        "arrivals, of stock's saturation",
        "server",
        "requests/s",
        "of which good",
        "first token, ms: median",
        "99%",
    )
    _print(
        (*heads, "per token, ms: median", "99%", "mean speed-up"),
        (
            (
                row["arrivals"],
                " to ".join(name if name == "stock" else f"{name}x" for name in row["engine"].split("-")),
                f"{row['request_throughput']:.2f}",
                f"{row['request_goodput']:.2f}",
                *(f"{row[f'{part}_ttft_ms']:.0f}" for part in ("median", "p99")),
                *(f"{row[f'{part}_tpot_ms']:.1f}" for part in ("median", "p99")),
                f"{row['mean_speedup']:.2f}x" if row.get("mean_speedup") else "",
            )
            for row in _rows(f"{folder}/load")
        ),
        words=2,
    )


def sharing(folder: str = "opt-1.3b-bfloat16-32") -> None:
    """What groups of new requests gain, and turns of slow rows."""

    def cell(row: dict[str, Any], name: str) -> str:
        return f"{row[name]:.0f} ({row[f'{name}_ratio']:.2f}x)" if row.get(name) else ""

    _print(
        ("requests", "`--admit-together`", "`--max-slowdown`", "tokens/s", "per token, ms: the slow", "the fast"),
        (
            (
                f"all at {row['fast']:g}x"
                if row["queue"] == "fast"
                else f"{row['slow']:g}x and {row['fast']:g}x in turn",
                str(row["admit_together"]),
                f"{row['max_slowdown']:g}",
                f"{row['tokens_per_second']:.1f} ({row['tokens_per_second_ratio']:.2f}x)",
                cell(row, "slow_token_ms"),
                cell(row, "fast_token_ms"),
            )
            for row in _rows(f"{folder}/sharing")
        ),
        words=1,
    )


def _rows(folder: str) -> list[dict[str, Any]]:
    """None before it is measured."""
    file = RESULTS / folder / "table.json"
    return json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []


def _print(header: Sequence[str], rows: Iterable[Sequence[str]], *, words: int) -> None:
    found = list(rows)
    print(f"\n{markdown_table(header, found, words) if found else 'Not measured yet.'}\n")
