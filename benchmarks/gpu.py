"""Decode steps on a GPU, of shapes with random weights made there: `python benchmarks/gpu.py generate|graphs --help`.

`generate` times SkipDecode's own `generate`. `graphs` times the same steps from CUDA graphs with static buffers, one
for each depth: what skipping gives once no time goes into launches. Speeds are timed in turn. What OUTPUT holds is not
measured again, so a run can be cut off. For a machine that is lent for minutes:

    python benchmarks/gpu.py generate --shapes llama-3.1-8b --seconds 300 --output $OUT/generate.jsonl
    python benchmarks/gpu.py graphs --shapes llama-3.1-8b --seconds 200 --output $OUT/graphs.jsonl

transformers 5.19 or later, and SkipDecode with its metadata, are needed: `pip install --no-deps --target DIR *.whl`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, StaticCache

from shapes import SHAPES, config_of
from skipdecode import Schedule, attach
from skipdecode.generation.generate import generate_ids
from skipdecode.loading.device import machine, synchronize
from skipdecode.loading.load import Checkpoint
from skipdecode.model.cache_name import CACHE

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def milliseconds(run: Callable[[], object], times: int) -> list[float]:
    """Time of each of several runs, by the device's own clock where it has one."""
    found = []
    for _ in range(times):
        if CUDA:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            run()
            found.append(1e3 * (time.perf_counter() - start))
    return found


def bandwidth() -> float:
    """Bytes a second of a copy on the device, read and written."""
    source = torch.empty((1 << 30 if CUDA else 1 << 26) // 4, device=DEVICE)
    target = torch.empty_like(source)
    return 2e3 * source.nbytes / min(milliseconds(lambda: target.copy_(source), 6)[1:])


def launches(run: Callable[[], object]) -> int:
    """Kernels that a run launches; on a CPU, operators that it calls."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if CUDA else [])]
    with profile(activities=kinds) as seen:
        run()
        synchronize(DEVICE)
    kernels = [each for each in seen.events() if not CUDA or "cudaLaunchKernel" in each.name or "cuLaunch" in each.name]
    return len(kernels)


def build(shape: str) -> Any:
    """A model with random weights, made on the device."""
    torch.manual_seed(0)
    with DEVICE:
        return AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.bfloat16).eval()


def bytes_of_step(model: Any, depth: int, batch: int, context: int) -> int:
    """Bytes that a step must read: the layers that run, their keys and values, and the LM head."""
    config, layers = model.config, decoder_of(model).layers
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    kv = 2 * heads * (config.hidden_size // config.num_attention_heads) * 2
    one = sum(weight.nbytes for weight in layers[0].parameters())
    head: Any = model.get_output_embeddings()
    return int(depth * (one + batch * context * kv) + head.weight.nbytes)


def decoder_of(model: Any) -> Any:
    """The module with the decoder layers."""
    base = model.base_model
    return getattr(base, "decoder", base)


def generate(args: argparse.Namespace, shape: str, rows: Rows) -> None:
    """Steps and jobs of ``generate`` at each speed, batch size and context."""
    model, tokenizer = attach(build(shape)), Checkpoint.resolve("demo").tokenizer
    layers, limit = model.config.num_hidden_layers, bandwidth()
    schedules = {speedup: Schedule.for_speedup(speedup, layers) for speedup in args.speedups}

    def job(prompts: list[list[int]], schedule: Schedule, new: int) -> Any:
        same: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        output = generate_ids(model, tokenizer, prompts, schedule, len(prompts), **same)
        if len(output.lengths) > 1:
            raise torch.OutOfMemoryError("generate splits this batch to fit in memory")
        return output.stats

    def measure(prompts: list[list[int]], schedule: Schedule) -> dict[str, Any]:
        done = job(prompts, schedule, args.new)
        step = 1e3 * done.decode_seconds / done.steps
        bound = 1e3 * bytes_of_step(model, schedule.max_depth, len(prompts), len(prompts[0])) / limit
        return {"step_ms": step, "job_s": done.seconds, "kv_bytes": done.peak_kv_bytes, "of_bandwidth": bound / step}

    more: dict[Any, dict[str, Any]] = {}
    for speed, schedule in schedules.items():  # of one short row: they do not depend on sizes
        few, fewer = (launches(partial(job, [[3] * 8], schedule, new)) for new in (3, 2))
        more[speed, "generate"] = {"launches": few - fewer}
    for context, batch in rows.due(args, shape):
        prompts = torch.randint(3, 1000, (batch, context)).tolist()
        ways = {(speed, "generate"): partial(measure, prompts, schedule) for speed, schedule in schedules.items()}
        rows.alternate(ways, args, shape, batch, context, more)


def graphs(args: argparse.Namespace, shape: str, rows: Rows) -> None:
    """A step of the lowest layers of each depth, with static buffers: called, and from a graph where there is CUDA."""
    model = build(shape)
    stack = list(decoder_of(model).layers)

    def measure(run: Callable[[], object]) -> dict[str, Any]:
        return {"step_ms": statistics.median(milliseconds(run, 20 if CUDA else 3))}

    for context, batch in rows.due(args, shape):
        model.config.num_hidden_layers = len(stack)
        try:
            cache = StaticCache(config=model.config, max_cache_len=context + 8)  # of all depths
            ways: dict[tuple[float, str], Callable[[], dict[str, Any]]] = {}
            for speedup in args.speedups:
                layers = torch.nn.ModuleList(stack[: round(len(stack) / speedup)])
                steps = step_of(model, layers, cache, batch, context)
                ways |= {(speedup, way): partial(measure, run) for way, run in steps.items()}
        except torch.OutOfMemoryError as error:
            rows.skip(args, shape, batch, context, error)
            continue
        rows.alternate(ways, args, shape, batch, context)


def step_of(
    model: Any, layers: torch.nn.ModuleList, cache: StaticCache, batch: int, context: int
) -> dict[str, Callable[[], object]]:
    """A greedy step of ``layers`` behind ``context`` positions: called as it is, and replayed."""
    ids = torch.randint(3, 1000, (batch, 1), device=DEVICE)
    place = torch.full((1,), context, device=DEVICE)
    mask = torch.zeros(batch, 1, 1, context + 8, dtype=torch.bfloat16, device=DEVICE)
    mask[..., context + 1 :] = torch.finfo(torch.bfloat16).min

    @torch.no_grad()
    def step() -> None:
        decoder_of(model).layers = layers
        model.config.num_hidden_layers = len(layers)  # Llama's loop reads it
        for each in cache.layers[: len(layers)]:
            each.cumulative_length.fill_(context)  # the same place at each replay
        options = {"attention_mask": mask, "position_ids": place.expand(batch, 1), CACHE: cache}
        ids.copy_(model(ids, **options, use_cache=True).logits[:, -1:].argmax(-1))

    for _ in range(3):
        step()
    ways: dict[str, Callable[[], object]] = {"eager": step}
    if CUDA:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        ways["graph"] = graph.replay
    return ways


class Rows:
    """Measurements in an output file, one a line, and the time that is left."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.file = Path(args.output)
        self.until = time.monotonic() + args.seconds
        lines = self.file.read_text("utf-8").splitlines() if self.file.exists() else []
        self.done = {json.dumps(row["key"]) for row in map(json.loads, lines) if "key" in row}
        if not lines:
            self.add({"machine": machine(), "torch": torch.__version__, "arguments": vars(args)})

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a row, and show it."""
        line = json.dumps(row)
        print(line, flush=True)
        with self.file.open("a", encoding="utf-8") as out:
            out.write(line + "\n")

    def due(self, args: argparse.Namespace, shape: str) -> Iterator[tuple[int, int]]:
        """Contexts and batch sizes that the file has no row of, until the time is up."""
        for context, batch in itertools.product(args.contexts, args.batches):
            if time.monotonic() < self.until and json.dumps(self.key(args, shape, batch, context)) not in self.done:
                yield context, batch

    @staticmethod
    def key(args: argparse.Namespace, shape: str, batch: int, context: int) -> dict[str, Any]:
        """What tells a measurement from others."""
        return {"what": args.what, "shape": shape, "batch": batch, "context": context}

    def skip(self, args: argparse.Namespace, shape: str, batch: int, context: int, error: Exception) -> None:
        """Write why there is no measurement, and free the memory of the attempt."""
        self.add({"key": self.key(args, shape, batch, context), "rows": [], "error": str(error).partition("\n")[0]})
        if CUDA:
            torch.cuda.empty_cache()

    def alternate(
        self,
        ways: Mapping[tuple[float, str], Callable[[], dict[str, Any]]],
        args: argparse.Namespace,
        shape: str,
        batch: int,
        context: int,
        more: Mapping[Any, dict[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Each way once for nothing, then in turn; medians over the rounds, with ratios of the first speed's step.

        Once the time is up no further round begins, but for the first.
        """
        taken: dict[Any, list[dict[str, Any]]] = {way: [] for way in ways}
        try:
            for number in range(args.rounds + 1):
                if number > 1 and time.monotonic() > self.until:
                    break
                for way, run in ways.items():
                    found = run()
                    if number:
                        taken[way].append(found)
        except torch.OutOfMemoryError as error:
            self.skip(args, shape, batch, context, error)
            return
        rows = [
            {"speedup": way[0], "way": way[1], "rounds": len(each)}
            | {part: statistics.median(one[part] for one in each) for part in each[0]}
            | more.get(way, {})
            for way, each in taken.items()
        ]
        for row in rows:
            base = next(each for each in rows if each["way"] == row["way"])
            row["ratio"] = base["step_ms"] / row["step_ms"]
        self.add({"key": self.key(args, shape, batch, context), "rows": rows})


def numbers(kind: type) -> Callable[[str], list[Any]]:
    """Reads numbers with commas between."""
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["generate", "graphs"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["opt-1.3b", "opt-6.7b", "llama-3.1-8b"])
    parser.add_argument("--batches", type=numbers(int), default=[1, 8, 32, 128])
    parser.add_argument("--contexts", type=numbers(int), default=[256, 2048])
    parser.add_argument("--speedups", type=numbers(float), default=[1.0, 1.5, 2.0, 3.0, 5.0])
    parser.add_argument("--new", type=int, default=48, help="new tokens of a job")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300, help="after which no further row or round begins")
    parser.add_argument("--output", default="gpu.jsonl")
    args = parser.parse_args()
    rows = Rows(args)
    for shape in args.shapes:
        if any(rows.due(args, shape)):
            {"generate": generate, "graphs": graphs}[args.what](args, shape, rows)


if __name__ == "__main__":
    main()
