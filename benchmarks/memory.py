"""What jobs take of memory, by schedule, batch and context, and whether layers that retire give theirs back (Linux).

    python benchmarks/checkpoint.py opt-1.3b /tmp/opt-1.3b --dtype bfloat16        # 2.6 GB
    python benchmarks/memory.py /tmp/opt-1.3b --output results/memory

Every cell runs in a process of its own. ``own`` is its memory that is no mapped file (weights that are read as they
were saved are mapped files), counted from what it was before the job; ``kept by malloc`` is what goes when glibc is
told to give back what it holds for later (malloc_trim). Keys and values are counted tensor by tensor, whatever the
allocator does.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

HEADS = (
    "asked", "batch", "prompt", "depths", "KV peak", "KV at the end", "of full depth's", "own peak",
    "own at the end", "kept by malloc", "after the job",
)  # fmt: skip


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """One cell, in this process. Sizes in bytes."""
    import psutil
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    from skipdecode import Schedule, SkipCache, generate, load
    from skipdecode.generation.batch import generate_batch
    from skipdecode.latency.resolve import new_schedule
    from skipdecode.model.cache import total_kv_bytes
    from skipdecode.model.config import num_layers

    generate(*load("demo", device="cpu"), "first things first", max_new_tokens=2)  # what is only allocated once
    model, tokenizer = load(str(given.model), device="cpu", dtype=given.dtype)
    schedule = Schedule.full(num_layers(model.config))
    if given.speedup != 1:
        schedule = new_schedule(model.config, given.speedup, [given.new_tokens - 1])
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    shape = (given.batch_size, given.prompt_tokens)
    ids = torch.randint(vocabulary // 8, vocabulary, shape, generator=generator).tolist()
    options: dict[str, Any] = {"max_new_tokens": given.new_tokens, "min_new_tokens": given.new_tokens}
    generate_batch(model, tokenizer, [row[:4] for row in ids[:1]], schedule, max_new_tokens=2, min_new_tokens=2)
    process = psutil.Process()

    def own() -> int:
        now = process.memory_info()
        return int(now.rss - now.shared)

    trim()
    start = own()
    caches: list[SkipCache] = []
    trace: list[tuple[int, int]] = []  # after each pass: bytes of keys and values, own bytes

    class Trace(LogitsProcessor):
        """Notes what is held after each pass."""

        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            trace.append((total_kv_bytes(caches[0]), own() - start))
            return scores

    def cache_of(model: Any) -> SkipCache:
        caches.append(SkipCache(model, schedule))
        return caches[-1]

    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], own() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    generate_batch(model, tokenizer, ids, cache_of, logits_processor=LogitsProcessorList([Trace()]), **options)
    done.set()
    watcher.join()
    end, kv_peak, kv_end = own() - start, caches[0].peak_kv_bytes, total_kv_bytes(caches[0])
    trim()
    kept = end - (own() - start)
    caches.clear()
    return {
        "asked": given.speedup,
        "batch_size": given.batch_size,
        "prompt_tokens": given.prompt_tokens,
        "new_tokens": given.new_tokens,
        "max_depth": schedule.max_depth,
        "min_depth": schedule.min_depth,
        "peak_kv_bytes": kv_peak,
        "final_kv_bytes": kv_end,
        "own_peak_bytes": peak[0],
        "own_final_bytes": end,
        "kept_by_malloc_bytes": kept,
        "own_after_bytes": own() - start,
        "trace": trace,
    }


def trim() -> None:
    """Let glibc give back the memory that it keeps for later."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def cells(row: dict[str, Any], full: dict[str, Any] | None) -> list[str]:
    """A row of the table."""

    def megabytes(name: str) -> str:
        return f"{row[name] / 1e6:,.0f} MB"

    share = ""
    if full is not None:
        parts = [row[name] / full[name] for name in ("peak_kv_bytes", "final_kv_bytes")]
        share = ", ".join(f"{part:.0%}" for part in parts)
    return [
        f"{row['asked']:g}x",
        str(row["batch_size"]),
        str(row["prompt_tokens"]),
        f"{row['max_depth']} to {row['min_depth']}",
        megabytes("peak_kv_bytes"),
        megabytes("final_kv_bytes"),
        share,
        *map(megabytes, ("own_peak_bytes", "own_final_bytes", "kept_by_malloc_bytes")),
        megabytes("own_after_bytes"),
    ]


def main() -> None:
    """Measure every cell in a process of its own, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--speedups", default="1,2,5")
    parser.add_argument("--batch", default="8,32")
    parser.add_argument("--context", default="128,512", help="prompt tokens")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path, default=Path("results/memory"))
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cell:
        vars(given).update(json.loads(given.cell))
        print(json.dumps(measure(given)))
        return
    from skipdecode.evaluation.report import markdown_table, save_tables
    from skipdecode.loading.device import machine

    rows = []
    for batch in map(int, given.batch.split(",")):
        for prompt in map(int, given.context.split(",")):
            for speedup in map(float, given.speedups.split(",")):
                cell = {"speedup": speedup, "batch_size": batch, "prompt_tokens": prompt}
                command = [sys.executable, *sys.argv, "--cell", json.dumps(cell)]
                rows.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
                print({k: v for k, v in rows[-1].items() if k != "trace"}, file=sys.stderr, flush=True)
    traces = [row.pop("trace") for row in rows]
    full = {(row["batch_size"], row["prompt_tokens"]): row for row in rows if row["asked"] == 1}
    shown = [cells(row, full.get((row["batch_size"], row["prompt_tokens"]))) for row in rows]
    about = {"model": given.model.name, "machine": machine("cpu"), "new tokens": given.new_tokens}
    save_tables(given.output, rows, HEADS, shown, about)
    (given.output / "traces.json").write_text(json.dumps(traces) + "\n")
    print(markdown_table(HEADS, shown))


if __name__ == "__main__":
    main()
