"""A thousand requests with random prompts, lengths, speeds, cancellations and disconnects against a running server."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from helpers.engine import Reference, Request
from helpers.server import Answer, Server, ask, chunks, together

pytest_plugins = ["helpers.served"]
COUNT, AT_ONCE, MOST_NEW = 1000, 32, 40
SPEEDUPS = (None, 1.0, 2.0, 3.0, 4.0, 5.0)
#: Bytes by which all processes of the server may grow over the second half of the requests.
GROWTH = 24 << 20


def memory(server: Server) -> int:
    """Bytes that the server's processes hold."""
    parent = psutil.Process(server.process.pid)
    return sum(process.memory_info().rss for process in (parent, *parent.children(recursive=True)))


async def leave(client: Any, request: Request, speedup: float | None, how: str, patience: float) -> None:
    """Ask, and go: after a chunk or more of a stream, or after so many seconds of waiting for the whole answer."""
    prompt = list(request.prompt)
    if how == "stream":
        left = 1 + int(patience * 40)
        async for _ in chunks(client, prompt, speedup, new=request.new, stream=True):
            if (left := left - 1) == 0:
                return
        return
    try:
        await asyncio.wait_for(ask(client, prompt, speedup, new=request.new), patience)
    except (asyncio.TimeoutError, TimeoutError):
        return


def test_a_thousand_requests(server: Server, client: Any, solo: Reference, mixed: list[tuple[int, ...]]) -> None:
    """Every completed answer is its solo answer; the server stays up; no block is lost; memory stays level."""
    source = random.Random(0)
    speeds = [source.choice(SPEEDUPS) for _ in range(COUNT)]
    requests = [Request(source.choice(mixed), speed or 1.0, source.randint(1, MOST_NEW)) for speed in speeds]
    ways = source.choices(("answer", "stream", "leave", "leave stream"), (40, 35, 12, 13), k=COUNT)
    patience = [source.uniform(0, 0.5) for _ in range(COUNT)]
    answers: dict[int, Answer] = {}
    held: list[int] = []

    async def one(place: int) -> None:
        request, way = requests[place], ways[place]
        if way.startswith("leave"):
            await leave(client, request, speeds[place], way.rpartition(" ")[2], patience[place])
        else:
            prompt = list(request.prompt)
            answers[place] = await ask(client, prompt, speeds[place], new=request.new, stream=way == "stream")

    async def client_loop(places: Any) -> None:
        for place in places:
            await one(place)
            if place in (COUNT // 2, COUNT - 1):
                held.append(memory(server))

    before = server.total("skipdecode_requests_total")
    moved = server.total("skipdecode_moved_requests_total")
    places = iter(range(COUNT))
    together(*(client_loop(places) for _ in range(AT_ONCE)))
    assert server.process.poll() is None

    asked = [place for place in answers if speeds[place] is not None]
    assert [answers[place].summary["speedup"] for place in asked] == [speeds[place] for place in asked]
    had = [Request(requests[i].prompt, answers[i].summary["speedup"], requests[i].new) for i in sorted(answers)]
    assert [tuple(answers[i].tokens) for i in sorted(answers)] == solo.texts(had)
    assert len(answers) == sum(not way.startswith("leave") for way in ways)

    for _ in range(100):  # those who left are noticed at the next step
        usage = [server.total(f"vllm:{name}") for name in ("kv_cache_usage_perc", "num_requests_running")]
        if usage == [0, 0]:
            break
        time.sleep(0.1)
    assert usage == [0, 0]
    assert server.total("skipdecode_moved_requests_total") > moved  # half of them wait at any time
    assert server.total("skipdecode_requests_total", finished_reason="abort") > COUNT // 20
    ended = server.total("skipdecode_requests_total") - before
    assert len(answers) <= ended <= COUNT  # a few left before their request had begun
    halfway, end = held
    assert end - halfway < GROWTH
