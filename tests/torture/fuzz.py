"""Damaged files: one line or the right text, never a traceback, never a hang, never other text."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

from skipdecode import Schedule
from torture.attempt import Attempt, Found, Kind, contents, rows, same, write_jsonl
from torture.kills import job, timeless
from torture.options import command, noted, options

# --- what is done to bytes and values

NOISE = [
    b"\0",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\n",
    b"\r",
    b'"',
    b"{",
    b"[" * 3000,
    b"]",
    b",",
    b"\\ud800",
    b"NaN",
    b"1e999",
]
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
        return value + random.choice((1, -1, 1000, -value))
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
    done = noted(attempt, attempt.run("generate", attempt.model, *options, *SHORT, *task, "--output", folder / "out"))
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
    noted(attempt, attempt.run(*command(verb, attempt, {"--data": path})))


def schedules(attempt: Attempt) -> None:
    """A schedule's file: refused, or it is a schedule, which never increases."""
    random, path = attempt.random, attempt.folder / "plan.json"
    Schedule(4, 3, 1, 9, order=random.choice(("top", "bottom", (3, 1, 0, 2)))).save(path)
    mutate(random, path)
    verb = random.choice(("generate", "generate", "train"))
    done = noted(attempt, attempt.run(*command(verb, attempt, {"--schedule": path, "--speedup": None})))
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
        done = noted(attempt, attempt.run(*options, target))
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
    arguments = command(verb, attempt, {})
    arguments[1] = model
    done = attempt.run(*arguments)
    try:
        noted(attempt, done)
    except Found as found:
        raise Found(f"{path.name} of the model was changed (kept in {model})\n{found}") from None


def runs(attempt: Attempt) -> None:
    """training.json, or a file of a checkpoint: passed over or refused, and then the weights are the unbroken run's."""
    random, output = attempt.random, attempt.folder / "out"
    arguments: list[object] = [
        "train",
        attempt.model,
        "--data",
        attempt.data / "train.jsonl",
        "--batch-size",
        4,
        "--num-train-epochs",
        2,
    ]
    arguments += ["--save-steps", 2, "--speedups", "1,2"]
    attempt.run(*arguments, "--output", attempt.folder / "whole").sound(0)
    child = attempt.start(*arguments, "--output", output)
    child.stopped(0.6 + random.random() / 2)
    files = [path for path in sorted(output.rglob("*")) if path.is_file() and path.suffix in (".json", ".pt", ".pth")]
    if not files:
        attempt.counts["without a checkpoint"] += 1
        return
    record = output / "training.json"
    mutate(random, record if record in files and random.random() < 0.5 else random.choice(files))
    if noted(attempt, attempt.run(*arguments, "--output", output)).code == 0:
        weights = [(folder / "model.safetensors").read_bytes() for folder in (output, attempt.folder / "whole")]
        same("the weights (bytes)", hash(weights[0]), hash(weights[1]))


def evaluations(attempt: Attempt) -> None:
    """A finished row of an evaluation: measured again or refused, and then the table is the unbroken one."""
    random, output = attempt.random, attempt.folder / "out"
    arguments = command("evaluate", attempt, {"--output": output})
    attempt.run(*arguments).sound(0)
    whole = timeless(output)
    files = [path for path in contents(output) if path.endswith(".json")]
    mutate(random, output / random.choice(files))
    if noted(attempt, attempt.run(*arguments)).code == 0:
        same("the table", timeless(output), whole)


ATTACKS = (inputs, training_data, schedules, journals, checkpoints, options, runs, evaluations)
KINDS: dict[str, Kind] = {attack.__name__.replace("_", "-"): attack for attack in ATTACKS}
