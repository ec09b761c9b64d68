"""Processes that are timed in turn: while one works the others are stopped by a signal, so that no thread spins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
