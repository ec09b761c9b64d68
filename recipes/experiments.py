"""What matters in the recipe: one short run per choice from the same full-depth checkpoint, three rows each.

    python recipes/experiments.py START E2E_DIR RUNS_DIR RESULTS_DIR [--steps 150] [--only NAME,NAME]

START is stage 1 of recipes/e2e.sh. Each run differs from ``base`` in one thing. Scores: 256 validation inputs at
full depth, 3x and 5x, paired with START at full depth. Started again after a kill, it does only what is missing.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from skipdecode import Schedule, load
from skipdecode.core.fitting import fit
from skipdecode.data.metrics import DEFAULT
from skipdecode.data.tasks import get_task
from skipdecode.evaluation.arms import Arm
from skipdecode.evaluation.bench import Bench
from skipdecode.evaluation.layer_order import rank_layers
from skipdecode.evaluation.loss import batches_of
from skipdecode.evaluation.report import save
from skipdecode.evaluation.runner import Evaluation
from skipdecode.evaluation.timing import machine
from skipdecode.methods import get_method
from skipdecode.methods.objectives import Distillation
from skipdecode.training.trainer import arguments, train

SPEEDUPS = (1.0, 2.0, 3.0, 4.0, 5.0)

#: name -> (what it changes, options of the schedule, options of the run)
ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "base": ("linear, top, warm-up 1, budgets drawn equally, cross-entropy", {}, {}),
    "only-5x": ("one budget alone", {}, {"speedups": (5.0,)}),
    "logits-0.5": ("distil logits, weight 0.5", {}, {"distil": (0.5, "logits")}),
    "logits-0.9": ("distil logits, weight 0.9", {}, {"distil": (0.9, "logits")}),
    "hidden-0.5": ("distil hidden states, weight 0.5", {}, {"distil": (0.5, "hidden")}),
    "more-5x": ("5x drawn four times as often", {}, {"weights": (1, 1, 1, 1, 4)}),
    "even": ("order even", {"order": "even"}, {}),
    "flat": ("constant depth, as near to equal on average as whole layers come", {"decay": "constant"}, {}),
    "warmup-0": ("no warm-up layer", {"warmup": 0}, {}),
    "bottom": ("order bottom", {"order": "bottom"}, {}),
    "calibrated": ("order found greedily on START", {"order": "calibrated"}, {}),
    "prompt-8": ("the prompt's last 8 positions decay too", {"prompt_decay": 8}, {}),
    "horizon-64": ("paper's budgets over 64 tokens, which texts never reach", {}, {"horizon": 64}),
    "exponential": ("exponential decay", {"decay": "exponential"}, {}),
    "cosine": ("cosine decay", {"decay": "cosine"}, {}),
    "warmup-2": ("two warm-up layers", {"warmup": 2}, {}),
    "no-full": ("full depth never drawn", {}, {"weights": (0, 1, 1, 1, 1)}),
    "step": ("four stairs", {"decay": "step"}, {}),
    "horizon-16": ("paper's budgets over 16 tokens", {}, {"horizon": 16}),
}


def main() -> None:
    """Train what is missing, score what is missing, write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start")
    for name in ("data", "runs", "results"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--only", default=",".join(ROWS))
    given = parser.parse_args()
    task = get_task("e2e")
    validation = task.read(given.data, "validation")[:256]
    bench = Bench(task, validation, validation, timing_rows=64, repeats=3)
    names = given.only.split(",")
    for name in names:
        if not (given.runs / name / "model.safetensors").exists():
            run(name, given, bench)
    arms = [Arm(get_method("full"), 1.0, given.start, "full-1x")]
    skipping = get_method("skipdecode")
    arms += [Arm(skipping, k, str(given.runs / name), f"{name}-{k:g}x") for name in names for k in (1.0, 3.0, 5.0)]
    rows = []
    evaluation = Evaluation(bench, arms, given.results, lambda arm: print(arm.key))
    for arm, row in zip(arms, evaluation.rows(), strict=True):
        change = ROWS[arm.key.rpartition("-")[0]][0] if arm is not arms[0] else "before any of it"
        rows.append({**row, "label": f"{Path(arm.model).name}: {change}" if arm is not arms[0] else f"START: {change}"})
    about = {
        "runs": f"{given.steps} steps of 32 from START, learning rate 1e-3 with cosine decay, one seed",
        "rows": f"{len(validation)} validation inputs of E2E, greedy, batch 32; losses on the same",
        "clock": f"medians of {bench.repeats} rounds over {bench.timing_rows} inputs, each run alternating with START",
        "vs full": f"START at full depth; paired bootstrap over inputs, {bench.samples} samples",
        "machine": machine(),
    }
    save(rows, [(metric.name, metric.label) for metric in DEFAULT], about, given.results)


def run(name: str, given: argparse.Namespace, bench: Bench) -> None:
    """Train one."""
    _, form, options = ROWS[name]
    training = bench.task.read(given.data, "train")
    training = random.Random(0).sample(training, min(2 * 32 * given.steps, len(training)))
    model, tokenizer = load(given.start, attention="eager")
    layers = model.config.num_hidden_layers
    lengths = bench.generate(model, tokenizer, bench.examples, None).lengths
    if form.get("order") == "calibrated":
        batches = batches_of(bench.held_out[:64], tokenizer, model, 64)
        form = form | {"order": rank_layers(model, batches).order}
    wanted = options.get("speedups", SPEEDUPS)
    if "horizon" in options:
        schedules = {k: Schedule.for_speedup(k, layers, options["horizon"]) for k in wanted}
    else:
        schedules = {k: fit(layers, k, lengths, **(form if k > 1 else {})) for k in wanted}
    train(
        model.train(),
        tokenizer,
        schedules,
        arguments(
            output_dir=str(given.runs / name),
            max_steps=given.steps,
            per_device_train_batch_size=32,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=25,
            adam_beta2=0.98,
            save_strategy="no",
            logging_steps=20,
            use_cpu=True,
        ),
        bench.task,
        training,
        objective=Distillation(*options["distil"]) if "distil" in options else None,
        weights=options.get("weights"),
    )


if __name__ == "__main__":
    main()
