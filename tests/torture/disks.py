"""A disk that is full, or may not be written to: what was there stays whole, and the same command ends well later."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from skipdecode import Schedule
from torture.attempt import Attempt, Found, Kind, contents, same
from torture.kills import job, timeless

#: How much a command may still write; the largest of what one writes is a checkpoint of some 900 kB.
MOST = 1 << 21


@contextmanager
def _disk(attempt: Attempt, kind: str) -> Iterator[tuple[Path, Callable[[int | None], int | None]]]:
    """A folder, and what makes it fail: given some number of bytes it has room for no more; None lets it work again.

    Returns the largest file that a process may write, where the disk itself cannot be limited.
    """
    if not attempt.limits.mounts:
        yield attempt.folder, lambda room: room
        return
    disk = attempt.limits.disk(4 * MOST)
    ballast = disk / "ballast"

    def limit(room: int | None) -> int | None:
        if kind == "read-only":
            attempt.limits.read_only(disk, room is not None)
        elif room is None:
            ballast.unlink(missing_ok=True)
        else:
            ballast.write_bytes(bytes(max(0, shutil.disk_usage(disk).free - room)))
        return None

    try:
        yield disk, limit
    finally:
        attempt.limits.remove(disk)


def _fails(
    attempt: Attempt, kind: str, command: Callable[[Path], list[object]], check: Callable[[Path, Path], None], most: int
) -> None:
    """``command`` on a failing disk, some times, then on one that works: ``check`` compares with an unbroken one."""
    whole = attempt.folder / "whole"
    whole.mkdir()
    attempt.run(*command(whole)).sound(0)
    with _disk(attempt, kind) as (disk, limit):
        target = disk / "work"
        target.mkdir()
        arguments = command(target)
        for _ in range(attempt.random.randint(1, 4)):
            before = contents(target)
            size = limit(attempt.random.randrange(int(most ** attempt.random.uniform(0.5, 1))))
            done = attempt.run(*arguments, most=size).sound(0, 2)
            if done.code == 2:
                attempt.counts["failures"] += 1
                if "skipdecode: " not in done.line:  # it may stand behind a progress bar
                    raise Found(f"not ended with a line:\n{done.stderr[-2000:]}")
                if kind == "read-only":
                    same("what was there", contents(target), before)
            limit(None)
            if done.code == 0:
                break
        if done.code == 2:
            attempt.run(*arguments).sound(0)
        check(target, whole)
        litter = sorted(path.name for path in target.rglob("*") if path.name.endswith((".tmp", "-lock")))
        same("what is left behind", litter, [])


def generate(kind: str, attempt: Attempt) -> None:
    """A job's output is that of a job with room enough."""
    options = job(attempt.random, attempt.folder)

    def check(target: Path, whole: Path) -> None:
        same("the output", contents(target), contents(whole))

    _fails(attempt, kind, lambda f: ["generate", attempt.model, *options, "--output", f / "out"], check, 4000)


def train(kind: str, attempt: Attempt) -> None:
    """The weights are those of a run with room enough."""
    options = ["--data", attempt.data / "train.jsonl", "--num-train-epochs", 1, "--batch-size", 4, "--save-steps", 1]

    def check(target: Path, whole: Path) -> None:
        weights = [(folder / "out" / "model.safetensors").read_bytes() for folder in (target, whole)]
        same("the weights (bytes)", hash(weights[0]), hash(weights[1]))

    _fails(attempt, kind, lambda f: ["train", attempt.model, *options, "--output", f / "out"], check, MOST)


def evaluate(kind: str, attempt: Attempt) -> None:
    """The table is that of an evaluation with room enough."""
    options = ["--data", attempt.data, "--limit", 4, "--repeats", 1, "--timing-rows", 2]
    options += ["--max-new-tokens", 5, "--speedups", "1,2,4"]

    def check(target: Path, whole: Path) -> None:
        same("the table", timeless(target / "out"), timeless(whole / "out"))
        same("the files", contents(target).keys(), contents(whole).keys())

    _fails(attempt, kind, lambda f: ["evaluate", attempt.model, *options, "--output", f / "out"], check, 1 << 18)


def calibrate(kind: str, attempt: Attempt) -> None:
    """The model's config holds the schedules that it held before, or those and the new one."""
    options = ["--data", attempt.data, "--limit", 6, "--max-new-tokens", 8, "--batch-size", 2, "--save", "--force"]
    speedup = attempt.random.choice((1.5, 2, 3))

    def command(folder: Path) -> list[object]:
        if not (folder / "model").exists():
            shutil.copytree(attempt.model, folder / "model")
        return ["calibrate", folder / "model", *options, "--speedup", speedup, "--output", folder / "plan.json"]

    def check(target: Path, whole: Path) -> None:
        same("model and schedule", contents(target), contents(whole))

    _fails(attempt, kind, command, check, 3000)


def schedule(kind: str, attempt: Attempt) -> None:
    """``Schedule.save``: the old file or the new one, whole."""
    with _disk(attempt, kind) as (disk, limit):
        path, old = disk / "plan.json", Schedule.for_speedup(2, 24, 64, decay="linear")
        old.save(path)
        new = Schedule(24, 20, 3, attempt.random.randint(2, 500), order=tuple(attempt.random.sample(range(24), 24)))
        command = ["schedule", "--layers", 24, "--speedup", attempt.random.randint(2, 9), "--save", path]
        room = attempt.random.randrange(200)
        limit(room)
        size = room if kind == "full" else None  # a disk's smallest piece is larger than that
        before = path.read_bytes()
        done = attempt.run(*command, most=size).sound(0, 2)
        held = path.read_bytes()
        limit(None)
        if done.code == 2:
            attempt.counts["failures"] += 1
            same("the old schedule", held, before)
        elif json.loads(held) == old.to_dict():
            raise Found("no schedule was written, with exit code 0")
        attempt.run(*command).sound(0)
        new.save(path)
        same("the schedule", Schedule.load(path), new)


def _of(kind: str, attack: Callable[[str, Attempt], None]) -> Kind:
    return lambda attempt: attack(kind, attempt)


ATTACKS = (generate, train, evaluate, calibrate, schedule)
KINDS: dict[str, Kind] = {f"{kind}-{a.__name__}": _of(kind, a) for a in ATTACKS for kind in ("full", "read-only")}
