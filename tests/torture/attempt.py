"""An attempt: one attack of a kind, drawn from its seed, in a folder of its own, on processes that can be killed."""

from __future__ import annotations

import ctypes
import fcntl
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from torture import child

#: Seconds after which a command on a tiny model hangs.
PATIENCE = 120.0
# Of Linux's mount(2) and unshare(2).
CLONE_NEWNS, MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE, MNT_DETACH = 0x20000, 1, 32, 1 << 14, 1 << 18, 2
#: Forked from a process that has imported everything: a command costs tenths of a second, and so does a kill.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torture.child"])


class Found(Exception):
    """What did not hold."""


class Limited:
    """Small disks in memory, where this process may mount them: in a namespace of its own, so that they go with it."""

    def __init__(self, base: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._base = base
        private = MS_REC | MS_PRIVATE
        self.mounts = self._call("unshare", CLONE_NEWNS) and self._call("mount", b"none", b"/", None, private, None)

    def _call(self, name: str, *arguments: object) -> bool:
        return sys.platform == "linux" and getattr(self._libc, name)(*arguments) == 0

    def disk(self, size: int) -> Path:
        """A new disk of ``size`` bytes."""
        folder = Path(tempfile.mkdtemp(dir=self._base))
        if not self._call("mount", b"tmpfs", bytes(folder), b"tmpfs", 0, b"size=%d" % size):
            raise OSError(ctypes.get_errno(), "mount")
        return folder

    def read_only(self, disk: Path, yes: bool) -> None:
        """Whether it may be written to."""
        self._call("mount", b"tmpfs", bytes(disk), b"tmpfs", MS_REMOUNT | (MS_RDONLY if yes else 0), None)

    def remove(self, disk: Path) -> None:
        """Give its memory back."""
        self._call("umount2", bytes(disk), MNT_DETACH)


@dataclass
class Attempt:
    """What one attack may use.

    Attributes:
        random: drawn from the kind and the seed.
        folder: empty, and removed afterwards.
        model, data: a tiny checkpoint and a folder of JSONL splits, shared by all attempts and never written.
        limits: full and read-only disks.
        counts: what was done, by name, beside the attempt itself.
    """

    random: Random
    folder: Path
    model: Path
    data: Path
    limits: Limited
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, *arguments: object, **options: Any) -> Done:
        """A command, to its end."""
        return self.start(*arguments, **options).wait()

    def start(self, *arguments: object, stdin: bytes = b"", most: int | None = None) -> Child:
        """A command in a process of its own, in this attempt's folder."""
        self.counts["commands"] += 1
        return Child([str(argument) for argument in arguments], self.folder, stdin, most)


Kind = Callable[[Attempt], None]


@dataclass(frozen=True)
class Done:
    """How a command ended; a negative code is the signal that killed it."""

    arguments: list[str]
    code: int
    stdout: str
    stderr: str

    @property
    def line(self) -> str:
        """The last line of what was said."""
        return (self.stderr.strip().splitlines() or [""])[-1]

    def sound(self, *codes: int) -> Done:
        """Itself. Raises Found unless it ended with one of ``codes`` (0, 1 or 2 if none) and without a traceback."""
        if "Traceback (most recent call last)" in self.stderr or self.code not in (codes or (0, 1, 2)):
            raise Found(f"skipdecode {' '.join(self.arguments)!r}\nended with {self.code}:\n{self.stderr[-3000:]}")
        return self


class Child:
    """A running command."""

    def __init__(self, arguments: list[str], folder: Path, stdin: bytes, most: int | None) -> None:
        self.arguments, self.began = arguments, time.monotonic()
        self._streams = tempfile.TemporaryDirectory()
        streams = Path(self._streams.name)
        # Pipes, which are not files that a limit could cut.
        self._pipes = []
        for name in ("1", "2"):
            os.mkfifo(streams / name)
            self._pipes.append(os.open(streams / name, os.O_RDWR | os.O_NONBLOCK))
            fcntl.fcntl(self._pipes[-1], fcntl.F_SETPIPE_SZ, 1 << 20)
        self._process = FORKS.Process(target=child.run, args=(arguments, folder, streams, stdin, most))
        self._process.start()

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    def send(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.running and self._process.pid:
            os.kill(self._process.pid, number)

    def wait(self, seconds: float = PATIENCE) -> Done:
        """Its end. Raises Found if that does not come within ``seconds``."""
        self._process.join(seconds)
        late = self.running
        if late:
            self._process.kill()
            self._process.join()
        said = [_drained(pipe) for pipe in self._pipes]
        self._streams.cleanup()
        done = Done(self.arguments, self._process.exitcode or 0, *said)
        if late:
            raise Found(f"skipdecode {' '.join(self.arguments)!r}\nhangs:\n{done.stderr[-3000:]}")
        return done

    def stopped(self, moment: float, number: int = signal.SIGKILL) -> Done:
        """Its end by a signal ``moment`` seconds after its begin, or by itself before that."""
        until = self.began + moment
        while self.running and time.monotonic() < until:
            time.sleep(min(0.002, max(0.0, until - time.monotonic())))
        self.send(number)
        return self.wait()


def _drained(pipe: int) -> str:
    """What was written to it; it is closed."""
    parts = []
    try:
        while part := os.read(pipe, 1 << 20):
            parts.append(part)
    except BlockingIOError:  # empty
        pass
    os.close(pipe)
    return b"".join(parts).decode(errors="replace")


def contents(folder: Path) -> dict[str, bytes]:
    """All files below ``folder``, but for locks and what a killed write has left."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files if not p.name.endswith((".tmp", "-lock"))}


def same(what: str, found: object, expected: object) -> None:
    """Raises Found unless the two are equal."""
    if found != expected:
        raise Found(f"{what} differs:\n{str(found)[:1500]}\nshould be\n{str(expected)[:1500]}")


def rows(random: Random, count: int) -> list[dict[str, str]]:
    """Prompts of several lengths, some of them odd, with responses."""
    words = "the cat sat on a mat and saw the dog that sat on the log near a small old house by the river".split()
    odd = ["naïve café", "日本", "a  b", "x" * 20, "🙂", 'say "hi", he said', "[red]"]

    def text(longest: int) -> str:
        return " ".join(random.choice(words) if random.random() < 0.9 else random.choice(odd) for _ in range(longest))

    return [{"prompt": text(random.randint(1, 8)), "response": text(random.randint(1, 9))} for _ in range(count)]


def write_jsonl(path: Path, values: list[dict[str, str]]) -> Path:
    """One object per line; every other one has its letters escaped."""
    lines = [json.dumps(value, ensure_ascii=bool(number % 2)) for number, value in enumerate(values)]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
