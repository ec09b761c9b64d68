"""What matters in the recipe: one short run per choice from the same full-depth checkpoint, three rows each.

    python recipes/experiments.py START E2E_DIR RUNS_DIR RESULTS_DIR [--steps 150] [--only NAME,NAME]

START is stage 1 of recipes/e2e.sh. Each run is recipes/e2e/experiments.yaml with one change. Scores: 256 validation
inputs at full depth, 3x and 5x, paired with START at full depth. The same command resumes: it does what is missing.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from skipdecode import load
from skipdecode.data.metrics import DEFAULT
from skipdecode.data.tasks import get_task
from skipdecode.evaluation.arms import Arm
from skipdecode.evaluation.bench import Bench
from skipdecode.evaluation.layer_order import rank_layers
from skipdecode.evaluation.loss import batches_of
from skipdecode.evaluation.report import save
from skipdecode.evaluation.runner import Evaluation
from skipdecode.methods import get_method
from skipdecode.training.plan import TrainingPlan
from skipdecode.training.run import train
from skipdecode.weights.device import machine

BASE = Path(__file__).parent / "e2e" / "experiments.yaml"
BATCH = 32

#: name -> (what it changes, in words and as options of the run)
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("linear, top, warm-up 1, budgets drawn equally, cross-entropy", {}),
    "only-5x": ("one budget alone", {"speedup": 5}),
    "logits-0.5": ("distil logits, weight 0.5", {"distill_weight": 0.5}),
    "logits-0.9": ("distil logits, weight 0.9", {"distill_weight": 0.9}),
    "more-5x": ("5x drawn four times as often", {"weights": (1, 1, 1, 1, 4)}),
    "even": ("order even", {"order": "even"}),
    "flat": ("constant depth, as near to equal on average as whole layers come", {"decay": "constant"}),
    "warmup-0": ("no warm-up layer", {"warmup_layers": 0}),
    "bottom": ("order bottom", {"order": "bottom"}),
    "calibrated": ("order found greedily on START", {}),
    "prompt-8": ("the prompt's last 8 positions decay too", {"prompt_decay": 8}),
    "horizon-64": ("paper's budgets over 64 tokens, which texts never reach", {"horizon": 64}),
    "exponential": ("exponential decay", {"decay": "exponential"}),
    "cosine": ("cosine decay", {"decay": "cosine"}),
    "warmup-2": ("two warm-up layers", {"warmup_layers": 2}),
    "no-full": ("full depth never drawn", {"weights": (0, 1, 1, 1, 1)}),
    "step": ("four stairs", {"decay": "step"}),
    "horizon-16": ("paper's budgets over 16 tokens", {"horizon": 16}),
}


def main(start: str, data: Path, runs: Path, results: Path, steps: int = 150, only: str = ",".join(ROWS)) -> None:
    """Train what is missing in RUNS, from START, score it, and write the tables to RESULTS."""
    task = get_task("e2e")
    validation = task.read(data, "validation")[:256]
    bench = Bench(task, validation, validation, timing_rows=64, repeats=3)
    names = only.split(",")
    missing = [name for name in names if not (runs / name / "model.safetensors").exists()]
    if missing:
        draw_rows(data, runs / "data", 2 * BATCH * steps)
        lengths, order = measure(start, bench, "calibrated" in missing)
    for name in missing:
        changes = ROWS[name][1] | ({"order": order} if name == "calibrated" else {})
        fixed = {"model": start, "data": runs / "data", "output": runs / name, "max_steps": steps, "lengths": lengths}
        train(TrainingPlan.load(BASE, **fixed | changes), say=print)
    skipping = get_method("skipdecode")
    arms = [Arm(get_method("full"), 1.0, start, "full-1x")]
    arms += [Arm(skipping, k, str(runs / name), f"{name}-{k:g}x") for name in names for k in (1.0, 3.0, 5.0)]
    evaluation = Evaluation(bench, arms, results, lambda arm: print(arm.key))
    rows = []
    for arm, row in zip(arms, evaluation.rows(), strict=True):
        change = ROWS[arm.key.rpartition("-")[0]][0] if arm is not arms[0] else "before any of it"
        rows.append({**row, "label": f"{Path(arm.model).name}: {change}" if arm is not arms[0] else f"START: {change}"})
    about = {
        "runs": f"{steps} steps of {BATCH} from START, learning rate 1e-3 with cosine decay, one seed",
        "rows": f"{len(validation)} validation inputs of E2E, greedy, batch 32; losses on the same",
        "clock": f"medians of {bench.repeats} rounds over {bench.timing_rows} inputs, each run alternating with START",
        "vs full": f"START at full depth; paired bootstrap over inputs, {bench.samples} samples",
        "machine": machine(),
    }
    save(rows, [(metric.name, metric.label) for metric in DEFAULT], about, results, evaluation.job(arms[0]))


def draw_rows(data: Path, target: Path, count: int) -> None:
    """So many training rows, drawn at random: the release's stand in order."""
    target.mkdir(parents=True, exist_ok=True)
    with (data / "trainset.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    rows = random.Random(0).sample(rows, min(count, len(rows)))
    with (target / "trainset.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def measure(start: str, bench: Bench, ranked: bool) -> tuple[Sequence[int], tuple[int, ...] | None]:
    """Decode steps of START's batches at full depth, and its layers ranked by loss."""
    model, tokenizer = load(start, attention="eager")
    lengths = bench.generate(model, tokenizer, bench.examples, None).lengths
    batches = batches_of(bench.held_out[:64], tokenizer, model, 64) if ranked else []
    return lengths, rank_layers(model, batches).order if ranked else None


if __name__ == "__main__":
    typer.run(main)
