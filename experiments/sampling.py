"""How an adapter's speeds should sample: repetition and loss under the full model of what several settings write.

    python experiments/sampling.py MODEL ADAPTER PROMPTS.jsonl OUTPUT.json --limit 40

PROMPTS are of neither the training nor the test set. A setting that OUTPUT holds is not measured again. The chosen one
goes into ADAPTER/generation_config.json, which the adapter's speeds then use where the user gives nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from skipdecode import generate, load
from skipdecode.data.examples import read_examples, subsample
from skipdecode.data.metrics import Repetition
from skipdecode.data.tasks import get_task
from skipdecode.evaluation.divergence import loss_under
from skipdecode.files import read_json, write
from skipdecode.loading.device import machine
from skipdecode.model.adapter import read_schedules

#: What the model card of SmolLM2 advises.
ADVISED: dict[str, Any] = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy, penalty 1.1": {"do_sample": False, "repetition_penalty": 1.1},
    "T 0.2, top_p 0.9": ADVISED,
    "T 0.2, top_p 0.9, penalty 1.05": ADVISED | {"repetition_penalty": 1.05},
    "T 0.2, top_p 0.9, penalty 1.1": ADVISED | {"repetition_penalty": 1.1},
    # Without the sort of the vocabulary that top_p needs in each step: 76 ms for 32 rows on two cores.
    "T 0.2, penalty 1.1": {"do_sample": True, "temperature": 0.2, "top_k": 0, "repetition_penalty": 1.1},
    "T 0.2, min_p 0.1, penalty 1.1": {"do_sample": True, "temperature": 0.2, "min_p": 0.1, "repetition_penalty": 1.1},
}


def main(
    model: str, adapter: Path, prompts: Path, output: Path, limit: int = 40, new_tokens: int = 96, batch_size: int = 40
) -> None:
    """Measure each setting at 1x and at the adapter's speeds."""
    examples = subsample(read_examples(prompts, get_task(), "test", references=False), limit)
    asked = [example.prompt for example in examples]
    network, tokenizer = load(model, adapter=str(adapter), dtype="float32")
    about = {"prompts": len(asked), "new_tokens": new_tokens, "seed": 0, "machine": machine()}
    found: dict[str, Any] = read_json(output) if output.exists() else {"about": about, "rows": {}}
    for name, options in SETTINGS.items():
        for speedup in (1.0, *read_schedules(adapter)):
            key = f"{name}, {speedup:g}x"
            if key in found["rows"]:
                continue
            same: dict[str, Any] = {"batch_size": batch_size, "max_new_tokens": new_tokens, "seed": 0}
            written = generate(network, tokenizer, asked, speedup=speedup, **same, **options).completions
            repeated = Repetition().rows([each.text for each in written], []).mean()
            loss = loss_under(network, tokenizer, asked, written, batch_size)
            found["rows"][key] = {"repeated 4-grams": round(100 * repeated, 1), "loss under 1x": round(loss, 3)}
            write(output, json.dumps(found, indent=1) + "\n")
            print(key, found["rows"][key], flush=True)


if __name__ == "__main__":
    typer.run(main)
