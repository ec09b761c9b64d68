"""Quality against speed: a model at several speeds, in int8, pruned, with prompt lookup, and in llama.cpp.

    python benchmarks/frontier.py smollm2 results/smollm2/adapter --gguf FILE --pruned "pruned=FOLDER" --limit 12

Run it with nothing else computing. Quality is that of each prompt's greedy output, against the full model's in float32.
Speed is the tokens per second of decoding, against the full model's in bfloat16. All ways take turns; medians count.
Decoding is a call's time less that of the same call with one new token. ``--gguf`` needs llama-cpp-python.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from skipdecode.data.examples import read_examples
from skipdecode.data.metrics import Agreement, Repetition
from skipdecode.data.tasks import get_task
from skipdecode.data.tokenize import encode_prompts
from skipdecode.generation.generate import generate_ids
from skipdecode.loading.device import machine
from skipdecode.loading.load import Checkpoint
from skipdecode.schedule import Schedule

ROOT = Path(__file__).resolve().parents[1]
BASELINE = "full model, bfloat16"
#: Takes prompts of one length and a number of new tokens; returns the new tokens of each.
Generate = Callable[[list[list[int]], int], list[list[int]]]


def transformers_way(model: Any, pad: int, schedule: Schedule, **options: Any) -> Generate:
    """Return a way that calls ``model.generate`` with a schedule."""

    class Ids:
        """A tokenizer that returns token ids as text."""

        pad_token_id = pad
        eos_token = None

        def decode(self, ids: Sequence[int], **_: Any) -> str:
            return " ".join(map(str, ids))

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        same: dict[str, Any] = {"min_new_tokens": count, "max_new_tokens": count}
        tokenizer: Any = Ids()
        output = generate_ids(model, tokenizer, prompts, schedule, len(prompts), **same, **options)
        return [[int(token) for token in each.text.split()] for each in output.completions]

    return generate


def llama_cpp_way(file: Path, ends: Sequence[int], rows: int, length: int) -> Generate:
    """Return a way that runs llama.cpp: all rows in one ``llama_decode`` per step."""
    import ctypes

    import llama_cpp
    import numpy as np

    loading = llama_cpp.llama_model_default_params()
    loading.use_extra_bufts = False  # its AMX kernels crash with Q4_1
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), loading)
    words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    params = llama_cpp.llama_context_default_params()
    params.n_seq_max = rows
    params.n_ctx = params.n_batch = rows * length
    params.n_threads = params.n_threads_batch = torch.get_num_threads()
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def step(columns: list[list[int]], position: int) -> list[int]:
        batch.n_tokens = 0
        last = []
        for row, tokens in enumerate(columns):
            for offset, token in enumerate(tokens):
                i = batch.n_tokens
                batch.token[i] = token
                batch.pos[i] = position + offset
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = row
                batch.logits[i] = offset == len(tokens) - 1
                batch.n_tokens += 1
            last.append(batch.n_tokens - 1)
        if code := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        chosen = []
        for index in last:
            pointer = ctypes.cast(llama_cpp.llama_get_logits_ith(context, index), ctypes.POINTER(ctypes.c_float))
            logits = np.ctypeslib.as_array(pointer, (words,))
            logits[list(ends)] = -np.inf
            chosen.append(int(logits.argmax()))
        return chosen

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        tokens = step(prompts, 0)
        outputs = [[token] for token in tokens]
        for position in range(len(prompts[0]), len(prompts[0]) + count - 1):
            tokens = step([[token] for token in tokens], position)
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
        return outputs

    return generate


def ways(given: argparse.Namespace, checkpoint: Checkpoint) -> dict[str, Generate]:
    """Return all ways for which files are given, the full model in bfloat16 first."""
    found: dict[str, Generate] = {}
    pad = checkpoint.tokenizer.pad_token_id
    full = Schedule.full(checkpoint.num_layers)
    kinds: dict[str, dict[str, Any]] = {"bfloat16": {"dtype": "bfloat16"}, "int8": {"quantization": "int8"}}
    for kind, options in kinds.items():
        for number, adapter in enumerate(given.adapters):
            model = Checkpoint.resolve(given.model, adapter).load(**options)
            if not number:
                found[f"full model, {kind}"] = transformers_way(model, pad, full)
            for speedup, schedule in Checkpoint.resolve(given.model, adapter).schedules.items():
                found.setdefault(f"{speedup:g}x, {kind}", transformers_way(model, pad, schedule))
            if kind == "bfloat16" and not number:
                found["prompt lookup, bfloat16"] = transformers_way(model, pad, full, prompt_lookup_num_tokens=10)
    for text in given.pruned:
        name, _, folder = text.partition("=")
        pruned = Checkpoint.resolve(folder)
        found[name] = transformers_way(pruned.load(dtype="bfloat16"), pad, Schedule.full(pruned.num_layers))
    if given.gguf:
        ends = checkpoint.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else ends
        length = given.prompt_tokens + given.new_tokens + 64
        found["llama.cpp, the GGUF file"] = llama_cpp_way(given.gguf, ends, max(given.batch), length)
    return found


def seconds(generate: Generate, prompts: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
    """Return the seconds of decoding, and the outputs."""
    start = time.perf_counter()
    generate(prompts, 1)
    middle = time.perf_counter()
    outputs = generate(prompts, count)
    return time.perf_counter() - middle - (middle - start), outputs


@torch.no_grad()
def loss(model: Any, prompt: list[int], output: list[int]) -> float:
    """Return the mean negative log-likelihood of an output under the full model, in nats per token."""
    logits = model(torch.tensor([prompt + output]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return float(-logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None]).mean())


def main() -> None:
    """Generate, score, time, and write ``table.json`` and ``frontier.png``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("adapters", nargs="+", help="of a speed, the first that has it counts")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    parser.add_argument("--pruned", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--prompts", default=str(ROOT / "results" / "smollm2" / "prompts.jsonl"))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--batch", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("runs/frontier"))
    given = parser.parse_args()
    checkpoint = Checkpoint.resolve(given.model)
    tokenizer = checkpoint.tokenizer
    examples = read_examples(given.prompts, get_task())[: given.limit]
    prompts = encode_prompts(tokenizer, [example.prompt for example in examples])
    reference = checkpoint.load(dtype="float32", device="cpu")
    full = transformers_way(reference, tokenizer.pad_token_id, Schedule.full(checkpoint.num_layers))
    texts = [full([prompt], given.new_tokens)[0] for prompt in prompts]
    equal = [(prompt + text)[: given.prompt_tokens] for prompt, text in zip(prompts, texts, strict=True)]
    known = ways(given, checkpoint)
    outputs: dict[str, list[list[int]]] = {name: [] for name in known}
    times: dict[tuple[str, int], list[float]] = {}
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first is not counted
        for name, generate in known.items():
            took, made = seconds(generate, [prompt], given.new_tokens)
            if number:
                times.setdefault((name, 1), []).append(took)
                outputs[name] += made
        print(f"prompt {number} of {len(prompts)}", flush=True)
    for batch in [size for size in given.batch if size > 1]:
        rows = [equal[i % len(equal)] for i in range(batch)]
        for number in range(given.rounds + 1):
            for name in [name for name in known if not name.startswith("prompt lookup")]:
                took, _ = seconds(known[name], rows, given.new_tokens)
                if number:
                    times.setdefault((name, batch), []).append(took)
            print(f"batch {batch}, round {number} of {given.rounds}", flush=True)
    table = []
    expected = [[text] for text in tokenizer.batch_decode(texts)]
    for name, made in outputs.items():
        decoded = tokenizer.batch_decode(made)
        row: dict[str, Any] = {"way": name, "agreement": Agreement().score(decoded, expected)}
        row["repetition"] = Repetition().score(decoded, expected)
        row["nats"] = statistics.mean(loss(reference, *pair) for pair in zip(prompts, made, strict=True))
        for batch in given.batch:
            if own := times.get((name, batch)):
                base = times[BASELINE, batch]
                row[f"tokens_per_second_{batch}"] = batch * (given.new_tokens - 1) / statistics.median(own)
                row[f"ratio_{batch}"] = statistics.median(b / o for b, o in zip(base, own, strict=True))
        table.append(row)
    method = (
        f"{len(prompts)} prompts, {given.new_tokens} greedy tokens each, end-of-sequence suppressed; larger batches: "
        f"prompts of {given.prompt_tokens} tokens, {given.rounds} rounds; all ways in turn, medians"
    )
    about = {"machine": machine(), "method": method, "command": shlex.join(["python", *sys.argv])}
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "table.json").write_text(json.dumps({"about": about, "rows": table}, indent=1) + "\n")
    draw(table, given.batch, given.output / "frontier.png")


def draw(rows: list[dict[str, Any]], batches: Sequence[int], file: Path) -> None:
    """Plot the loss under the full model against tokens per second, a panel for each batch size."""
    figure, panels = plt.subplots(1, len(batches), figsize=(5 * len(batches), 5), layout="constrained", squeeze=False)
    for panel, batch in zip(panels[0], batches, strict=True):
        for number, row in enumerate(rows):
            if f"ratio_{batch}" in row:
                panel.plot(row[f"ratio_{batch}"], row["nats"], "osv^<>DPX*"[number % 10], label=row["way"])
        panel.set(xlabel="tokens per second, against the full model in bfloat16", ylabel="loss under the full model")
        panel.set_title(f"batch {batch}")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
