"""A real server in its own processes, and clients that ask it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

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


@dataclass(frozen=True)
class Server:
    """Where a server is, and its process."""

    url: str
    process: subprocess.Popen[bytes]

    def get(self, path: str) -> str:
        """A page of the server."""
        return httpx.get(self.url + path, timeout=60).raise_for_status().text

    def post(self, path: str, body: Any) -> tuple[int, str]:
        """Status and text of an answer to JSON."""
        content = body if isinstance(body, str) else json.dumps(body)
        headers = {"content-type": "application/json"}
        answer = httpx.post(self.url + path, content=content, headers=headers, timeout=60)
        return answer.status_code, answer.text

    def total(self, *names: str, **labels: str) -> float:
        """The sum of these metrics' series that have these labels, all from one page."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = (line.rpartition(" ") for line in self.get("/metrics").splitlines() if line and line[0] != "#")
        return sum(
            float(value)
            for series, _, value in lines
            if series.partition("{")[0] in names and all(label in series for label in wanted)
        )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def serve(folder: Path, *options: str, model: str = "demo") -> Iterator[Server]:
    """``skipdecode serve`` with these options on a free port, once it is healthy; its log is in ``folder``."""
    port = free_port()
    command = [sys.executable, "-m", "skipdecode", "serve", model, *options, "--host", "127.0.0.1", "--port", str(port)]
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | ENVIRONMENT, start_new_session=True
        )  # in a group of its own: the processes that it starts end with it
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        until = time.monotonic() + 600
        while True:
            starts = process.poll() is None and time.monotonic() < until
            assert starts, log.read_text(errors="replace")[-3000:]
            with suppress(httpx.HTTPError):
                server.get("/health")
                break
            time.sleep(0.5)
        yield server
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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
    chunks: int = 1 << 30,
) -> Answer:
    """One greedy request by the ``openai`` package; the client leaves a stream after so many ``chunks``.

    A prompt is token ids or a text, which in a chat is the user's message.
    """
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
    answer = Answer()

    def add(part: Any) -> None:
        for choice in part.choices:
            answer.tokens += (choice.model_extra or {}).get("token_ids") or []
            said = choice.text if not chat else (choice.delta if stream else choice.message).content
            answer.text += said or ""
        answer.summary |= ((part.model_extra or {}).get("metrics") or {}).get("skipdecode") or {}

    if not stream:
        add(made)
        return answer
    async with made:
        async for part in made:
            add(part)
            chunks -= 1
            if chunks == 0:
                break
    return answer
