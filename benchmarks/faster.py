"""What docs/faster.md measures, on random weights: `python benchmarks/faster.py --help`.

Run it alone on the machine: whatever else computes is in its figures. Ways are timed alternately, in one process.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PreTrainedModel

from skipdecode import Schedule, SkipCache, attach
from skipdecode.loading.device import machine
from skipdecode.loading.int8 import optimize
from skipdecode.model.adapter import Adapter
from skipdecode.model.cache_name import CACHE

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prepacked": {"prepack": True},
    "int8": {"quantization": "int8"},
}


def build(args: argparse.Namespace) -> PreTrainedModel:
    """A model of the asked shape; what its weights are does not change its speed."""
    width, heads = args.width, max(args.width // 64, 1)
    groups = max(heads // (3 if heads % 4 else 4), 1)
    common = {"vocab_size": args.vocab, "hidden_size": width, "num_hidden_layers": args.layers}
    common |= {"num_attention_heads": heads, "max_position_embeddings": 4096, "eos_token_id": None, "pad_token_id": 1}
    config: Any = (
        OPTConfig(**common, word_embed_proj_dim=width, ffn_dim=4 * width)
        if args.family == "opt"
        else LlamaConfig(**common, intermediate_size=4 * width, num_key_value_heads=groups)
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()


def one(model: Any, plan: Schedule, batch: int, context: int, count: int) -> list[float]:
    """Milliseconds of each of ``count`` decode steps after a prompt of ``context`` positions, one row padded."""
    cache = SkipCache(model, plan)
    ids, mask = torch.randint(2, 500, (batch, context)), torch.ones(batch, context, dtype=torch.long)
    mask[0, :2] = 0
    taken = []
    with torch.no_grad():
        for _ in range(count + 1):
            positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
            start = time.perf_counter()
            logits = model(
                ids,
                attention_mask=mask,
                position_ids=positions,
                **{CACHE: cache},
                use_cache=True,
                logits_to_keep=1,
            ).logits
            taken.append(1e3 * (time.perf_counter() - start))
            ids, mask = logits[:, -1:].argmax(-1), torch.cat([mask, mask.new_ones(batch, 1)], dim=1)
    return taken[1:]


def alternate(ways: Mapping[str, Callable[[], Sequence[float]]], rounds: int, **labels: Any) -> None:
    """Each way once for nothing, then ``rounds`` times in turn; prints the median and the least step of each."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            times = run()
            if number:
                taken[name] += times
    for name, times in taken.items():
        row = labels | {"way": name, "median_ms": round(statistics.median(times), 3), "least_ms": round(min(times), 3)}
        print(json.dumps(row), flush=True)


def steps(args: argparse.Namespace) -> None:
    """Each of the ways: a step at full depth and at a fifth of the layers."""
    plain = build(args)
    shape = f"{args.family}, width {args.width}, {args.layers} layers, vocabulary {args.vocab}, {args.dtype}"
    print(json.dumps({"command": shlex.join(["python", *sys.argv]), "machine": machine(), "shape": shape}), flush=True)
    models = {name: attach(optimize(deepcopy(plain), **WAYS[name])) for name in args.ways}
    del plain
    for batch in args.batch:
        for depth in (args.layers, max(args.layers // 5, 1)):
            # The prompt is not timed: it runs no more layers than the steps.
            plan = Schedule(args.layers, depth, depth, horizon=1, prompt_layers=depth)
            ways = {
                name: functools.partial(one, model, plan, batch, args.context, args.count)
                for name, model in models.items()
            }
            alternate(ways, args.rounds, batch=batch, context=args.context, depth=depth)


def adapter(args: argparse.Namespace) -> None:
    """An adapter's cost: steps at 1.5x and 2x of layers with one, and with bare layers missing."""
    model = build(args)
    full = Schedule.full(args.layers)
    schedules = {
        speedup: full.replace(order="top", warmup=args.layers // 6).flat(round(args.layers / speedup))
        for speedup in (1.5, 2)
    }
    learnt, bare = deepcopy(model), attach(model)
    attach(learnt, adapter=Adapter(args.width, 256, schedules).to(model.dtype))  # as one that is loaded computes
    about = {"command": shlex.join(["python", *sys.argv]), "dtype": args.dtype, "machine": machine()}
    print(json.dumps(about), flush=True)
    for batch in args.batch:
        for speedup, plan in schedules.items():
            ways = {
                name: functools.partial(one, which, plan, batch, args.context, args.count)
                for name, which in (("bare", bare), ("adapter", learnt))
            }
            alternate(ways, args.rounds, batch=batch, speedup=speedup)


def profiled(args: argparse.Namespace) -> None:
    """Where the time of ``model.generate`` goes, by part: self time of each is what its children do not take."""
    model = attach(optimize(build(args), quantization=None))
    base = model.base_model
    decoder = getattr(base, "decoder", base)
    head: Any = model.get_output_embeddings()
    taken = {"head": 0.0, "layers": 0.0, "forward": 0.0}

    def clocked(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*a: Any, **k: Any) -> Any:
            start = time.perf_counter()
            result = call(*a, **k)
            taken[name] += time.perf_counter() - start
            return result

        return timed

    for name, modules in (("layers", decoder.layers), ("head", [head])):
        for module in modules:
            module.forward = clocked(name, module.forward)
    forward, model.forward = model.forward, clocked("forward", model.forward)
    ids: Tensor = torch.randint(2, 500, (args.batch[0], args.context))

    def once(new: int) -> float:
        start = time.perf_counter()
        own = SkipCache(model, Schedule.full(args.layers))
        model.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE: own}, max_new_tokens=new, do_sample=False)
        return time.perf_counter() - start

    once(2)
    prompt = min(once(1) for _ in range(args.rounds))
    for name in taken:
        taken[name] = 0.0
    total = once(args.count + 1)
    print(json.dumps({"prompt_and_setup_s": prompt, "generate_s": total, "steps": args.count} | taken))
    print("forward - layers - head: embedding, norm, masks, positions; generate_s - forward: loop, sampling, set-up")
    model.forward = forward
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        once(args.count + 1)
    print(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))


def ways_of(text: str) -> list[str]:
    """``plain,prepacked`` as names of ways."""
    names = text.split(",")
    if unknown := set(names) - set(WAYS):
        raise argparse.ArgumentTypeError(f"no such way: {', '.join(sorted(unknown))}")
    return names


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["steps", "profile", "adapter"])
    parser.add_argument("--family", choices=["opt", "llama"], default="opt")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=50272)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--count", type=int, default=16, help="decode steps each time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", type=ways_of, default=list(WAYS), help=f"of {','.join(WAYS)}; all by default")
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    {"steps": steps, "profile": profiled, "adapter": adapter}[args.what](args)


if __name__ == "__main__":
    main()
