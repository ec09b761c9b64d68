"""The tables of README.md, results/README.md and the model card, printed from results/*/table.json between cog marks.

`make format` writes them, `make lint` fails where a file says something else than the results do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "results"
#: Ratios further from their target than this share are shown beside the score.
OFF_TARGET = 0.02

Row = dict[str, Any]  # one method at one speed, as in evaluation.report


@cache
def _saved(folder: str) -> dict[str, Any]:
    saved: dict[str, Any] = json.loads((RESULTS / folder / "table.json").read_text(encoding="utf-8"))
    return saved


def _print(header: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 0) -> None:
    """A Markdown table; all columns but the first ``words`` are numbers."""
    rule = ["---"] * words + ["--:"] * (len(header) - words)
    print()
    for cells in (header, rule, *rows):
        print(f"| {' | '.join(cells)} |")
    print()


def _target(row: Row) -> str:
    return f"{row['target']:g}x"


def own_texts(folder: str, up: str = "") -> None:
    """One adapter at every speed, on the full model's own texts; ``up`` leads to the repository's root."""
    saved = _saved(folder)
    rows = saved["rows"]
    _print(
        (
            "target, of layers",
            f"layers per step, of {rows[0]['step_layers']:g}",
            "KL",
            "same token",
            "agreement",
            "nats of its texts",
            "repeated 4-grams",
            "a step is faster",
            "the job is faster",
        ),
        [
            (
                _target(row),
                f"{row['step_layers']:g}",
                f"{row['kl']:.2f}" + _within(row),
                f"{row['top_1']:.0f}%",
                f"{row['agreement']:.0f}",
                f"{row['text_loss']:.2f}",
                f"{row['repetition']:.1f}%",
                f"{row['step_clock_ratio']:.2f}x",
                f"{row['job_clock_ratio']:.2f}x",
            )
            for row in rows
        ],
    )
    inputs = saved["about"]["rows"].replace(" of jsonl", "")
    print(f"{inputs}; {saved['about']['machine']}. [All figures]({up}results/{folder}/table.md).")


#: What a task's rows are called, by their checkpoint's folder; other rows are the full model's.
OF_A_TASK = {
    "adapter": "adapter",
    "before": "the adapter of `results/smollm2`",
    "pruned-3": "ten of its layers alone",
}


def _within(row: Row) -> str:
    """Return the interval of a row's KL; full depth has none."""
    low, high = row.get("kl_interval", (0, 0))
    return f" ({low:.2f} to {high:.2f})" if high else ""


def task(folder: str) -> None:
    """A model, its adapters at every speed, and a model of a third of its layers, on a task with references."""
    saved = _saved(folder)
    rows = [*saved["rows"], *_saved(f"{folder}/pruned")["rows"][1:]]
    count = int(saved["about"]["rows"].split()[0])

    def cells(row: Row) -> tuple[str, ...]:
        low, high = row["rouge_l_interval"]
        name = OF_A_TASK.get(Path(row["model"]).name)
        return (
            f"{name}, {_target(row)}" if name else "full depth",
            f"{row['step_layers']:g}",
            f"{row['rouge_l']:.2f}",
            f"{row['rouge_l_difference']:+.2f} ({low:+.2f} to {high:+.2f})" if name else "",
            f"{row['bleu']:.2f}",
            f"{row['tokens'] / count:.0f}",
            f"{row['peak_kv_bytes'] / 1e6:.0f} MB",
        )

    heads = (
        "",
        "layers",
        "ROUGE-L",
        "from full depth (95%)",
        "BLEU",
        "tokens of a text",
        "most keys and values of a batch",
    )
    _print(heads, map(cells, rows), words=1)
    print(f"{saved['about']['rows']}; {saved['about']['machine']}.")


#: What rows of our own method are called, by their checkpoint's folder.
OURS = {"adapters": "**adapter**", "closed-form": "maps in closed form", "shared": "all weights, SkipDecode, distilled"}


def _by_method(tables: Iterable[dict[str, Any]]) -> dict[str, dict[float, list[Row]]]:
    """The rows of tables, by what the method is called and by target."""
    found: dict[str, dict[float, list[Row]]] = {}
    for table in tables:
        for row in table["rows"]:
            if row["method"] != "full":
                ours = OURS.get(row["model"], "untrained")
                top_alone = "top layers alone, untrained" if row["method"].startswith("top-alone") else row["label"]
                name = ours if row["method"] == "skipdecode" else top_alone
                found.setdefault(name, {}).setdefault(row["target"], []).append(row)
    return found


def longer(*folders: str) -> None:
    """KL of methods after shorter and longer training on the same texts, one seed; the interval of the last."""
    tables = [_saved(folder) for folder in folders]
    found = [_by_method([table]) for table in tables]
    targets = sorted(found[-1][OURS["adapters"]])

    def cell(name: str, target: float) -> str:
        told: dict[str, Row | None] = {}
        for each in found:
            rows = each.get(name, {})  # a schedule's own target is the ratio of its whole layers
            near = min(rows, key=lambda known: abs(known - target), default=None)
            row = None if near is None else rows[near][0]
            told["not run" if row is None else f"{row['kl']:.2f}"] = row
        *_, last = told.values()
        return ", ".join(told) + (_within(last) if last else "")

    names = dict.fromkeys(name for each in reversed(found) for name in each)
    _print(
        ("KL", *(f"{target:g}x" for target in targets)),
        [(name, *(cell(name, target) for target in targets)) for name in names],
        words=1,
    )
    print(f"{tables[-1]['about']['rows'].replace(' of jsonl', '')}; {tables[-1]['about']['machine']}.")


def seeds(folder: str) -> None:
    """Methods after the same steps on the same texts: means and extremes over seeds, of one seed 95% over texts."""
    tables = [_saved(str(path.parent.relative_to(RESULTS))) for path in sorted(RESULTS.glob(f"{folder}/*/table.json"))]
    found = _by_method(tables)

    def cell(rows: Sequence[Row]) -> str:
        kl, same = [row["kl"] for row in rows], mean(row["top_1"] for row in rows)
        low, high = (min(kl), max(kl)) if len(kl) > 1 else rows[0].get("kl_interval") or (None, None)
        spread = "" if low is None else f" ({low:.2f} to {high:.2f})"
        return f"{mean(kl):.2f}{spread}, {same:.0f}%, {mean(row['step_layer_ratio'] for row in rows):.2f}x"

    targets = sorted({target for by_target in found.values() for target in by_target})
    _print(
        (
            "KL (seeds; of one seed 95% over texts), same token, layers saved",
            "seeds",
            *(f"{target:g}x" for target in targets),
        ),
        [
            (name, str(len(by_target[targets[0]])), *(cell(by_target[target]) for target in targets))
            for name, by_target in found.items()
        ],
        words=1,
    )
    print(f"{tables[0]['about']['rows'].replace(' of jsonl', '')}; {tables[0]['about']['machine']}.")


def two_ways(folder: str) -> None:
    """Two checkpoints of one method at each speed, on the full model's own texts."""
    saved = _saved(folder)

    def cells(row: Row) -> tuple[str, ...]:
        low, high = row["kl_interval"]
        near = f"{row['kl']:.2f} ({low:.2f} to {high:.2f})" if row["kl"] else "0.00"
        return near, f"{row['top_1']:.0f}%", f"{row['text_loss']:.2f}", f"{row['repetition']:.1f}%"

    names = {"fast": "adapter", "all-weights": "all weights"}
    rows = [row for row in saved["rows"] if row["model"] in names]
    _print(
        ("trained", "target", "KL", "same token", "nats of its texts", "repeated 4-grams"),
        [(names[row["model"]], _target(row), *cells(row)) for row in rows],
        words=1,
    )
    print(f"{saved['about']['rows'].replace(' of jsonl', '')}; {saved['about']['machine']}.")


def answer(folder: str, *rows: str) -> None:
    """What each row wrote to the first prompt."""
    prompt = json.loads((RESULTS / folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[0])
    print(f"\n> {prompt['messages'][0]['content']}\n")
    for name in rows:
        row = json.loads((RESULTS / folder / "rows" / f"{name}.json").read_text(encoding="utf-8"))
        print(f"- **{_target(row)}**: {' '.join(row['texts'][0].split())}")
    print()


def frontier(folder: str = "frontier") -> None:
    """Quality, tokens per second and memory of each way, and how they were measured."""
    saved = _saved(folder)
    batches = sorted(int(key.rsplit("_", 1)[1]) for key in saved["rows"][0] if key.startswith("ratio_"))

    def rate(row: Row, batch: int) -> str:
        known = f"ratio_{batch}" in row
        return f"{row[f'tokens_per_second_{batch}']:.0f} ({row[f'ratio_{batch}']:.2f}x)" if known else ""

    _print(
        ("way", "agreement", "nats of its texts", "repeated 4-grams", *(f"batch {n}" for n in batches), "memory"),
        [
            (
                row["way"],
                f"{row['agreement']:.0f}",
                f"{row['nats']:.2f}",
                f"{row['repetition']:.0f}%",
                *(rate(row, batch) for batch in batches),
                f"{row['peak_rss'] / 1e9:.2f} GB",
            )
            for row in saved["rows"]
        ],
        words=1,
    )
    print(f"{saved['about']['machine']}; {saved['about']['method']}.")


def speeds(folder: str = "e2e", up: str = "") -> None:
    """One checkpoint at every speed: work, clock and quality side by side; faster than the same model at full depth."""
    saved = _saved(folder)
    full, *faster = rows = saved["rows"]
    layers = f"{full['step_layers']:g}"
    _print(
        (
            "target, of layers",
            f"layers per step, of {layers}",
            "a step is faster",
            "the job is faster",
            "BLEU",
            "ROUGE-L",
        ),
        (
            (
                _target(row),
                f"{row['step_layers']:.1f} ({row['step_layer_ratio']:.2f}x fewer)" if row in faster else layers,
                f"{row['step_clock_ratio']:.2f}x",
                f"{row['job_clock_ratio']:.2f}x",
                f"{row['bleu']:.2f}",
                f"{row['rouge_l']:.2f}",
            )
            for row in rows
        ),
    )
    ends = [end for row in faster for score in ("bleu", "rouge_l") for end in row[f"{score}_interval"]]
    machine, *_ = saved["about"]["machine"].split(";")
    print(f"{saved['about']['rows']}; {machine}. Differences from 1x: 95% intervals within", end=" ")
    print(f"{min(ends):+.2f} to {max(ends):+.2f}. [All figures]({up}results/{folder}/table.md).")


def differences(folder: str = "e2e") -> None:
    """What each speed costs in BLEU and ROUGE-L against the same checkpoint at full depth."""
    _, *rows = _saved(folder)["rows"]
    _print(
        ("E2E, achieved layer ratio", *(f"{row['step_layer_ratio']:.2f}x" for row in rows)),
        [
            (label, *(f"{row[f'{score}_difference']:+.2f}" for row in rows))
            for label, score in (("BLEU", "bleu"), ("ROUGE-L", "rouge_l"))
        ],
        words=1,
    )


def methods(folder: str, *speedups: int) -> None:
    """BLEU of every method at each target, the achieved ratio where it is off, and the clock at the last target."""

    def cells(rows: dict[float, Row], show: Callable[[Row], str]) -> list[str]:
        return [show(rows[speedup]) for speedup in speedups]

    def score(row: Row) -> str:
        ratio, target = row["token_layer_ratio"], row["target"]
        return f"{row['bleu']:.2f}" + f" ({ratio:.2f}x)" * (abs(ratio / target - 1) > OFF_TARGET)

    lines = []
    for label, group in groupby(_saved(folder)["rows"], lambda row: row["label"]):
        rows = {row["target"]: row for row in group}
        if not {*speedups} <= {*rows}:  # the full model
            continue
        one = "yes" if len({row["model"] for row in rows.values()}) == 1 else "no"
        lines.append((label, one, *cells(rows, score), f"{rows[speedups[-1]]['job_clock_ratio']:.2f}x"))
        if any(row["step_layer_ratio"] != row["token_layer_ratio"] for row in rows.values()):
            ran = cells(rows, lambda row: f"{row['step_layer_ratio']:.2f}x")
            lines.append(("… ratio of the layers that its batches ran", "", *ran, ""))
    targets = [f"{speedup}x" for speedup in speedups]
    _print(("method", "one checkpoint", *targets, f"wall clock at {targets[-1]}"), lines, words=2)


def by_position(folder: str) -> None:
    """How far speeds are from full depth along its texts, and how many greedy texts are still the same."""
    found = json.loads((RESULTS / folder / "by_position.json").read_text(encoding="utf-8"))
    speeds, lines = found["speeds"], []
    for parts in zip(*speeds.values(), strict=True):
        if parts[0]["tokens"]:
            cells = [f"{parts[0]['first']} to {parts[0]['last']}"]
            for part in parts:
                cells += [f"{100 * part['same'] / part['tokens']:.0f}%", f"{part['kl'] / part['tokens']:.2f}"]
                cells.append(f"{part['still_same']} of {part['texts']}" if part["texts"] else "")
            lines.append(cells)
    heads = [f"{float(s):g}x: {what}" for s in speeds for what in ("same token", "KL", "greedy texts still the same")]
    _print(("tokens", *heads), lines, words=1)


def card() -> None:
    """The model card's table."""
    _print(
        ("target", "BLEU", "ROUGE-L", "layers per step", "fewer layers", "peak KV"),
        (
            (
                _target(row),
                f"{row['bleu']:.2f}",
                f"{row['rouge_l']:.2f}",
                f"{row['step_layers']:.2f}",
                f"{row['step_layer_ratio']:.2f}x",
                f"{row['peak_kv_bytes'] / 1e6:.1f} MB",
            )
            for row in _saved("e2e")["rows"]
        ),
    )


def card_metadata() -> None:
    """The model card's ``results``, as the hub reads them."""
    for row in _saved("e2e")["rows"]:
        print(
            f"""\
      - task:
          type: text-generation
          name: data-to-text
        dataset:
          type: tuetschek/e2e_nlg
          name: E2E NLG, 630 distinct test inputs
          args: {{speedup: {row["target"]:g}}}
        metrics:
          - type: bleu
            value: {row["bleu"]:.2f}
            name: BLEU at {_target(row)} (lower-cased sacrebleu, all references, greedy)
          - type: rouge
            value: {row["rouge_l"]:.2f}
            name: ROUGE-L at {_target(row)} (F-measure with stemming, best reference, greedy)"""
        )


def clock(*folders: str) -> None:
    """Speed-ups asked for on the clock, predicted and got, from the tables of ``skipdecode bench``."""
    lines = []
    for folder in folders:
        for row in json.loads((RESULTS / folder / "table.json").read_text(encoding="utf-8"))["rows"]:
            of = row["asked_of"]
            if row["asked"] == 1:
                continue
            if "refused" in row:
                lines.append(
                    (str(row["batch_size"]), f"{row['asked']:g}x {of}", *["cannot be had"] * 2, "", "", "", "")
                )
                continue
            got = row[f"{of}_ratio"]
            lines.append(
                (
                    str(row["batch_size"]),
                    f"{row['asked']:g}x {of}",
                    f"{row['max_depth']} to {row['min_depth']}",
                    str(row["prompt_layers"]),
                    f"{row[f'predicted_{of}_ratio']:.2f}x",
                    f"{got:.2f}x",
                    f"{got / row['asked']:.3f}",
                    f"{row['step_ratio']:.2f}x, {row['job_ratio']:.2f}x",
                )
            )
    heads = ("batch", "asked", "depths", "prompt", "predicted", "got", "got / asked", "a step, the job is faster")
    _print(heads, lines)


def jobs(folder: str = "e2e-job") -> None:
    """A checkpoint whose prompt runs few layers too: what a step and the whole job gain, and what it costs."""
    rows = _saved(folder)["rows"]
    _print(
        (
            "schedule",
            "layers per step",
            "fewer layers, a step",
            "the job",
            "a step is faster",
            "the job",
            "BLEU",
            "ROUGE-L",
        ),
        (
            (
                _label(row),
                f"{row['step_layers']:.1f}",
                f"{row['step_layer_ratio']:.2f}x",
                f"{row['job_layer_ratio']:.2f}x",
                f"{row['step_clock_ratio']:.2f}x",
                f"{row['job_clock_ratio']:.2f}x",
                f"{row['bleu']:.2f}",
                f"{row['rouge_l']:.2f}",
            )
            for row in rows
        ),
        words=1,
    )


def _label(row: Row) -> str:
    """What a row's schedule was made for."""
    name = str(row["label"])
    if name.endswith("-job.json"):
        return f"planned for {name.removesuffix('-job.json')}x of the job's clock"
    return "full depth" if row["target"] == 1 else f"{_target(row)} of a step's layers"
