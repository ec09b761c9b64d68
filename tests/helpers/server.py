"""A real server in its own processes, and clients that ask it."""

from __future__ import annotations

import asyncio
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.processes import Running, running

#: What vLLM's own templates would do, for a checkpoint without one.
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # seconds; else an idle connection may be cut as it is used again
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # helpers.engine turns it off in this process
    "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc: what the worker itself counted
}


class Server(Running):
    """What tests read of a server."""

    def metrics(self) -> dict[str, float]:
        """``/metrics``: name with labels -> value."""
        lines = (line for line in self.get("/metrics").splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's series that have these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            value
            for series, value in self.metrics().items()
            if series.partition("{")[0] == name and all(each in series for each in wanted)
        )


@contextmanager
def serve(folder: Path, *options: str, model: str = "demo") -> Iterator[Server]:
    """``skipdecode serve`` with these options, until the end; its log is in ``folder``."""
    command = [sys.executable, "-m", "skipdecode", "serve", model, *options]
    with running(command, folder / "server.log", ENVIRONMENT) as one:
        yield Server(one.url, one.process, one.log)


def post(server: Server, path: str, body: str) -> tuple[int, str]:
    """Status and text of an answer to raw JSON, or what Python takes for it."""
    request = urllib.request.Request(
        server.url + path, body.encode(), {"content-type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


#: Of all tests of a process: clients keep connections, which belong to a loop.
LOOP = asyncio.new_event_loop()


def together(*asked: Coroutine[Any, Any, Any]) -> list[Any]:
    """What these return, all at once."""

    async def gather() -> list[Any]:
        return await asyncio.gather(*asked)

    return LOOP.run_until_complete(gather())


@dataclass
class Answer:
    """One answer: its tokens, its text, and what the server says of its speed."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    summary: dict[str, Any] = field(default_factory=dict)


async def ask(
    client: Any,
    prompt: Any,
    speedup: float | None = None,
    *,
    new: int = 32,
    stream: bool = False,
    chat: bool = False,
    model: str = "demo",
) -> Answer:
    """One request by the ``openai`` package, greedy.

    Args:
        client: an ``AsyncOpenAI``.
        prompt: token ids, or a text.
        speedup: None names none.
        new: the most new tokens.
        stream: token by token.
        chat: by chat completions; ``prompt`` is the user's message.
        model: its name.
    """
    answer = Answer()
    async for chunk in chunks(client, prompt, speedup, new=new, stream=stream, chat=chat, model=model):
        for choice in chunk.choices:
            answer.tokens += (choice.model_extra or {}).get("token_ids") or []
            said = choice.text if not chat else (choice.delta if stream else choice.message).content
            answer.text += said or ""
        metrics = (chunk.model_extra or {}).get("metrics") or {}
        answer.summary |= metrics.get("skipdecode") or {}
    return answer


async def chunks(
    client: Any,
    prompt: Any,
    speedup: float | None,
    *,
    new: int,
    stream: bool,
    chat: bool = False,
    model: str = "demo",
) -> AsyncIterator[Any]:
    """The chunks of a stream; else the whole answer."""
    body: dict[str, Any] = {"return_token_ids": True}
    if speedup is not None:
        body["vllm_xargs"] = {"speedup": speedup}
    options: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": new, "extra_body": body}
    if stream:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    if chat:
        made = await client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **options)
    else:
        made = await client.completions.create(prompt=prompt, **options)
    if not stream:
        yield made
        return
    async with made:
        async for chunk in made:
            yield chunk
