"""The tables of docs/serving_results.md, of what benchmarks/serving measured, printed between cog marks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from skipdecode.evaluation.report import markdown_table

RESULTS = Path(__file__).resolve().parent.parent / "results" / "serving"
#: What is shown of the engines: name and folder.
ENGINES = [
    ("bfloat16, 32 slots", "opt-1.3b-bfloat16-32"),
    ("int8 weights (W8A8), 32 slots", "opt-1.3b-w8a8-32"),
    ("bfloat16, 8 slots", "opt-1.3b-bfloat16-8"),
]


def engines() -> None:
    """vLLM with the plugin at constant depths beside stock vLLM: a step, its forward pass, a queue."""
    lines = []
    for name, folder in ENGINES:
        rows = {
            (load, row["form"], row["speedup"]): row
            for load in ("lockstep", "continuous")
            for row in _rows(f"{folder}/{load}")
            if row["engine"] != "stock" and "int8_head" not in row["serving"]  # an option of an earlier version
        }
        for form, speedup in (("", 1.0), ("flat", 3.0), ("flat", 5.0)):
            step, queue = rows["lockstep", form, speedup], rows.get(("continuous", form, speedup))
            prompt = rows.get(("continuous", "prompt", speedup))
            cells = [f"{step[part]:.2f}x" for part in ("step_layer_ratio", "forward_ms_ratio", "step_ms_ratio")]
            cells += [f"{row['tokens_per_second_ratio']:.2f}x" if row else "" for row in (queue, prompt)]
            lines.append([name if speedup == 1 else "", f"{speedup:g}x", *cells])
    heads = ("engine", "asked", "fewer layers", "forward pass", "step", "queue", "queue, shallow prompts")
    _print(heads, lines, words=2)


def adapters(folder: str = "smollm2-32-adapter") -> None:
    """A decode step in ms, stock and at each of an adapter's speeds, without what it learnt and with it."""
    lines = []
    for name, at in (("compiled", folder), ("`--enforce-eager`", f"{folder}-eager")):
        rows = {(row["engine"], row["speedup"]): row for row in _rows(f"{at}/lockstep")}
        rounds = [json.loads(line)["rows"] for line in (RESULTS / at / "lockstep" / "rounds.jsonl").open()]
        steps = [{(row["engine"], row["speedup"]): row["step_ms"] for row in each} for each in rounds]
        lines.append([name, "1x", f"{rows.pop(('stock', 1.0))['step_ms']:.1f}", "", "", ""])
        for speedup in sorted({speedup for _, speedup in rows}):
            bare, adapter = rows["skipdecode", speedup], rows["adapter", speedup]
            cost = median(step["adapter", speedup] / step["skipdecode", speedup] for step in steps) - 1
            cells = [f"{row['step_ms']:.1f}" for row in (bare, adapter)]
            lines.append(["", f"{speedup:g}x", *cells, f"{cost:+.0%}", f"{adapter['step_ms_ratio']:.2f}x"])
    heads = ("server", "asked", "step, ms", "with the adapter, ms", "costs", "faster than its stock")
    _print(heads, lines, words=2)


def load(folder: str = "demo-32") -> None:
    """Servers at fixed rates of arrivals and at saturation, with and without the load policy."""
    rows = [
        (
            row["arrivals"],
            " to ".join(name if name == "stock" else f"{name}x" for name in row["engine"].split("-")),
            f"{row['request_throughput']:.2f}",
            f"{row['request_goodput']:.2f}",
            f"{row['median_ttft_ms']:.0f}",
            f"{row['median_tpot_ms']:.1f}",
            f"{row['mean_speedup']:.2f}x" if row.get("mean_speedup") else "",
        )
        for row in _rows(f"{folder}/load")
    ]
    _print(
        ("arrivals", "server", "requests/s", "good", "first token, ms", "per token, ms", "mean speed-up"), rows, words=2
    )


def soak() -> None:
    """What an hour of random requests came to."""
    found = json.loads((RESULTS / "soak.json").read_text("utf-8"))
    asked, memory, end = found["requests"], found["memory_mib"], found["engine_killed"]
    rows = [
        ("requests", f"{sum(asked.values()):,}"),
        ("of clients that left, or were killed", f"{asked['leave'] + asked['leave stream']:,}, {asked['killed']:,}"),
        ("sampled with a seed", f"{asked['seed']:,}"),
        ("bad, and refused as they should be", f"{asked['bad']:,}"),
        ("wrong answers", f"{len(found['wrong'])}"),
        ("requests and blocks held at the end", "none" if found["idle_at_the_end"] else "some"),
        ("MiB of memory after a quarter, at the end", ", ".join(f"{each:,.0f}" for each in memory.values())),
        ("engine killed: errors of its clients", f"{end['errors']} of {end['clients']}"),
        ("… the server's exit code, and when", f"{end['exit_code']}, after {end['seconds']} s"),
    ]
    _print(("what", f"in {found['minutes']:g} minutes"), rows, words=1)


def _rows(folder: str) -> list[dict[str, Any]]:
    """None before it is measured."""
    file = RESULTS / folder / "table.json"
    return list(json.loads(file.read_text(encoding="utf-8"))["rows"]) if file.exists() else []


def _print(header: Sequence[str], rows: Iterable[Sequence[str]], *, words: int) -> None:
    print(f"\n{markdown_table(header, list(rows), words)}\n")
