"""Processes that are timed in turn: while one works the others are stopped by a signal, so that no thread spins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    return usual | os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": plugins}


class Process:
    """A process with its children. What it says goes to a log; if it ``talks``, lines of JSON go in and come out."""

    def __init__(self, command: Sequence[str], log: Path, plugins: str = "", talks: bool = False) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else out,
                stderr=out,
                env=variables(plugins),
                start_new_session=True,  # with its children it is one group, to be stopped together
            )

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Asleep afterwards."""
        os.killpg(self.process.pid, signal.SIGCONT)
        yield
        self.check()
        os.killpg(self.process.pid, signal.SIGSTOP)

    def check(self) -> None:
        """Raises RuntimeError if it has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"a process ended with code {self.process.returncode}: see {self.log}")

    def ask(self, values: Any) -> dict[str, Any]:
        """One line for another. Raises RuntimeError if it ends instead."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(values).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.check()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it and all that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGCONT)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
