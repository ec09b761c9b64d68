"""Commands that are killed, stopped or doubled until they are done leave what an unbroken one does."""

from __future__ import annotations

import csv
import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from torture.attempt import Attempt, Child, Found, Kind, contents, rows, same, write_jsonl

#: So many kills of one command; then it may end.
MOST = 40


def _moments(attempt: Attempt, whole: float, watched: Callable[[], object]) -> Callable[[Child], float]:
    """When to kill a command: anywhere in its time, or just as something changes on the disk."""

    def moment(child: Child) -> float:
        if attempt.random.random() < 0.4:
            return attempt.random.uniform(0, 1.1 * whole)
        before, until = watched(), time.monotonic() + 1.1 * whole
        while child.running and watched() == before and time.monotonic() < until:
            time.sleep(0.0005)
        return time.monotonic() - child.began + attempt.random.choice((0, 0, 0.001, 0.004, 0.02))

    return moment


def _until_done(attempt: Attempt, arguments: list[object], whole: float, watched: Callable[[], object]) -> None:
    """The same command again and again, killed each time (now and then only asked to stop), until it is done."""
    moment = _moments(attempt, whole, watched)
    for _ in range(MOST):
        number = attempt.random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM))
        child = attempt.start(*arguments)
        done = child.stopped(moment(child), number)
        if done.code == 0:
            return
        if done.code == -signal.SIGKILL:
            attempt.counts["kills"] += 1
        elif done.code in (130, 143):
            attempt.counts["stops"] += 1
            # Without the second half where it came before the verb had begun.
            if not re.search(
                r"skipdecode: stopped by SIG(INT|TERM)(; the same command goes on from what is saved)?$", done.line
            ):
                raise Found(f"stopped without a word:\n{done.stderr[-2000:]}")
            done.sound(130, 143)
        elif done.code < 0 or (done.code == 1 and not done.stderr):  # before the command had begun
            attempt.counts["stops"] += 1
        elif "is already there" in done.line:  # the one before was killed when its work was done
            return
        else:
            done.sound(0)
    done = attempt.run(*arguments)
    if "is already there" not in done.line:
        done.sound(0)


def _signature(folder: Path) -> Callable[[], object]:
    """What shows that something was written below ``folder``."""

    def look() -> object:
        try:
            return [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.rglob("*"))]
        except OSError:  # gone between the two
            return time.monotonic()

    return look


def job(random: Random, folder: Path) -> list[object]:
    """Options of a generation job, and its input in ``folder``."""
    values, name = rows(random, random.randint(3, 14)), random.choice(("in.jsonl", "in.jsonl", "in.csv", "in.txt"))
    if name == "in.csv":
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["prompt", "response"])
            writer.writeheader()
            writer.writerows(values)
    elif name == "in.txt":
        (folder / name).write_text("".join(value["prompt"] + "\n" for value in values), encoding="utf-8")
    else:
        write_jsonl(folder / name, values)
    depths: tuple[list[object], ...] = (["--full"], ["--speedup", 2], ["--speedup", 3.5], [])
    depth = random.choice(depths)
    ways: list[list[object]] = [
        [],
        ["--do-sample", "--seed", random.randint(0, 9)],
        ["--do-sample", "--temperature", 2, "--top-k", 40, "--top-p", 0.9],
        ["--num-beams", 3],
        ["--num-beams", 2, "--do-sample", "--seed", 3],
        ["--repetition-penalty", 1.3, "--no-repeat-ngram-size", 2, "--min-new-tokens", 3],
    ]
    size = ["--batch-size", random.randint(1, 4), "--max-new-tokens", random.randint(5, 24)]
    return ["--input", folder / name, *depth, *random.choice(ways), *size]


def generate(attempt: Attempt) -> None:
    """The output is the unbroken one's to the byte, whatever was killed on the way."""
    options = ["generate", attempt.model, *job(attempt.random, attempt.folder)]
    whole, target = attempt.folder / "whole", attempt.folder / "out"
    began = time.monotonic()
    attempt.run(*options, "--output", whole).sound(0)
    took = time.monotonic() - began
    partial = attempt.folder / "out.partial"
    _until_done(attempt, [*options, "--output", target], took, lambda: partial.exists() and partial.stat().st_size)
    same("the output", target.read_bytes(), whole.read_bytes())
    same("what is left", {"out", "whole"}, contents(attempt.folder).keys() - {"in.jsonl", "in.csv", "in.txt"})


def two_at_once(attempt: Attempt) -> None:
    """Of two jobs on one output, one is done; the other is refused, or finds it done."""
    ours, target = job(attempt.random, attempt.folder), attempt.folder / "out"
    theirs = [*ours, "--speedup", 4] if "--full" not in ours and "--speedup" not in ours else list(ours)
    expected = []
    for number, options in enumerate((ours, theirs)):
        path = attempt.folder / f"whole-{number}"
        attempt.run("generate", attempt.model, *options, "--output", path).sound(0)
        expected.append(path.read_bytes())
    commands = [["generate", attempt.model, *options, "--output", target] for options in (ours, theirs)]
    for _ in range(6):
        pair = []
        for command in commands:
            pair.append(attempt.start(*command))
            time.sleep(attempt.random.choice((0, 0.01, 0.1)))
        victim = pair[attempt.random.randrange(2)]
        ends = [c.stopped(attempt.random.uniform(0.05, 0.6)) if c is victim else c.wait() for c in pair]
        attempt.counts["kills"] += sum(end.code == -signal.SIGKILL for end in ends)
        for end in ends:
            refused = any(words in end.line for words in ("is in use by", "already there", "belongs to a job"))
            if end.code != -signal.SIGKILL and not (end.code == 2 and refused):
                end.sound(0)
        if target.exists():
            break
    if not target.exists():  # killed every time: whoever has left a journal ends it
        ends = [attempt.run(*command) for command in commands]
        if not any(end.code == 0 for end in ends):
            raise Found(f"neither of two jobs goes on after kills:\n{ends[0].stderr[-999:]}\n{ends[1].stderr[-999:]}")
    if target.read_bytes() not in expected:
        raise Found("the output is neither of two jobs that ran at once")


CLOCK = ("seconds", "clock", "step_ms", "timed", "over")


def timeless(folder: Path) -> list[dict[str, object]]:
    """The rows of an evaluation, without what a clock says."""
    table = json.loads((folder / "table.json").read_text())
    return [{k: v for k, v in row.items() if not any(word in k for word in CLOCK)} for row in table["rows"]]


def evaluate(attempt: Attempt) -> None:
    """All rows are there, equal to the unbroken ones but for clock figures."""
    random = attempt.random
    methods = ",".join(["skipdecode", *random.sample(["unified", "d3", "hsd", "multi_exit", "calm"], 2)])
    options = ["evaluate", attempt.model, "--data", attempt.data, "--limit", random.randint(3, 8), "--methods", methods]
    options += ["--speedups", "1,2,4", "--repeats", 1, "--timing-rows", 2, "--max-new-tokens", 6]
    options += ["--batch-size", 4]
    began = time.monotonic()
    attempt.run(*options, "--output", attempt.folder / "whole").sound(0)
    took = time.monotonic() - began
    target = attempt.folder / "out"
    _until_done(attempt, [*options, "--output", target], took, _signature(target))
    same("the table", timeless(target), timeless(attempt.folder / "whole"))
    same("the files", contents(target).keys(), contents(attempt.folder / "whole").keys())


def train(attempt: Attempt) -> None:
    """The final weights are those of the unbroken run, to the bit; nothing else is left than it leaves."""
    random = attempt.random
    options = ["train", attempt.model, "--data", attempt.data / "train.jsonl", "--seed", random.randint(0, 99)]
    options += ["--num-train-epochs", 3, "--batch-size", random.choice((3, 4, 5)), "--save-steps", random.randint(1, 4)]
    options += random.choice(
        (
            [],
            ["--gradient-accumulation-steps", 2],
            ["--lora-rank", 2],
            ["--distill-weight", 0.5],
            ["--method", "unified"],
        )
    )
    options += random.choice((["--speedups", "1,2,4"], ["--speedup", 2], ["--speedups", "1,3", "--weights", "1,2"]))
    if "--data" in options and random.random() < 0.3:  # with evaluations between
        options[options.index("--data") + 1] = attempt.data
        options += ["--eval-steps", 3, "--max-eval-samples", 3]
    began = time.monotonic()
    attempt.run(*options, "--output", attempt.folder / "whole").sound(0)
    took = time.monotonic() - began
    target = attempt.folder / "out"
    _until_done(attempt, [*options, "--output", target], took, _signature(target))
    expected, found = contents(attempt.folder / "whole"), contents(target)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        same(f"{name} (its bytes)", hash(found.get(name)), hash(expected[name]))
    names = [{name.split("/")[0] for name in files} for files in (found, expected)]
    same("what is left", {n for n in names[0] if "checkpoint" not in n}, {n for n in names[1] if "checkpoint" not in n})


KINDS: dict[str, Kind] = {"generate": generate, "two-at-once": two_at_once, "evaluate": evaluate, "train": train}
