"""IFEval at several speeds, by lm-eval's task with local data; and the same texts scored without the harness.

    pip install 'lm-eval[ifeval]'
    python experiments/ifeval.py MODEL ADAPTER input_data.jsonl OUTPUT.json --speedups 1,1.5,2 --plain 2

nltk's ``punkt_tab`` is needed (``NLTK_DATA``). Decoding is greedy. A speed that OUTPUT holds is not measured again.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import typer
from lm_eval import simple_evaluate
from lm_eval.tasks.ifeval.utils import process_results

from skipdecode import generate, load
from skipdecode.evaluation.lm_eval import SkipLM
from skipdecode.files import read_json, write
from skipdecode.loading.device import machine

STRICT, LOOSE = "prompt_level_strict_acc", "prompt_level_loose_acc"


def main(
    model: str,
    adapter: str,
    prompts: Path,
    output: Path,
    speedups: str = "1,1.5,2",
    plain: float = 2,
    limit: int | None = None,
    new_tokens: int = 512,
    batch_size: int = 32,
) -> None:
    """Measure each speed through the harness, and the speed ``plain`` through ``skipdecode.generate`` too."""
    about = {"model": model, "adapter": adapter, "new_tokens": new_tokens, "machine": machine()}
    found: dict[str, Any] = read_json(output) if output.exists() else {"about": about, "rows": {}}
    task = {
        "task": "ifeval",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(prompts)},
        "test_split": "train",
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "doc_to_target": 0,
        "process_results": judge,
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in (STRICT, LOOSE)],
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": new_tokens},
    }
    for speedup in (float(each) for each in speedups.split(",")):
        if f"{speedup:g}" in found["rows"]:
            continue
        lm = SkipLM(model, adapter=adapter, speedup=speedup, dtype="float32", device="cpu", batch_size=batch_size)
        start = time.monotonic()
        done = simple_evaluate(lm, tasks=[task], limit=limit, apply_chat_template=True, bootstrap_iters=0)
        scores = {name: done["results"]["ifeval"][f"{name},none"] for name in (STRICT, LOOSE)}
        samples = {sample["doc"]["key"]: sample[STRICT] for sample in done["samples"]["ifeval"]}
        row = {"prompts": len(samples)} | scores | {"seconds": round(time.monotonic() - start)}
        if speedup == plain:
            row |= without_harness(model, adapter, speedup, done["samples"]["ifeval"], batch_size, new_tokens)
        found["rows"][f"{speedup:g}"] = row
        write(output, json.dumps(found, indent=1) + "\n")
        print(speedup, row, flush=True)


def judge(doc: dict[str, Any], texts: list[str]) -> dict[str, float]:
    """Whether a text follows all instructions of its prompt, by the checkers of lm-eval's own task."""
    found = process_results(doc, texts)
    return {name: float(found[name]) for name in (STRICT, LOOSE)}


def without_harness(name: str, adapter: str, speedup: float, samples: Any, batch_size: int, new: int) -> dict[str, Any]:
    """The strict score of ``skipdecode.generate``, and how many prompts and texts are judged and written alike."""
    docs = [sample["doc"] for sample in samples]
    chats = [[{"role": "user", "content": doc["prompt"]}] for doc in docs]
    network, tokenizer = load(name, adapter=adapter, dtype="float32", device="cpu")
    done = generate(network, tokenizer, chats, speedup=speedup, batch_size=batch_size, max_new_tokens=new)
    texts = [each.text for each in done.completions]
    scores = [judge(doc, [text])[STRICT] for doc, text in zip(docs, texts, strict=True)]
    return {
        "plain": sum(scores) / len(scores),
        "judged alike": sum(score == sample[STRICT] for score, sample in zip(scores, samples, strict=True)),
        "texts alike": sum(text == sample["resps"][0][0] for text, sample in zip(texts, samples, strict=True)),
    }


if __name__ == "__main__":
    typer.run(main)
