"""KL from the full model by the tokens of text that an adapter had learned from: one line for each checkpoint.

    python experiments/tokens.py MODEL RUN PROMPTS.jsonl CHECKPOINT... --output table.json

RUN is the folder that ``skipdecode distill`` wrote. CHECKPOINTs are copies of its ``checkpoint-N``, of which a run keeps
only the last. The full model's greedy texts for PROMPTS are written anew. Resumes nothing: a checkpoint takes minutes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import typer
from safetensors.torch import load_file

from skipdecode.data.examples import read_examples
from skipdecode.data.tasks import get_task
from skipdecode.evaluation.divergence import divergence
from skipdecode.loading.device import machine
from skipdecode.generation.generate import generate_ids
from skipdecode.data.tokenize import encode_prompts
from skipdecode.loading.load import Checkpoint
from skipdecode.model.inspect import gates_of
from skipdecode.training.distill import prefill
from skipdecode.training.self_generated import keep_texts


def main(
    model: str, run: Path, prompts: Path, checkpoints: list[Path], output: Path = Path("table.json"), limit: int = 1000
) -> None:
    """Measure each checkpoint on the same texts."""
    found = Checkpoint.resolve(model, str(run))
    full = replace(found, adapter=None).load(dtype="bfloat16")
    chosen = [each.prompt for each in read_examples(prompts, get_task(), "test", references=False)][:limit]
    made = generate_ids(
        full, found.tokenizer, encode_prompts(found.tokenizer, chosen), None, 32, do_sample=False, max_new_tokens=96
    )
    texts = keep_texts(chosen, made.completions, typer.echo)
    loaded = found.load(dtype="bfloat16")
    adapter = gates_of(loaded).adapter
    adapter.private = {}  # LoRA of each checkpoint, unmerged
    prefilled = prefill(loaded, found.tokenizer, texts, 16)
    rows = []
    for each in checkpoints:
        state = json.loads((each / "trainer_state.json").read_text("utf-8"))
        weights = load_file(each / "model.safetensors")
        adapter.load_state_dict({name.removeprefix("adapter."): weight for name, weight in weights.items()})
        row = {"step": state["global_step"], "input_tokens": state["num_input_tokens_seen"]}
        schedules = dict(sorted(adapter.schedules.items()))
        for speedup, one in zip(schedules, divergence(prefilled, [*schedules.values()]), strict=True):
            row |= {f"{speedup:g}x": one.kl, f"{speedup:g}x top_1": one.top1}
        typer.echo(row)
        rows.append(row)
        output.write_text(json.dumps({"about": {"machine": machine()}, "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    typer.run(main)
