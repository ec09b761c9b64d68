"""What matters in the recipe: one short run per choice from the same full-depth checkpoint, three rows each.

    python recipes/experiments.py START E2E_DIR RUNS_DIR RESULTS_DIR [--steps 150] [--only NAME,NAME]

START is stage 1 of recipes/e2e.sh. Each run is recipes/e2e/experiments.yaml with one change. Scores: 256 validation
inputs at full depth, 3x and 5x, paired with START at full depth. The same command resumes: it does what is missing.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from skipdecode.evaluation.search import spare

from skipdecode import load
from skipdecode.data.collator import batches_of
from skipdecode.data.metrics import DEFAULT
from skipdecode.data.tasks import Example, get_task
from skipdecode.evaluation.evaluate import Evaluation, EvaluationPlan
from skipdecode.evaluation.loss import response_loss
from skipdecode.evaluation.methods import get_method
from skipdecode.evaluation.report import save
from skipdecode.evaluation.variants import Variant
from skipdecode.loading.device import machine
from skipdecode.training.config import TrainingPlan
from skipdecode.training.train import train

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
    "horizon-64": ("paper's budgets over 64 tokens, which texts never reach", {"horizon": 64, "lengths": None}),
    "exponential": ("exponential decay", {"decay": "exponential"}),
    "cosine": ("cosine decay", {"decay": "cosine"}),
    "warmup-2": ("two warm-up layers", {"warmup_layers": 2}),
    "no-full": ("full depth never drawn", {"weights": (0, 1, 1, 1, 1)}),
    "step": ("four stairs", {"decay": "step"}),
    "horizon-16": ("paper's budgets over 16 tokens", {"horizon": 16, "lengths": None}),
}


def main(start: str, data: Path, runs: Path, results: Path, steps: int = 150, only: str = ",".join(ROWS)) -> None:
    """Train what is missing in RUNS, from START, score it, and write the tables to RESULTS."""
    task = get_task("e2e")
    validation = task.read(data, "validation")[:256]
    plan = EvaluationPlan(start, data, task, output=results, batch_size=BATCH, repeats=3)
    names = only.split(",")
    skipping = get_method("skipdecode")
    variants = [Variant(get_method("full"), 1.0, start, "full-1x")]
    variants += [Variant(skipping, k, str(runs / name), f"{name}-{k:g}x") for name in names for k in (1.0, 3.0, 5.0)]
    evaluation = Evaluation(plan, validation, validation, variants)
    missing = [name for name in names if not (runs / name / "model.safetensors").exists()]
    for name in {*names} - {*missing}:
        if json.loads((runs / name / "training.json").read_text("utf-8"))["plan"]["max_steps"] != steps:
            raise typer.BadParameter(f"{runs / name} was not trained for {steps} steps: give another RUNS")
    if missing:
        draw_rows(data, runs / "data", 2 * BATCH * steps)
        lengths = evaluation.held_out_lengths()
        order = rank(start, validation[:64]) if "calibrated" in missing else None
    for name in missing:
        changes = ROWS[name][1] | ({"order": order} if name == "calibrated" else {})
        fixed = {"model": start, "data": runs / "data", "output": runs / name, "max_steps": steps, "lengths": lengths}
        train(TrainingPlan.load(BASE, **fixed | changes), say=print)
    rows: list[dict[str, Any]] = []
    for variant in variants:
        print(variant.key)
        name = variant.key.rpartition("-")[0]
        label = f"{name}: {ROWS[name][0]}" if rows else "START: before any of it"
        rows.append(evaluation.row(variant) | {"label": label})
    about = {
        "runs": f"{steps} steps of {BATCH} from START, learning rate 1e-3 with cosine decay, one seed",
        "rows": f"{len(validation)} validation inputs of E2E, greedy, batch 32; losses on the same",
        "clock": f"medians of {plan.repeats} rounds over {plan.timing_rows} inputs, each run alternating with START",
        "vs full": "START at full depth; paired bootstrap over inputs, 1000 samples",
        "machine": machine(),
    }
    save(rows, [(metric.name, metric.label) for metric in DEFAULT], about, results)


def draw_rows(data: Path, target: Path, count: int) -> None:
    """So many training rows, drawn at random: the release's stand in order."""
    target.mkdir(parents=True, exist_ok=True)
    with (data / "trainset.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    rows = random.Random(0).sample(rows, min(count, len(rows)))
    with (target / "trainset.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def rank(start: str, examples: Sequence[Example]) -> tuple[int, ...]:
    """START's layers, ranked by loss."""
    model, tokenizer = load(start, attn_implementation="eager")
    batches = batches_of(examples, tokenizer, 64)
    return spare(model.config.num_hidden_layers, 1, lambda ways: [response_loss(model, batches, way) for way in ways])


if __name__ == "__main__":
    typer.run(main)
