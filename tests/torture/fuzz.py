"""Damaged files and odd options: one line or the right text, never a traceback, never a hang, never other text."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import typer

from skipdecode import Schedule
from skipdecode.cli import app
from torture.attempt import Attempt, Done, Found, Kind, contents, rows, same, write_jsonl
from torture.kills import job, timeless

# --- what is done to bytes and values

NOISE = [b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\n", b"\r", b'"', b"{", b"[" * 3000, b"]", b",", b"\\ud800", b"NaN", b"1e999"]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3.5, 1e18, -1e18, 2**31, 2**63, 10**400, 1e-300, float("nan"), float("inf")),
    *("", " ", "x", "nan", "\0", "\ud800", "x" * 9999, "../..", "[red]", "float16", "full"),
    *([], {}, [None], [[]], {"": 1}, [1, 2, 3], [0] * 5000, {"a": {"b": []}}),
]


def damaged(random: Random, data: bytes) -> bytes:
    """The bytes with some cut out, doubled, flipped or put in."""
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        a, b = sorted(random.randrange(len(data) + 1) for _ in range(2))
        b = min(b, a + random.choice((1, 1, 8, 100, len(data))))
        way = random.randrange(7)
        if way == 0:
            data = data[:a]
        elif way == 1:
            data = data[:a] + data[b:]
        elif way == 2:
            data = data[:b] + data[a:b] + data[b:]
        elif way == 3 and a < len(data):
            data = data[:a] + bytes([data[a] ^ 1 << random.randrange(8)]) + data[a + 1 :]
        elif way == 4:
            data = data[:a] + random.choice(NOISE) + data[a:]
        elif way == 5:
            data = data[:a] + random.randbytes(b - a) + data[b:]
        else:
            lines = data.splitlines(keepends=True)
            random.shuffle(lines)
            data = b"".join(lines[: random.randint(0, len(lines))])
    return data


def changed(random: Random, value: Any) -> Any:
    """JSON's value with something odd somewhere in it, or without something."""
    if isinstance(value, dict) and value and random.random() < 0.95:
        key = random.choice(list(value))
        way = random.randrange(12)
        if way == 0:
            return {k: v for k, v in value.items() if k != key}
        if way == 1:
            return value | {random.choice(("", "order", "num_layers", "x", "auto_map", "dtype")): random.choice(ODD)}
        return value | {key: changed(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.8:
        place = random.randrange(len(value))
        return [*value[:place], changed(random, value[place]), *value[place + 1 :]]
    if isinstance(value, (int, float)) and random.random() < 0.7:
        return value + random.choice((1, -1, 0.5, 1000, -value))
    return random.choice(ODD)


def mutate(random: Random, path: Path) -> None:
    """One file, as bytes or as JSON."""
    data = path.read_bytes()
    if path.suffix == ".json" and random.random() < 0.7:
        for _ in range(random.choice((1, 1, 2))):
            data = json.dumps(changed(random, json.loads(data))).encode("utf-8", "replace")
    else:
        data = damaged(random, data)
    path.write_bytes(data)


def _noted(attempt: Attempt, done: Done) -> Done:
    attempt.counts["taken" if done.code == 0 else "refused"] += 1
    return done.sound()


# --- files

SHORT = ["--max-new-tokens", 4, "--batch-size", 4]


def inputs(attempt: Attempt) -> None:
    """JSONL, CSV and text: every row of what is read is in the output, as a text or with its error."""
    random, folder = attempt.random, attempt.folder
    options = job(random, folder)
    path = Path(str(options[1]))
    mutate(random, path)
    tasks: list[list[object]] = [[], [], ["--format", random.choice(("jsonl", "csv", "text"))], ["--task", "e2e"]]
    task = random.choice(tasks)
    done = _noted(attempt, attempt.run("generate", attempt.model, *options, *SHORT, *task, "--output", folder / "out"))
    if done.code == 2 and (folder / "out").exists():
        raise Found(f"refused, but the output is there:\n{done.line}")
    if done.code != 2:
        lines = [json.loads(line) for line in (folder / "out").read_text("utf-8").splitlines()]
        bad = sum("error" in line for line in lines)
        if done.code == int(bad == len(lines)) and all("text" in line or "error" in line for line in lines):
            return
        raise Found(f"exit code {done.code} with {bad} of {len(lines)} rows bad")


def training_data(attempt: Attempt) -> None:
    """A data file for training, evaluation or calibration."""
    random = attempt.random
    path = attempt.folder / random.choice(("rows.jsonl", "rows.csv", "rows.json"))
    values = rows(random, 8)
    if path.suffix == ".csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, ["prompt", "response"])
        writer.writeheader()
        writer.writerows(values)
        path.write_text(text.getvalue(), "utf-8")
    else:
        write_jsonl(path, values)
    path.write_bytes(damaged(random, path.read_bytes()))
    verb = random.choice(("train", "evaluate", "calibrate"))
    _noted(attempt, attempt.run(*_command(verb, attempt, {"--data": path})))


def schedules(attempt: Attempt) -> None:
    """A schedule's file: refused, or it is a schedule, which never increases."""
    random, path = attempt.random, attempt.folder / "plan.json"
    Schedule(4, 3, 1, 9, order=random.choice(("top", "bottom", (3, 1, 0, 2)))).save(path)
    mutate(random, path)
    verb = random.choice(("generate", "generate", "train"))
    done = _noted(attempt, attempt.run(*_command(verb, attempt, {"--schedule": path, "--speedup": None})))
    if done.code == 0:
        plan = Schedule.load(path)
        depths = [plan.depth(step) for step in range(min(plan.horizon, 1000))]
        same("the depths", depths, sorted(depths, reverse=True))


def journals(attempt: Attempt) -> None:
    """A killed job's journal: the output is that of an unbroken job, or the journal is refused."""
    random, target = attempt.random, attempt.folder / "out"
    options = ["generate", attempt.model, *job(random, attempt.folder), "--output"]
    attempt.run(*options, attempt.folder / "whole").sound(0)
    partial = attempt.folder / "out.partial"
    for moment in (0.25, 0.35, 0.5):
        attempt.start(*options, target).stopped(moment + random.random() / 10)
        if partial.exists() and partial.stat().st_size:
            break
    if target.exists() or not partial.exists() or not partial.stat().st_size:
        attempt.counts["without a journal"] += 1
        return
    whole = partial.read_bytes()
    for _ in range(3):
        partial.write_bytes(damaged(random, whole))
        done = _noted(attempt, attempt.run(*options, target))
        if done.code == 0:
            same("the output", target.read_bytes(), (attempt.folder / "whole").read_bytes())
            target.unlink()


def checkpoints(attempt: Attempt) -> None:
    """A file of the model: it is refused, or loads and writes."""
    random, model = attempt.random, attempt.folder / "model"
    shutil.copytree(attempt.model, model)
    names = ["config.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    path = model / random.choice([*names, "model.safetensors"])
    if path.suffix == ".safetensors" and random.random() < 0.6:  # its header: a length, then JSON
        data = path.read_bytes()
        size = 8 + int.from_bytes(data[:8], "little")
        header = json.dumps(changed(random, json.loads(data[8:size]))).encode("utf-8", "replace")
        path.write_bytes(random.choice((len(header), size, 2**62)).to_bytes(8, "little") + header + data[size:])
    else:
        mutate(random, path)
    verb = random.choice(("generate", "generate", "generate", "evaluate", "calibrate", "train", "check", "schedule"))
    command = _command(verb, attempt, {})
    command[1] = model
    done = attempt.run(*command)
    try:
        _noted(attempt, done)
    except Found as found:
        raise Found(f"{path.name} of the model was changed (kept in {model})\n{found}") from None


def runs(attempt: Attempt) -> None:
    """training.json, or a file of a checkpoint: passed over or refused, and then the weights are the unbroken run's."""
    random, output = attempt.random, attempt.folder / "out"
    command = ["train", attempt.model, "--data", attempt.data / "train.jsonl", "--batch-size", 4, "--epochs", 2]
    command += ["--save-steps", 2, "--speedups", "1,2"]
    attempt.run(*command, "--output", attempt.folder / "whole").sound(0)
    child = attempt.start(*command, "--output", output)
    child.stopped(0.6 + random.random() / 2)
    files = [path for path in sorted(output.rglob("*")) if path.is_file() and path.suffix in (".json", ".pt", ".pth")]
    if not files:
        attempt.counts["without a checkpoint"] += 1
        return
    record = output / "training.json"
    mutate(random, record if record in files and random.random() < 0.5 else random.choice(files))
    if _noted(attempt, attempt.run(*command, "--output", output)).code == 0:
        weights = [(folder / "model.safetensors").read_bytes() for folder in (output, attempt.folder / "whole")]
        same("the weights (bytes)", hash(weights[0]), hash(weights[1]))


def evaluations(attempt: Attempt) -> None:
    """A finished row of an evaluation: measured again or refused, and then the table is the unbroken one."""
    random, output = attempt.random, attempt.folder / "out"
    command = _command("evaluate", attempt, {"--output": output})
    attempt.run(*command).sound(0)
    whole = timeless(output)
    files = [path for path in contents(output) if path.endswith(".json")]
    mutate(random, output / random.choice(files))
    if _noted(attempt, attempt.run(*command)).code == 0:
        same("the table", timeless(output), whole)


# --- options

#: Numbers that mean work for hours, rightly; and what must not be made odd, or everything ends there.
LONG = {"--epochs", "--max-steps", "--repeats", "--samples", "--num-beams", "--horizon", "--lengths"}
WORDS = [
    *("", " ", "nan", "inf", "-inf", "-1", "0", "1", "1.5", "3", "0x10", "1e400", "1e18", "-0.0", "１２", "1_000", "2,3"),
    *("1,2,", "4,3,2", "x", "-", "--", ".", "..", "/", "/dev/null", "/dev/full", "no/such/file", "[red]x[/]", "é", "日本"),
    *("\udcff", "x" * 5000, "a\nb", "auto", "float16", "bfloat16", "cpu", "cuda", "meta", "demo", "e2e", "reddit_tldr"),
    *("top", "even", "search", "linear", "list", "constant", "full", "calm", "static", "d3", "hidden", "eager", "csv"),
]
BIG = {"1e18", "1e400", "1_000", "3"}


def _command(verb: str, attempt: Attempt, given: dict[str, object]) -> list[object]:
    """A short and sound command of a verb, with some options of one's own; None takes one out."""
    folder, model, data = attempt.folder, attempt.model, attempt.data
    source = write_jsonl(folder / "prompts.jsonl", rows(Random(0), 5))
    texts = {"--max-new-tokens": 4, "--batch-size": 4}
    timing = {"--repeats": 1, "--timing-rows": 2, "--samples": 5, "--rows": 4, "--speedups": "1,2"}
    plans: dict[str, dict[str, object]] = {
        "generate": {"--input": source, "--output": folder / "texts", "--speedup": 2, **texts},
        "train": {"--data": data, "--output": folder / "run", "--max-steps": 2, "--batch-size": 4, "--speedup": 2},
        "evaluate": {"--data": data, "--output": folder / "tables", **timing, **texts},
        "calibrate": {"--data": data, "--output": folder / "found.json", "--rows": 4, **texts},
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
    command: Any = typer.main.get_command(app)
    known = [p for p in command.commands[verb].params if p.name != "help" and str(p.opts[0]).startswith("--")]
    given: dict[str, object] = {}
    flags = []
    for parameter in random.sample(known, random.choice((1, 1, 1, 2))):
        name = parameter.opts[0]
        if parameter.is_flag:
            flags.append(name)
        else:
            given[name] = random.choice([word for word in WORDS if name not in LONG or word not in BIG])
    arguments = _command(verb, attempt, given)
    if random.random() < 0.05:
        arguments[1] = random.choice(WORDS)
    _noted(attempt, attempt.run(*arguments, *flags, stdin=random.choice((b"", b"the cat\n", b"yes\n"))))


ATTACKS = (inputs, training_data, schedules, journals, checkpoints, options, runs, evaluations)
KINDS: dict[str, Kind] = {attack.__name__.replace("_", "-"): attack for attack in ATTACKS}
