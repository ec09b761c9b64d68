"""What a decode step of vLLM's costs the host beside the layers, by part, without the plugin and with it.

    .venv-vllm/bin/python benchmarks/serving/host.py

A model so small that its layers hardly count; all slots write in lockstep. Each engine has a process of its own, in
turn, some rounds of each; of each part the median over decode steps, then over rounds. Microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: (plugin, blocks of retired layers freed, speed-up)
VARIANTS = {
    "stock": (False, False, 1.0),
    "plugin 1x, blocks kept": (True, False, 1.0),
    "plugin 1x": (True, True, 1.0),
    "plugin 3x, blocks kept": (True, False, 3.0),
    "plugin 3x": (True, True, 3.0),
}


def timed(parts: dict[str, float], name: str, owner: Any, attribute: str) -> None:
    """Adds what calls of a method take to ``parts``."""
    found: Callable[..., Any] = getattr(owner, attribute)

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return found(*args, **kwargs)
        finally:
            parts[name] = parts.get(name, 0.0) + time.perf_counter() - start

    setattr(owner, attribute, call)


def child(given: argparse.Namespace) -> dict[str, float]:
    """Medians of one engine's decode steps, in microseconds."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.inputs import TokensPrompt
    from vllm.v1.engine.llm_engine import LLMEngine

    plugin, free, speedup = VARIANTS[given.child]
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(given.model),
            dtype=given.dtype,
            enforce_eager=given.eager,
            block_size=32,
            max_num_seqs=given.slots,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=256 << 20,
            disable_log_stats=True,
            additional_config={"skipdecode": {"free_blocks": free and None}} if plugin else {},
        )
    )
    scheduler = engine.engine_core.engine_core.scheduler
    runner = engine.model_executor.driver_worker.worker.model_runner
    if plugin != hasattr(runner, "skip_plan"):
        raise RuntimeError("the plugin is not where it should be")
    parts: dict[str, float] = {}
    timed(parts, "schedule", scheduler, "schedule")
    timed(parts, "update", scheduler, "update_from_output")
    timed(parts, "states", runner, "_update_states")
    timed(parts, "inputs", runner, "_prepare_inputs")
    timed(parts, "metadata", runner, "_build_attention_metadata")
    timed(parts, "forward", runner, "_model_forward")
    timed(parts, "head", runner.model, "compute_logits")
    timed(parts, "sampler", runner.sampler, "forward")
    if plugin:
        timed(parts, "plan", runner, "_step")
    steps: list[dict[str, float]] = []
    for time_round in range(2):  # the first warms up
        for row in range(given.slots):
            params = SamplingParams(
                temperature=0,
                max_tokens=given.new_tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args={"speedup": speedup} if plugin else None,
            )
            ids = [10 + (7 * row + 3 * place) % 900 for place in range(given.prompt_tokens)]
            engine.add_request(f"{time_round}:{row}", TokensPrompt(prompt_token_ids=ids), params)
        while engine.has_unfinished_requests():
            parts.clear()
            start = time.perf_counter()
            outputs = engine.step()
            whole = time.perf_counter() - start
            if time_round and len(outputs) == given.slots and not any(output.finished for output in outputs):
                steps.append(parts | {"step": whole})
    return {name: 1e6 * statistics.median(step.get(name, 0.0) for step in steps[4:]) for name in steps[-1]}


def table(rounds: dict[str, list[dict[str, float]]]) -> str:
    """Markdown."""
    heads = ["step", "forward", "plan", "schedule", "states", "inputs", "metadata", "head", "sampler", "update"]
    lines = [f"| engine | {' | '.join(heads)} |", "|---" + "|--:" * len(heads) + "|"]
    for name, found in rounds.items():
        cells = [statistics.median(each.get(head, 0.0) for each in found) for head in heads]
        lines.append(f"| {name} | {' | '.join(f'{cell:.0f}' for cell in cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the engines in turn; print the table after each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "src" / "skipdecode" / "demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # what libraries print goes to the log
        print(json.dumps(child(given)), file=answers, flush=True)
        return
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(given.rounds):
        for name, (plugin, _, _) in VARIANTS.items():
            environment = os.environ | {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "HF_HUB_OFFLINE": "1",
                "VLLM_PLUGINS": "skipdecode" if plugin else "",
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
            }
            command = [sys.executable, __file__, *sys.argv[1:], "--child", name]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr[-4000:])
            rounds[name].append(json.loads(done.stdout))
        print(table({name: found for name, found in rounds.items() if found}), flush=True)


if __name__ == "__main__":
    main()
