"""vLLM's own ``vllm bench serve`` against real servers, with and without the load policy, beside stock vLLM.

    python benchmarks/serving load --servers 1,1-5                       # the embedded checkpoint
    python benchmarks/serving load --shape opt-1.3b --servers 1,1-5,3    # random weights of that shape

A server is a speed-up (3: for every request), or one and that under load (1-5); stock vLLM is always among them. First
stock gets all requests at once: what it does then is its saturation. Arrivals are shares of that (0.5: half as many a
second, as a Poisson process) or inf, all at once. A request is good if its first token comes within ten times the
median time per token of stock at saturation, and its others within that time on average. Servers are all loaded and
asked in turn, at each rate; each round is saved, and a later call adds to it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from skipdecode.errors import SkipDecodeError, UsageError

from .load_report import save
from .models import config_of, label, options, parse, prepare, settings
from .processes import Talking
from .rounds import STOCK, Rounds, Row
from .servers import Server, had, plugin_options, started

PROGRAM = "benchmarks/serving load"
#: Of what ``vllm bench serve`` answers.
KEPT = ["duration", "completed", "request_throughput", "output_throughput", "request_goodput"]
KEPT += [f"{percentile}_{name}_ms" for name in ("ttft", "tpot") for percentile in ("median", "p99")]


class Client:
    """``vllm bench serve`` with random prompts, the same for every server."""

    def __init__(self, process: Talking, given: argparse.Namespace, tokenizer: Path) -> None:
        self._process = process
        self.versions = process.ask([])["versions"]
        self._requests, self._slots = given.requests, given.slots
        self._options = ["--tokenizer", str(tokenizer), "--temperature", "0", "--disable-tqdm"]
        self._options += ["--dataset-name", "random", "--random-input-len", str(given.prompt_tokens)]
        self._options += ["--random-output-len", str(given.new_tokens)]
        self._options += ["--random-range-ratio", json.dumps({"input": 0.0, "output": 0.5})]

    def ask(self, server: Server, rate: float | None = None, *more: str) -> Row:
        """Requests a second (None: all at once), and other options. Raises RuntimeError if one fails."""
        command = ["--base-url", server.running.url, "--model", server.model, *self._options]
        command += ["--request-rate", str(rate or "inf"), *more]
        with server.awake():
            # The first requests to a server that was just started, or slept, do not count.
            brief = ["--request-rate", "inf", "--random-output-len", "8", "--num-prompts", str(self._slots)]
            self._process.ask([*command, *brief])
            before = server.running.get("/metrics")
            found = self._process.ask([*command, "--num-prompts", str(self._requests)])
            if found["failed"]:
                raise RuntimeError(f"{found['failed']} requests failed: see {self._process.log.parent}")
            return {name: found[name] for name in KEPT} | had(before, server.running.get("/metrics"))


def saturation(client: Client, stock: Server) -> dict[str, Any]:
    """What stock vLLM does with all requests at once: its requests a second; and which requests count as good."""
    found = client.ask(stock)
    token = found["median_tpot_ms"]
    good = {"ttft": round(token * 10, 1), "tpot": round(token, 1)}
    return {"requests_per_second": found["request_throughput"], "token_ms": token, "good": good}


def measure(given: argparse.Namespace, rounds: Rounds) -> Iterator[Rounds]:
    """The rounds, after each: one rate of arrivals, by every server."""
    model = prepare(given)
    with ExitStack() as stack:

        def start(name: str, token_ms: float = 0) -> Server:
            print(f"starting {name}", flush=True)
            return stack.enter_context(started(given, name, model, token_ms))

        program = [given.python, str(Path(__file__).with_name("client.py"))]
        process = stack.enter_context(Talking(program, given.work / "logs" / "client.log"))
        client = Client(process, given, model)
        stock = start(STOCK)
        top = rounds.lines[0]["saturation"] if rounds.lines else saturation(client, stock)
        print(f"stock at saturation: {top}", flush=True)
        servers = [stock, *(start(name, top["good"]["tpot"]) for name in given.servers)]
        good = ["--goodput", *(f"{name}:{limit}" for name, limit in top["good"].items())]
        for _ in range(given.rounds):
            for arrivals in given.arrivals:
                rate = None if arrivals == "inf" else float(arrivals) * top["requests_per_second"]
                rows = []
                for server in servers:
                    row = {"arrivals": arrivals, "engine": server.name, "rate": rate}
                    rows.append(row | client.ask(server, rate, *good))
                    print(f"{arrivals} of saturation, {server.name}: {rows[-1]['duration']:.1f} s", flush=True)
                rounds.add(rows, versions=client.versions, command=given.command, saturation=top)
                yield rounds


def shares(text: str) -> list[str]:
    """``0.5,inf``, as they were written."""
    found = text.split(",")
    if min(map(float, found)) <= 0:
        raise argparse.ArgumentTypeError("shares of saturation are more than 0")
    return found


def main(arguments: Sequence[str]) -> int:
    """Measure, and write the tables after each round."""
    parser = options(PROGRAM, __doc__)
    parser.add_argument("--slots", type=int, default=32, help="requests that write at once")
    parser.add_argument("--servers", default="1,1-5", type=lambda text: text.split(","), help="beside stock")
    parser.add_argument("--arrivals", default="0.5,0.9,1.5,inf", type=shares)
    parser.add_argument("--requests", type=int, default=128, help="of a rate")
    parser.add_argument("--rounds", type=int, default=1, help="so many more than there are")
    small = {"slots": 4, "prompt_tokens": 16, "new_tokens": 8, "requests": 8, "kv_gib": 1, "eager": True}
    try:
        given = parse(parser, arguments, {"model": "demo"}, small | {"arrivals": ["2", "inf"], "servers": ["1-5"]})
        for name in given.servers:
            plugin_options(name, given.slots, 0)
        config_of(given)
        if given.engine:
            raise UsageError(
                "--engine is of the other measurement: servers here have vLLM's options of --serving alone"
            )
        own = {name: getattr(given, name) for name in ("requests", "serving")}
        rounds = Rounds(given.output / f"{label(given)}-{given.slots}" / "load", settings(given) | own)
        for each in measure(given, rounds):
            save(each)
    except SkipDecodeError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    print((rounds.folder / "table.md").read_text(encoding="utf-8"))
    return 0
