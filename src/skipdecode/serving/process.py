"""A server in a process of its own for as long as a block of Python runs: for tests, benchmarks and the demo."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

#: Seconds that a server may take to end by itself.
PATIENCE = 60


@dataclass(frozen=True)
class Running:
    """Where the server is, its process, and the file that has what it says."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str, timeout: float = 60) -> str:
        """A page of the server. Raises OSError, also for an answer that is an error."""
        with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
            return str(answer.read().decode())


@contextmanager
def running(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, patience: float = 600
) -> Iterator[Running]:
    """The server of a command that takes ``--host`` and ``--port``, on a free port, once it is healthy.

    Args:
        command: its program and arguments.
        log: where its output goes.
        environment: beside this process's.
        patience: seconds that it may take to start.

    Raises:
        RuntimeError: it ended, or was not healthy in time; with the end of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=out,
            stderr=out,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # a server has processes of its own: they end with it
        )
    try:
        server = Running(f"http://127.0.0.1:{port}", process, log)
        _wait(server, patience)
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it left behind
        process.wait()


def _wait(server: Running, patience: float) -> None:
    until = time.monotonic() + patience
    while server.process.poll() is None and time.monotonic() < until:
        try:
            server.get("/health", timeout=5)
            return
        except OSError:
            time.sleep(0.5)
    end = server.log.read_text(encoding="utf-8", errors="replace")[-3000:]
    said = "ended" if server.process.poll() is not None else f"was not healthy within {patience:g} seconds"
    raise RuntimeError(f"the server {said}: {server.log} has what it said\n{end}")
