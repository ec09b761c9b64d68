"""A model whose layers are on the disk, at full depth and faster: seconds, layers loaded, bytes read, memory.

    python benchmarks/checkpoint.py opt-6.7b /tmp/opt-6.7b --dtype float32      # 27 GB
    python benchmarks/offload.py /tmp/opt-6.7b --speedups 1,5 --new-tokens 5 --output results/offload

Every cell runs in a process of its own, from files that the page cache does not hold (Linux): memory is that of this
cell alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HEADS = (
    "asked", "layers / step", "GB read", "s prompt", "s / step", "s job", "step ratio", "job ratio",
    "GB in memory", "GB its own",
)  # fmt: skip


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """One cell, in this process."""
    import psutil
    import torch

    from skipdecode import Schedule, generate, load
    from skipdecode.generation.generate import generate_ids
    from skipdecode.latency.resolve import new_schedule
    from skipdecode.latency.timing import forced
    from skipdecode.loading.load import read_config
    from skipdecode.loading.offload import Offload
    from skipdecode.model.config import num_layers
    from skipdecode.model.inspect import decoder_layers

    config = read_config(str(given.model))
    schedule = Schedule.full(num_layers(config))
    if given.speedup != 1:
        schedule = new_schedule(config, given.speedup, [given.new_tokens - 1])
    offload = Offload("disk", given.max_memory)
    evict(given.model)
    process = psutil.Process()
    peak = [0, 0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            now = process.memory_info()
            peak[:] = max(peak[0], now.rss), max(peak[1], now.rss - now.shared)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        generate(*load("demo", device="cpu"), "first things first", max_new_tokens=2)  # what is only slow once
        model, tokenizer = load(str(given.model), device="cpu", offload=offload, dtype=given.dtype)
        evict(given.model)
        before = process.io_counters().read_bytes
        vocabulary = config.get_text_config().vocab_size
        ids = torch.randint(
            vocabulary // 8, vocabulary, (given.batch, given.prompt_tokens), generator=torch.Generator().manual_seed(0)
        )
        options: dict[str, Any] = forced(given.new_tokens - 1)
        start = time.perf_counter()
        found = generate_ids(model, tokenizer, ids.tolist(), schedule, given.batch, **options)
        seconds = time.perf_counter() - start
    finally:
        done.set()
        watcher.join()
    cost = found.stats
    return {
        "asked": given.speedup,
        "max_memory": given.max_memory,
        "batch_size": given.batch,
        "average_depth": round(cost.average_depth, 3),
        "layers_offloaded": sum(next(layer.parameters()).is_meta for layer in decoder_layers(model)),
        "bytes_read": process.io_counters().read_bytes - before,
        "prompt_seconds": round(seconds - cost.decode_seconds, 3),
        "step_seconds": round(cost.decode_seconds / cost.steps, 4),
        "job_seconds": round(seconds, 3),
        "resident_bytes": peak[0],
        "own_bytes": peak[1],
    }


def evict(folder: Path) -> None:
    """Let the page cache drop the checkpoint's files."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cells(row: dict[str, Any], full: dict[str, Any] | None) -> list[str]:
    """A row of the table; ratios are those to full depth."""

    def ratio(name: str) -> str:
        return f"{full[name] / row[name]:.2f}x" if full else ""

    return [
        f"{row['asked']:g}x",
        f"{row['average_depth']:.2f}",
        f"{row['bytes_read'] / 1e9:.2f}",
        f"{row['prompt_seconds']:.2f}",
        f"{row['step_seconds']:.3f}",
        f"{row['job_seconds']:.2f}",
        ratio("step_seconds"),
        ratio("job_seconds"),
        f"{row['resident_bytes'] / 1e9:.2f}",
        f"{row['own_bytes'] / 1e9:.2f}",
    ]


def main() -> None:
    """Measure every cell in a process of its own, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--speedups", default="1,5")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=5)
    parser.add_argument("--max-memory", type=float, help="GiB of weights; the rest is offloaded")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path, default=Path("results/offload"))
    parser.add_argument("--speedup", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.speedup is not None:
        print(json.dumps(measure(given)))
        return
    from skipdecode.evaluation.report import markdown_table, save_tables
    from skipdecode.loading.device import machine

    rows: list[dict[str, Any]] = []
    for speedup in given.speedups.split(","):
        command = [sys.executable, *sys.argv, "--speedup", speedup]
        rows.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
        print(rows[-1], file=sys.stderr, flush=True)
    full = next((row for row in rows if row["asked"] == 1), None)
    lengths = f"batch {given.batch}, {given.prompt_tokens} prompt tokens, {given.new_tokens} new"
    about = {
        "model": given.model.name,
        "machine": machine("cpu"),
        "job": f"{lengths}; its files are not in the page cache at its start",
    }
    shown = [cells(row, full) for row in rows]
    save_tables(given.output, rows, HEADS, shown, about)
    print(markdown_table(HEADS, shown))


if __name__ == "__main__":
    main()
