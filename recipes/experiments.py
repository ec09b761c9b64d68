"""What matters in the recipe: one short run per choice from the same full-depth checkpoint, one CSV row each.

    python recipes/experiments.py START E2E_DIR OUTPUT_DIR [--steps 150] [--only NAME,NAME]

START is stage 1 of recipes/e2e.sh. Each run differs from ``base`` in one thing. Scores are on 256 validation inputs.
Started again after a kill, it does only the rows that OUTPUT_DIR/experiments.csv does not hold.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
from pathlib import Path
from typing import Any

from skipdecode import Schedule, load
from skipdecode.benchmark import machine
from skipdecode.calibration import rank_layers
from skipdecode.evaluation import Bench
from skipdecode.fitting import fit
from skipdecode.losses import batches_of, loss_by_position
from skipdecode.objectives import Distillation
from skipdecode.tasks import get_task
from skipdecode.training import arguments, train

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
    "flat": ("constant depth, equal on average", {"decay": "constant"}, {}),
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
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start")
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    table = given.output / "experiments.csv"
    done = {row["name"] for row in csv.DictReader(table.open())} if table.exists() else set()
    for name in given.only.split(",") if given.only else ROWS:
        if name not in done:
            row = {"name": name, "change": ROWS[name][0]} | run(name, given)
            with table.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, row)
                if not done:
                    writer.writeheader()
                writer.writerow(row)
            done.add(name)
    given.output.joinpath("experiments.md").write_text(markdown(table, given.steps), encoding="utf-8")


def markdown(table: Path, steps: int) -> str:
    """The CSV for readers: what changed, and per speed BLEU, ROUGE-L, loss, layers run and seconds."""
    lines = ["| run | what it changes | train s |", "|---|---|--:|"]
    for k in ("1x", "3x", "5x"):
        lines[0] += f" BLEU {k} | ROUGE-L {k} | loss {k} | layers {k} | s {k} |"
        lines[1] += "--:|" * 5
    for row in csv.DictReader(table.open(encoding="utf-8")):
        cells = [row["name"], row["change"], row["train_seconds"]]
        cells += [
            row[f"{what}_{k}"] for k in ("1x", "3x", "5x") for what in ("bleu", "rouge_l", "loss", "layers", "seconds")
        ]
        lines.append(f"| {' | '.join(cells)} |")
    note = f"{steps} steps of 32 from one full-depth checkpoint; 256 validation inputs, greedy, batch 32; {machine()}."
    return "\n".join([*lines, "", note, ""])


def run(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Train, then score at full depth, 3x and 5x."""
    _, form, options = ROWS[name]
    task = get_task("e2e")
    training, validation = task.read(given.data, "train"), task.read(given.data, "validation")[:256]
    training = random.Random(0).sample(training, min(2 * 32 * given.steps, len(training)))
    model, tokenizer = load(given.start, attention="eager")
    layers = model.config.num_hidden_layers
    bench = Bench(task, validation, validation)
    prompts = [example.prompt for example in validation]
    lengths_file = given.output / "lengths.txt"
    if not lengths_file.exists():
        lengths_file.write_text(",".join(map(str, bench.run(model, tokenizer, prompts, None).lengths)))
    lengths = [int(length) for length in lengths_file.read_text().split(",")]
    if form.get("order") == "calibrated":
        batches = batches_of(validation[:64], tokenizer, model, 64)
        form = form | {"order": rank_layers(model, batches).order}
    wanted = options.get("speedups", SPEEDUPS)
    if "horizon" in options:
        schedules = {k: Schedule.for_speedup(k, layers, options["horizon"]) for k in wanted}
    else:
        schedules = {k: fit(layers, k, lengths, **(form if k > 1 else {})) for k in wanted}
    start = time.perf_counter()
    model = train(
        model.train(),
        tokenizer,
        schedules,
        arguments(
            output_dir=str(given.output / name),
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
        task,
        training,
        objective=Distillation(*options["distil"]) if "distil" in options else None,
        weights=options.get("weights"),
    ).eval()
    row: dict[str, Any] = {"train_seconds": round(time.perf_counter() - start)}
    held_out = batches_of(validation, tokenizer, model, 64)
    for k in (1.0, 3.0, 5.0):
        plan = schedules.get(k) or fit(layers, k, lengths)
        result = bench.run(model, tokenizer, prompts, None if k == 1 else plan)
        scores = task.score([r.text for r in result.rows], [example.references for example in validation])
        row |= {
            f"bleu_{k:g}x": round(scores["bleu"], 2),
            f"rouge_l_{k:g}x": round(scores["rouge_l"], 2),
            f"loss_{k:g}x": round(loss_by_position(model, held_out, plan)[0], 4),
            f"layers_{k:g}x": round(result.cost.average_depth, 2),
            f"seconds_{k:g}x": round(result.cost.seconds, 1),
        }
    return row


if __name__ == "__main__":
    main()
