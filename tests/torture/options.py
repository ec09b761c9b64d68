"""Odd values of every option of every verb: one line, or the verb does its work."""

from __future__ import annotations

from random import Random
from typing import Any

import typer

from skipdecode.cli.main import app
from torture.attempt import Attempt, Done, rows, write_jsonl

#: Numbers that mean work for hours, rightly; and what must not be made odd, or everything ends there.
LONG = {"--num-train-epochs", "--max-steps", "--repeats", "--num-beams", "--horizon", "--lengths"}
WORDS = [
    *(
        "",
        " ",
        "nan",
        "inf",
        "-inf",
        "-1",
        "0",
        "1",
        "1.5",
        "3",
        "0x10",
        "1e400",
        "1e18",
        "-0.0",
        "１２",
        "1_000",
        "2,3",
    ),
    *(
        "1,2,",
        "4,3,2",
        "x",
        "-",
        "--",
        ".",
        "..",
        "/",
        "/dev/null",
        "/dev/full",
        "no/such/file",
        "[red]x[/]",
        "é",
        "日本",
    ),
    *("\udcff", "x" * 5000, "a\nb", "auto", "float16", "bfloat16", "cpu", "cuda", "meta", "demo", "e2e", "reddit_tldr"),
    *("top", "even", "linear", "list", "constant", "full", "calm", "static", "d3", "hidden", "eager", "csv"),
]
BIG = {"1e18", "1e400", "1_000", "3"}


def command(verb: str, attempt: Attempt, given: dict[str, object]) -> list[object]:
    """A short and sound command of a verb, with some options of one's own; None takes one out."""
    folder, model, data = attempt.folder, attempt.model, attempt.data
    source = write_jsonl(folder / "prompts.jsonl", rows(Random(0), 5))
    texts = {"--max-new-tokens": 4, "--batch-size": 4}
    timing = {"--repeats": 1, "--timing-rows": 2, "--limit": 4, "--speedups": "1,2"}
    plans: dict[str, dict[str, object]] = {
        "generate": {"--input": source, "--output": folder / "texts", "--speedup": 2, **texts},
        "train": {"--data": data, "--output": folder / "run", "--max-steps": 2, "--batch-size": 4, "--speedup": 2},
        "evaluate": {"--data": data, "--output": folder / "tables", **timing, **texts},
        "calibrate": {"--data": data, "--output": folder / "found.json", "--limit": 4, **texts},
        "check": {},
        "schedule": {"--speedup": 2},
        "demo": {"--speedups": "1,2", "--png": folder / "demo.png"},
    }
    options = plans[verb] | given
    arguments = [value for pair in options.items() if pair[1] is not None for value in pair]
    return [verb, *([] if verb == "demo" else [model]), *arguments]


def options(attempt: Attempt) -> None:
    """One to three options of a verb with odd values."""
    random = attempt.random
    verb = random.choice(("generate", "generate", "train", "train", "evaluate", "calibrate", "check", "schedule"))
    line: Any = typer.main.get_command(app)
    known = [p for p in line.commands[verb].params if p.name != "help" and str(p.opts[0]).startswith("--")]
    given: dict[str, object] = {}
    flags = []
    for parameter in random.sample(known, random.choice((1, 1, 1, 2))):
        name = parameter.opts[0]
        if parameter.is_flag:
            flags.append(name)
        else:
            given[name] = random.choice([word for word in WORDS if name not in LONG or word not in BIG])
    arguments = command(verb, attempt, given)
    if random.random() < 0.05:
        arguments[1] = random.choice(WORDS)
    noted(attempt, attempt.run(*arguments, *flags, stdin=random.choice((b"", b"the cat\n", b"yes\n"))))


def noted(attempt: Attempt, done: Done) -> Done:
    attempt.counts["taken" if done.code == 0 else "refused"] += 1
    return done.sound()
