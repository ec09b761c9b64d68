"""Markdown tables for README.md, docs/ and the model card, printed from results/ between cog marks.

`make format` writes them. `make lint` fails where a page differs from the results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "results"
#: A layer ratio further from its target than this share is shown beside the score.
OFF_TARGET = 0.02

Row = dict[str, Any]


@cache
def read(folder: str) -> dict[str, Any]:
    """Return the table of a folder of results."""
    saved: dict[str, Any] = json.loads((RESULTS / folder / "table.json").read_text(encoding="utf-8"))
    return saved


def show(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> None:
    """Print a Markdown table. Columns after the first ``words`` are numbers."""
    rule = ["---"] * words + ["--:"] * (len(header) - words)
    lines = (f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))
    print("", *lines, "", sep="\n")


def note(folder: str, up: str | None = None) -> None:
    """Print what was measured on which machine, and a link to all figures."""
    about = read(folder)["about"]
    inputs = about["rows"].replace(" of jsonl", "")
    link = "" if up is None else f" [All figures]({up}results/{folder}/table.md)."
    print(f"{inputs}; {about['machine']}.{link}")


def speed(row: Row) -> str:
    """Return a row's requested speed."""
    return f"{row['target']:g}x"


def ratio(row: Row, name: str) -> str:
    """Return a measured speed-up."""
    return f"{row[name]:.2f}x"


def kl(row: Row) -> str:
    """Return a row's KL with its 95% interval. The full model has no interval."""
    low, high = row.get("kl_interval", (0, 0))
    interval = f" ({low:.2f} to {high:.2f})" if high else ""
    return f"{row['kl']:.2f}{interval}"


def adapter_speeds(folder: str, up: str = "") -> None:
    """Print an adapter's quality at each speed, and its speed-ups unless their clock was rough."""
    timed = "rough" not in read(folder)["about"]
    header = ["speed", "layers", "KL", "same next token", "repeated 4-grams"]
    header += ["decoding", "end to end"] * timed
    lines = []
    for row in read(folder)["rows"]:
        line = [speed(row), f"{row['step_layers']:g}", kl(row), f"{row['top_1']:.0f}%", f"{row['repetition']:.0f}%"]
        line += [ratio(row, "step_clock_ratio"), ratio(row, "job_clock_ratio")] * timed
        lines.append(line)
    show(header, lines)
    note(folder, up)


def ifeval() -> None:
    """Print the share of prompts of IFEval all of whose instructions are followed, at each speed."""
    found = json.loads((RESULTS / "ifeval.json").read_text(encoding="utf-8"))
    names = ("prompt_level_strict_acc", "prompt_level_loose_acc")
    lines = [(f"{each}x", *(f"{row[name]:.1%}" for name in names)) for each, row in found["rows"].items()]
    show(("speed", "strict", "loose"), lines)
    about = found["about"]
    print(f"541 prompts, greedy, at most {about['new_tokens']} new tokens; {about['machine']}.")


def sampling() -> None:
    """Print what an adapter's speeds write under several settings of sampling."""
    found = json.loads((RESULTS / "sampling.json").read_text(encoding="utf-8"))
    cells: dict[str, dict[str, Row]] = {}
    for key, row in found["rows"].items():
        name, speed = key.rsplit(", ", 1)
        cells.setdefault(name, {})[speed] = row
    speeds = list(next(iter(cells.values())))
    measures = {"repeated 4-grams": "{:.1f}%", "loss under 1x": "{:.2f}"}
    lines = [
        (name, *(form.format(row[speed][what]) for what, form in measures.items() for speed in speeds))
        for name, row in cells.items()
    ]
    show(
        ("sampling", *(f"{what}, {speed}" if speed == speeds[0] else speed for what in measures for speed in speeds)),
        lines,
    )
    about = found["about"]
    print(f"{about['prompts']} prompts, {about['new_tokens']} new tokens, seed {about['seed']}; {about['machine']}.")


def tokens(folder: str = "gpu_distill") -> None:
    """Print how far two forms of an adapter are from the full model by what they have learned from."""
    found: dict[int, dict[str, Row]] = {}
    for row in read(folder)["curve"]:
        if row["label"] == "one end":  # measured again, a moment later
            continue
        found.setdefault(row["tokens"], {})[row["arm"]] = row
    lines = []
    for count, forms in found.items():
        low, private = forms.get("low") or forms.get("off"), forms.get("all")
        cells = [
            f"{each['people ' + speed][0]:.3f}" if each else "" for each in (low, private) for speed in ("1.5", "2")
        ]
        lines.append((f"{count / 1e6:.1f}", *cells))
    show(("million tokens", "1.5x", "2x", "with weights of its own, 1.5x", "2x"), lines)
    print(f"{read(folder)['machine']}.")


def lora() -> None:
    """Print KL of three speeds on questions before and after they learned LoRA together, and after one did alone."""
    found = json.loads((RESULTS / "lora.json").read_text(encoding="utf-8"))
    names = ("1.25x", "1.5x", "2x")
    runs = {"nothing": found["together"]["divergence"][0]}
    runs |= {way: found[way]["divergence"][1] for way in found if way != "about"}
    lines = []
    for way, row in runs.items():
        count = found[way]["losses"][-1]["text_tokens"] if way in found else 0
        lines.append((way, f"{count / 1e6:.2f}", *(f"{row[f'questions {name}'][0]:.3f}" for name in names)))
    show(("learned", "million tokens", *names), lines)
    print(f"{found['about']['machine']}.")


#: Labels of a task's rows by the folder of their checkpoint. Other rows are the full model's.
TASK_ROWS = {"adapter": "adapter", "before": "adapter of the first table's CPU run", "pruned-3": "ten layers alone"}


def task(folder: str) -> None:
    """Print a fine-tuned model, its adapter at each speed, and a model of ten of its layers."""

    def cells(row: Row) -> Sequence[str]:
        low, high = row["rouge_l_interval"]
        label = TASK_ROWS.get(Path(row["model"]).name)
        difference = f"{row['rouge_l_difference']:+.2f} ({low:+.2f} to {high:+.2f})" if label else ""
        name = f"{label}, {speed(row)}" if label else "full model"
        return (name, f"{row['step_layers']:g}", f"{row['rouge_l']:.2f}", difference, f"{row['bleu']:.2f}")

    rows = [*read(folder)["rows"], *read(f"{folder}/pruned")["rows"][1:]]
    show(("", "layers", "ROUGE-L", "from the full model (95%)", "BLEU"), map(cells, rows))
    note(folder)


def all_weights(folder: str = "smollm2-all-weights") -> None:
    """Print an adapter compared with all weights trained for as long."""
    names = {"fast": "adapter", "all-weights": "all weights"}
    rows = [row for row in read(folder)["rows"] if row["model"] in names]
    lines = [(names[row["model"]], speed(row), kl(row), f"{row['top_1']:.0f}%") for row in rows]
    show(("trained", "speed", "KL", "same next token"), lines)
    note(folder)


def answer(folder: str, *speeds: str) -> None:
    """Print a prompt and its output at each speed."""
    lines = [(RESULTS / folder / f"answer-{each}.jsonl").read_text(encoding="utf-8") for each in speeds]
    rows = [json.loads(line) for line in lines]
    said = {"Question": rows[0]["messages"][0]["content"]} | {
        each: row["text"] for each, row in zip(speeds, rows, strict=True)
    }
    for name, text in said.items():
        print(f"\n> **{name}**: {' '.join(text.split())}")
    print()


def frontier(folder: str = "frontier") -> None:
    """Print quality and tokens per second of each way to run SmolLM2."""
    rows = read(folder)["rows"]
    batches = sorted(int(key.rsplit("_", 1)[1]) for key in rows[0] if key.startswith("ratio_"))

    def rate(row: Row, batch: int) -> str:
        return f"{row[f'ratio_{batch}']:.2f}x" if f"ratio_{batch}" in row else ""

    header = ("", "ROUGE-L vs full", "repeated 4-grams", *(f"batch {batch}" for batch in batches))
    lines = [
        (
            row["way"].replace("full depth", "full model"),
            f"{row['agreement']:.0f}",
            f"{row['repetition']:.0f}%",
            *(rate(row, batch) for batch in batches),
        )
        for row in rows
    ]
    show(header, lines)
    print(f"{read(folder)['about']['machine']}; {read(folder)['about']['method']}.")


def task_speeds(folder: str = "e2e", up: str | None = "") -> None:
    """Print one checkpoint's quality and speed-up at each speed."""
    full, *faster = rows = read(folder)["rows"]
    header = ("speed", f"layers of {full['step_layers']:g}", "BLEU", "ROUGE-L", "decoding", "end to end", "peak KV")
    lines = [
        (
            speed(row),
            f"{row['step_layers']:.1f}",
            f"{row['bleu']:.2f}",
            f"{row['rouge_l']:.2f}",
            ratio(row, "step_clock_ratio"),
            ratio(row, "job_clock_ratio"),
            f"{row['peak_kv_bytes'] / 1e6:.0f} MB",
        )
        for row in rows
    ]
    show(header, lines)
    ends = [end for row in faster for score in ("bleu", "rouge_l") for end in row[f"{score}_interval"]]
    note(folder, up)
    print(f"Differences from 1x: 95% intervals within {min(ends):+.2f} to {max(ends):+.2f}.")


def methods(folder: str, *speedups: int) -> None:
    """Print each method's BLEU at each speed, with the layer ratio where it is off target."""

    def cells(rows: dict[float, Row], cell: Callable[[Row], str]) -> list[str]:
        return [cell(rows[speedup]) for speedup in speedups]

    def score(row: Row) -> str:
        layers = row["token_layer_ratio"]
        off = abs(layers / row["target"] - 1) > OFF_TARGET
        return f"{row['bleu']:.2f}" + (f" ({layers:.2f}x)" if off else "")

    lines = []
    for label, group in groupby(read(folder)["rows"], lambda row: row["label"]):
        rows = {row["target"]: row for row in group}
        if not {*speedups} <= {*rows}:  # the full model
            continue
        lines.append((label, *cells(rows, score), ratio(rows[speedups[-1]], "job_clock_ratio")))
        if any(row["step_layer_ratio"] != row["token_layer_ratio"] for row in rows.values()):
            ran = cells(rows, lambda row: f"{row['step_layer_ratio']:.2f}x")
            lines.append(("… layer ratio of its batches", *ran, ""))
    targets = [f"{speedup}x" for speedup in speedups]
    show(("BLEU", *targets, f"end to end at {targets[-1]}"), lines)
    note(folder)


def paper(folder: str) -> None:
    """Print the paper's comparison: quality, layers that ran, time and memory of each method at each target."""

    def score(row: Row, name: str) -> str:
        low, high = row[f"{name}_interval"]
        return f"{row[name]:.1f}" + (f" ({low:+.1f} to {high:+.1f})" if row["target"] > 1 else "")

    rows = read(folder)["rows"]
    first = {row["label"]: row for row in reversed(rows)}  # a label stands in the first of its rows
    lines = [
        (
            row["label"] if first[row["label"]] is row else "",
            speed(row),
            f"{row['step_layers']:.1f}",
            *(score(row, name) for name in ("bleu", "rouge_l")),
            ratio(row, "step_clock_ratio"),
            ratio(row, "job_clock_ratio"),
            f"{row['peak_kv_bytes'] / 1e6:.0f} MB",
        )
        for row in rows
    ]
    show(("", "target", "layers", "BLEU", "ROUGE-L", "decoding", "end to end", "peak KV"), lines)
    note(folder, "../")
    print("In brackets: 95% interval of the difference from the full model. Layers: of a batch's step.")


def calm(folder: str) -> None:
    """Print what CALM reached for each target, on multi-layer exit after each of its stages."""
    lines = []
    for name, label in (("calm", "multi-layer exit"), ("calm-own", "the same, the full model's texts")):
        for file in sorted((RESULTS / folder).glob(f"{name}-[0-9]*x.json")):
            row = json.loads(file.read_text(encoding="utf-8"))
            ratios = (ratio(row, key) for key in ("token_layer_ratio", "step_layer_ratio", "step_clock_ratio"))
            lines.append((label, speed(row), *ratios, f"{row['bleu']:.1f}", f"{row['rouge_l']:.1f}"))
    show(("CALM on", "target", "fewer layers a token", "a batch", "decoding", "BLEU", "ROUGE-L"), lines)


def forms(folder: str) -> None:
    """Print validation losses of each speed, for each form of schedules that was tried."""
    found: dict[str, dict[str, float]] = {}
    for file in sorted((RESULTS / folder).glob("*@*/checkpoint-*/trainer_state.json")):
        losses = found.setdefault(file.parts[-3].partition("@")[2], {})
        for row in json.loads(file.read_text(encoding="utf-8"))["log_history"]:
            losses |= {name[5:-5]: row[name] for name in row if name.startswith("eval_") and name.endswith("x_loss")}
    speeds = list(next(iter(found.values())))
    lines = [(*form.split("-"), *(f"{losses[name]:.2f}" for name in speeds)) for form, losses in found.items()]
    show(("depth", "bottom layers", *speeds), lines)


def card() -> None:
    """Print the model card's table."""
    task_speeds("e2e", None)


# --- benchmarks/serving.py


def serving(*folders: str) -> None:
    """Print tokens per second and decode steps inside vLLM, against stock vLLM."""
    lines = [
        (
            f"{row['model']}{', adapter' if row['adapter'] else ''}",
            f"{table['about']['prompt_tokens']} + {table['about']['new_tokens']}",
            f"{row['engine']}x",
            ratio(row, "tokens_per_second_ratio"),
            ratio(row, "decode_step_ratio"),
            ratio(row, "step_layer_ratio"),
        )
        for table in (read(f"serving/{folder}") for folder in folders)
        for row in table["rows"]
        if row["engine"] != "stock"
    ]
    show(("model", "tokens", "speed", "tokens/s", "decode step", "fewer layers"), lines, words=2)
    tables = [read(f"serving/{folder}") for folder in folders]
    notes = [f"{t['rows'][0]['model']}: {t['rows'][0]['rounds']} rounds; {t['about']['machine']}." for t in tables]
    print(*dict.fromkeys(notes), sep="\n\n")


def engine() -> None:
    """Print decode steps of vLLM's engine alone."""
    found = read("serving/smollm2-engine")
    lines = [
        (
            f"{row['speedup']:g}x",
            f"{1e3 * found['about']['slots'] / row['step_ms']:.0f}",
            f"{row['step_ms']:.1f} ms",
            ratio(row, "ratio"),
            f"{round(100 * row['adapter_share'])}%" if "adapter_share" in row else "",
        )
        for row in found["rows"]
    ]
    show(("speed", "tokens/s", "decode step", "speed-up", "adapter's share"), lines)
    print(f"{found['about']['machine']}; {found['about']['dtype'].removeprefix('torch.')}.")


def load(folder: str) -> None:
    """Print servers at several rates of requests, with and without the load policy."""
    lines = [
        (
            str(row["rate"]),
            " to ".join(name if name == "stock" else f"{name}x" for name in row["engine"].split("-")),
            f"{row['output_throughput']:.0f}",
            f"{row['request_throughput']:.2f}",
            f"{row['median_ttft_ms']:.0f}",
            f"{row['median_tpot_ms']:.1f}",
        )
        for row in read(f"serving/{folder}")["rows"]
    ]
    show(("arrivals", "server", "tokens/s", "requests/s", "TTFT, ms", "TPOT, ms"), lines, words=2)
