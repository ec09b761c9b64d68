"""An engine's process: started, asked, stopped while others are timed, and measured from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from .catalogue import Engine, python

BENCHMARKS = Path(__file__).resolve().parents[1]
#: What /proc raises for a thread or a process that has ended meanwhile.
GONE = (FileNotFoundError, ProcessLookupError)


class EngineFailed(Exception):
    """What an engine said in place of an answer."""


class Running:
    """One engine in a process of its own, loaded; asleep unless it is asked.

    A process that waits for its next round is stopped by a signal: no thread of it spins beside the one that is timed,
    and every engine keeps its own way of waiting.

    Raises:
        EngineFailed: it does not load.
        UsageError: its environment is not there.
    """

    def __init__(self, engine: Engine, job: dict[str, Any], environments: Path, log: Path) -> None:
        interpreter = python(engine, environments) or Path(sys.executable)
        source = [] if engine.environment else [str(BENCHMARKS.parent / "src")]  # ours, whether installed or not
        threads = str(job["threads"])
        variables = {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": threads,
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[: job["threads"]])),
            "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *source]),
        }
        self._failed = ""  # why no further call can be answered
        self._log = log.open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [str(interpreter), "-m", f"peers.engines.{engine.program}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | variables,
            start_new_session=True,  # with its children it is one group, to be stopped together
        )
        try:
            self.versions: dict[str, str] = self._ask(job)["versions"]
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, prompts: Sequence[Sequence[int]], new_tokens: int, options: dict[str, Any]) -> dict[str, Any]:
        """One call: ``seconds``, ``tokens`` of each row, and ``peak_rss``, the most bytes resident during it.

        Raises:
            EngineFailed: it cannot be answered; nor can those after it, for the same reason.
        """
        if not self._failed and self._process.poll() is not None:  # while it was asleep
            self._failed = f"it ended with code {self._process.returncode}"
        if self._failed:
            raise EngineFailed(self._failed)
        self._signal(signal.SIGCONT)
        for pid in self._tree():
            with suppress(*GONE):
                Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")  # forget the highest mark so far
        answer = self._ask({"prompts": prompts, "new_tokens": new_tokens, "options": options})
        answer["peak_rss"] = sum(_status(pid, "VmHWM") for pid in self._tree())
        self._signal(signal.SIGSTOP)
        return answer

    def _ask(self, values: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(values), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"it ended with code {self._process.wait()}"}
        if "error" in answer:
            self._failed = answer["error"]
            raise EngineFailed(self._failed)
        return answer

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _tree(self) -> list[int]:
        """The process and its children's children."""
        found, waiting = [], [self._process.pid]
        while waiting:
            found.append(pid := waiting.pop())
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                with suppress(*GONE):
                    waiting += map(int, task.read_text(encoding="utf-8").split())
        return found

    def close(self) -> None:
        """End it and all that it started."""
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGKILL)
        self._process.communicate()
        self._log.close()

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def _status(pid: int, name: str) -> int:
    """A line of /proc/PID/status, in bytes; 0 of a process that has ended."""
    with suppress(*GONE):
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        return next((1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name}:")), 0)
    return 0
