"""An hour against one server: random arrivals at all speeds, seeds, bad requests, clients that leave or are killed.

    make soak SOAK="--minutes 60 --output results/serving/soak.json"

Every answer is compared with what our own ``generate`` writes alone. At the end the engine is killed with SIGKILL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from openai import APIError, AsyncOpenAI

from helpers.engine import Reference, Request
from helpers.server import CHAT, LOOP, Answer, Server, ask, chunks, post, serve
from skipdecode.data.inputs import read_items
from skipdecode.data.tasks import get_task
from skipdecode.loading.device import machine
from skipdecode.loading.load import DEMO

#: What clients do, and how often of a hundred times.
WAYS = {"answer": 28, "stream": 24, "named": 12, "seed": 12, "leave": 6, "leave stream": 5, "killed": 8, "bad": 5}
SPEEDUPS = (1.0, 2.0, 3.0, 4.0, 5.0)
CLIENTS, MOST_NEW, PAUSE = 24, 40, 0.4
#: Bad requests, and the HTTP status that each must have.
BAD: list[tuple[dict[str, Any], int]] = [
    ({"model": "demo:7x"}, 404),
    ({"vllm_xargs": {"speedup": 99}}, 400),
    ({"vllm_xargs": {"speed_up": 2}}, 400),
    ({"speedup": 2}, 400),
    ({"max_tokens": -1}, 400),
    ({"prompt": [3] * 400}, 400),
    ({"temperature": "hot"}, 400),
]
OPTIONS = "--dtype float32 --enforce-eager --block-size 32 --max-num-seqs 16 --max-num-batched-tokens 192".split()
OPTIONS += ["--kv-cache-memory-bytes", str(40 << 20), "--speedup", "1", "--speedups", "1,2,3,4,5"]


class Soak:
    """The clients of one server, what they were answered, and the server's memory over time."""

    def __init__(self, server: Server, solo: Reference, prompts: list[tuple[int, ...]], seed: int) -> None:
        self.server, self.solo, self.prompts = server, solo, prompts
        self.client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)
        self.random = random.Random(seed)
        self.done, self.wrong, self.sampled = Counter[str](), list[str](), dict[Request, str]()
        self.memory: list[tuple[float, int]] = []

    async def run(self, seconds: float) -> None:
        """Let all clients ask for so long, and measure the server's memory every few seconds."""
        began, clients = time.monotonic(), []
        for number in range(CLIENTS):
            clients.append(asyncio.ensure_future(self._client(number, began + seconds)))
        while (passed := time.monotonic() - began) < seconds:
            self.memory.append((passed, sum(each.memory_info().rss for each in processes(self.server))))
            print(f"{passed:5.0f} s: {dict(self.done)}, {self.memory[-1][1] >> 20} MiB", file=sys.stderr, flush=True)
            await asyncio.sleep(min(15, seconds / 20))
            if self.server.process.poll() is not None:
                self.wrong.append(f"the server ended with code {self.server.process.returncode}")
                break
        await asyncio.gather(*clients)

    async def _client(self, number: int, until: float) -> None:
        source = random.Random(self.random.random())
        while time.monotonic() < until and self.server.process.poll() is None:
            await asyncio.sleep(source.expovariate(1 / PAUSE))
            way = source.choices([*WAYS], [*WAYS.values()])[0]
            request = Request(source.choice(self.prompts), source.choice(SPEEDUPS), source.randint(1, MOST_NEW))
            try:
                await self._one(way, request, source)
                self.done[way] += 1
            except Exception as error:
                self.wrong.append(f"{way}, {request.speedup:g}x, {request.new} tokens: {type(error).__name__}: {error}")

    async def _one(self, way: str, request: Request, source: random.Random) -> None:
        prompt = list(request.prompt)
        if way == "bad":
            extra, status = source.choice(BAD)
            body = {"model": "demo", "prompt": prompt, "max_tokens": 4} | extra
            found, _ = await asyncio.to_thread(post, self.server, "/v1/completions", json.dumps(body))
            if found != status:
                raise AssertionError(f"HTTP {found} for {extra}, not {status}")
        elif way == "killed":
            await self._killed(request, source.uniform(0, 0.6))
        elif way.startswith("leave"):
            leaving = self._leave(request, way.endswith("stream"), source.randint(1, 20))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(leaving, source.uniform(0.05, 2))
        elif way == "seed":
            made = await self.client.completions.create(
                model=f"demo:{request.speedup:g}x", prompt=prompt, max_tokens=request.new, seed=7
            )
            text = str(made.choices[0].text)
            if self.sampled.setdefault(request, text) != text:
                raise AssertionError(f"seed 7 wrote {text!r}, and {self.sampled[request]!r} before")
        else:
            named = {"model": f"demo:{request.speedup:g}x"} if way == "named" else {"speedup": request.speedup}
            answer = await ask(self.client, prompt, **named, new=request.new, stream=way == "stream")
            if tuple(answer.tokens) != self.solo.texts([request])[0]:
                raise AssertionError(f"wrote {answer.tokens}")

    async def _leave(self, request: Request, stream: bool, left: int) -> None:
        """Read so many chunks at most."""
        async for _ in chunks(self.client, list(request.prompt), request.speedup, new=request.new, stream=stream):
            if (left := left - 1) == 0:
                return

    async def _killed(self, request: Request, patience: float) -> None:
        """A client of its own process, which SIGKILL ends in the middle of a stream."""
        body = {"model": "demo", "prompt": list(request.prompt), "max_tokens": request.new, "stream": True}
        body["vllm_xargs"] = {"speedup": request.speedup}
        curl = await asyncio.create_subprocess_exec(
            *("curl", "--silent", "--no-buffer", "--json", json.dumps(body), f"{self.server.url}/v1/completions"),
            stdout=asyncio.subprocess.DEVNULL,
        )
        await asyncio.sleep(patience)
        if curl.returncode is None:
            curl.send_signal(signal.SIGKILL)
        await curl.wait()

    def idle(self, patience: float = 60) -> bool:
        """Whether the server comes to hold no request and no block."""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            if not any(self.server.total(f"vllm:{name}") for name in ("kv_cache_usage_perc", "num_requests_running")):
                return True
            time.sleep(0.5)
        return False

    async def kill_the_engine(self) -> dict[str, Any]:
        """SIGKILL the engine under requests: how many clients got an error, and when the server was gone with what."""
        texts = self.solo.texts([Request(prompt, 1.0, MOST_NEW) for prompt in self.prompts[:8]])
        engine = next(each for each in processes(self.server)[1:] if "EngineCore" in " ".join(each.cmdline()))
        waiting = [
            asyncio.ensure_future(ask(self.client, list(prompt), 1.0, new=MOST_NEW)) for prompt in self.prompts[:8]
        ]
        await asyncio.sleep(0.1)
        engine.kill()
        began = time.monotonic()
        answers = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)
        code = await asyncio.to_thread(self.server.process.wait, 60)
        return {
            "clients": len(answers),
            "errors": sum(isinstance(each, APIError) for each in answers),
            "answered_before": sum(
                isinstance(each, Answer) and tuple(each.tokens) == text
                for each, text in zip(answers, texts, strict=True)
            ),
            "exit_code": code,
            "seconds": round(time.monotonic() - began, 1),
        }


def processes(server: Server) -> list[psutil.Process]:
    """The server's processes."""
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def main() -> int:
    """Run the soak, write what was found; 1 if something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    solo, source = Reference("demo", most_new=MOST_NEW), random.Random(args.seed)
    texts = [str(item.prompt) for item in read_items(str(DEMO / "inputs.csv"), get_task("e2e"))]
    prompts = [tuple(solo.tokenizer(text)["input_ids"]) for text in texts]
    prompts += [tuple(source.choices(range(3, 1000), k=source.randint(1, 120))) for _ in range(32)]
    solo.texts([Request(prompt, speedup) for prompt in prompts for speedup in SPEEDUPS])  # none is computed later
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "chat.jinja").write_text(CHAT, encoding="utf-8")
        with serve(Path(folder), *OPTIONS) as server:
            soak = Soak(server, solo, prompts, args.seed)
            LOOP.run_until_complete(soak.run(60 * args.minutes))
            idle = soak.idle()
            end = LOOP.run_until_complete(soak.kill_the_engine())
    held = [rss for passed, rss in soak.memory if passed > 15 * args.minutes]  # after the first quarter
    third = max(len(held) // 3, 1)
    report = {
        "command": shlex.join(["python", "tests/torture/soak.py", *sys.argv[1:]]),
        "machine": machine(),
        "minutes": args.minutes,
        "requests": dict(soak.done),
        "wrong": soak.wrong[:20],
        "idle_at_the_end": idle,
        "memory_mib": {
            "after a quarter": statistics.median(held[:third]) / 2**20,
            "at the end": statistics.median(held[-third:]) / 2**20,
        },
        "engine_killed": end,
    }
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))
    return int(
        bool(soak.wrong) or not idle or not end["exit_code"] or end["errors"] + end["answered_before"] < end["clients"]
    )


if __name__ == "__main__":
    sys.exit(main())
