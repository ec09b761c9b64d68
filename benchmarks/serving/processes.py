"""Servers and engines in processes of their own, for benchmarks, tests and the demo.

Processes that are timed take turns: while one works the others are stopped by a signal, so that no thread spins.
"""

from __future__ import annotations

import json
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
from typing import Any

#: The name under which vLLM finds the plugin.
PLUGIN = "skipdecode"


def variables(plugins: str) -> dict[str, str]:
    """Of a process of vLLM: all cores, or as many as ``OMP_NUM_THREADS`` says; no hub; these plugins alone."""
    cores = sorted(os.sched_getaffinity(0))
    cores = cores[: int(os.environ.get("OMP_NUM_THREADS", len(cores)))]
    usual = {
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # seconds; a client's idle connection may be cut as it is used again
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return usual | os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": plugins}


@contextmanager
def awake(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A process with its children, which are one group; asleep afterwards."""
    with suppress(ProcessLookupError):  # it has ended
        os.killpg(process.pid, signal.SIGCONT)
    yield
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGSTOP)


class Talking:
    """A process that answers lines of JSON, and what it started. What else it says goes to a log."""

    def __init__(self, command: Sequence[str], log: Path, plugins: str = "") -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env=variables(plugins),
                start_new_session=True,
            )

    def ask(self, values: Any) -> dict[str, Any]:
        """One line for another; the process sleeps before and afterwards. Raises RuntimeError if it ends instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with awake(self._process):
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(values).encode() + b"\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended with code {self._process.wait()}: see {self.log}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Talking:
        return self

    def __exit__(self, *error: object) -> None:
        with awake(self._process), suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


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
        process.terminate()  # SIGINT is ignored by what a shell runs in the background
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
