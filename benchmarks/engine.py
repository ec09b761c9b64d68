"""Decode steps of vLLM's engine alone at each speed, and the adapter's share of them: no HTTP, no clients.

    python benchmarks/engine.py smollm2 --adapter results/smollm2/adapter

Run it in .venv-vllm with nothing else computing. Each round generates once at 1x and at each speed, with the adapter's
modules and without. Times are medians over all steps but the first ones; ``--profile`` prints a speed's operations.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
from vllm import LLM, SamplingParams

from skipdecode.loading.device import machine
from skipdecode.serving.steps import DepthTables

#: Steps of a call that do not count: prompts, and the first after them.
FIRST = 3


def use_adapter(worker: Any, does: bool) -> None:
    """Let the worker's steps have the adapter's modules or not."""
    runner = worker.model_runner
    tables = vars(runner).setdefault("benchmark_tables", {True: runner.skip_tables})
    is_new = does not in tables
    runner.skip_tables = tables.setdefault(does, DepthTables(runner.skip_serving.schedules, None))
    if is_new:
        runner.compile_layers()


def steps(llm: LLM, speedup: float, given: argparse.Namespace, new_tokens: int) -> list[float]:
    """Seconds of each step of a call, all requests at once."""
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=0, extra_args={"speedup": speedup})
    for slot in range(given.slots):
        prompt = {"prompt_token_ids": [(7 * slot + place) % 1000 + 1000 for place in range(given.prompt_tokens)]}
        llm.llm_engine.add_request(f"{time.perf_counter_ns()}", prompt, params)
    seconds = []
    while llm.llm_engine.has_unfinished_requests():
        start = time.perf_counter()
        llm.llm_engine.step()
        seconds.append(time.perf_counter() - start)
    return seconds[FIRST:]


def main() -> None:
    """Measure, and write ``table.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--adapter")
    parser.add_argument("--speedups", default="1.5,2")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", type=float, help="a speed")
    parser.add_argument("--output", type=Path, default=Path("runs/engine"))
    given = parser.parse_args()
    speedups = [1.0, *map(float, given.speedups.split(","))]
    options: dict[str, Any] = {"speedups": speedups}
    options |= {"adapter": os.path.abspath(given.adapter)} if given.adapter else {}
    length = given.prompt_tokens + given.new_tokens + 1
    limits: dict[str, Any] = {"max_num_seqs": given.slots, "max_model_len": length, "enable_prefix_caching": False}
    llm = LLM(given.model, additional_config={"skipdecode": options}, **limits)
    kinds = [
        (speedup, does) for speedup in speedups for does in ([True, False] if speedup > 1 and given.adapter else [True])
    ]
    seconds: dict[tuple[float, bool], list[float]] = {kind: [] for kind in kinds}
    for number in range(given.rounds + 1):
        for speedup, does in kinds:
            llm.collective_rpc(use_adapter, args=(does,))
            found = steps(llm, speedup, given, given.new_tokens)
            seconds[speedup, does] += found if number else []  # the first round warms up
    rows = []
    for speedup in speedups:
        step = statistics.median(seconds[speedup, True])
        row = {"speedup": speedup, "step_ms": 1e3 * step, "ratio": statistics.median(seconds[1.0, True]) / step}
        if (speedup, False) in seconds:
            row["adapter_share"] = 1 - statistics.median(seconds[speedup, False]) / step
        rows.append({name: round(value, 3) for name, value in row.items()})
        print(rows[-1])
    about = {"command": shlex.join(["python", *sys.argv]), "machine": machine(), "dtype": str(llm.model_config.dtype)}
    about |= {name: getattr(given, name) for name in ("slots", "prompt_tokens", "new_tokens", "rounds")}
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "table.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    if given.profile:
        from torch.profiler import ProfilerActivity, profile

        llm.collective_rpc(use_adapter, args=(True,))
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
            steps(llm, given.profile, given, 20)
        print(found.key_averages(group_by_input_shape=True).table("self_cpu_time_total", row_limit=50))


if __name__ == "__main__":
    main()
