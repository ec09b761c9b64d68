"""Texts that a model writes itself at full depth: what an adapter learns from, so that it needs no data."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..data.chat import Prompt, as_json, parse_messages
from ..data.inputs import Item, read_examples
from ..data.tasks import Example, Task
from ..data.tasks.base import subsample
from ..errors import DataError, UsageError
from ..files import read_json, write
from ..generation.job import GenerationJob
from ..generation.stats import Completion
from ..loading.load import identity_of
from ..provenance import fingerprint

#: A text is left out if it ends in so many repetitions of the same characters, together at least so many.
REPEATS, REPEATED = 4, 24
#: Of the file's rows.
VERSION = 2
#: Sampling from the model's own distribution, at some temperature.
SAMPLED = {"do_sample": True, "top_p": 1.0, "top_k": 0}


def read_prompts(
    source: str | Path | None, task: Task, say: Callable[[str], object] = lambda message: None
) -> list[Prompt]:
    """Return the prompts of a file, or of a task's training split; None: one empty text, the begin-of-text token.

    ``say`` is called with a message about each bad line of a file. Raises DataError if there are no prompts.
    """
    if source is None:
        return [""]
    prompts = [example.prompt for example in read_examples(task, Path(source), "train", say)]
    if not prompts:
        raise DataError(f"{source} holds no prompts")
    return list(dict.fromkeys(prompts))


def own_texts(
    job: GenerationJob,
    prompts: Sequence[Prompt],
    count: int,
    file: Path | None = None,
    *,
    ended: bool = False,
    on_start: Callable[[int, int], object] = lambda total, done: None,
    on_batch: Callable[[Any], object] = lambda cost: None,
    say: Callable[[str], object] = lambda message: None,
) -> list[Example]:
    """Let a model write ``count`` texts at full depth.

    Args:
        job: the model, its options (``SAMPLED`` among them), batch size and seed. The default temperature is 0.5, from
            one prompt alone 1.
        prompts: if there are more than ``count``, evenly spaced ones are taken; if fewer, each has several texts.
        file: keeps the texts as JSONL; a killed run goes on, and a finished one's texts are read from it.
        ended: leave out texts that were cut off at ``max_new_tokens``.
        on_start, on_batch, say: as :meth:`GenerationJob.run` takes them.

    Returns:
        The texts, without those that are empty, end in a loop, or were written before for the same prompt.

    Raises:
        UsageError: ``file`` holds texts of another model, prompts or options; or it is damaged.
        SkipDecodeError: as :meth:`GenerationJob.run` raises it.
    """
    chosen = [each.prompt for each in subsample([Example(prompt, ()) for prompt in prompts], count)]
    rows = [chosen[i % len(chosen)] for i in range(count)]
    # Below 1 texts are surer of themselves, and sooner learnt; but many from one beginning would be the same.
    options = dict(job.options)
    options.setdefault("temperature", 1.0 if len(prompts) == 1 else 0.5)
    job = replace(job, options=options)
    key = fingerprint(VERSION, identity_of(job.model, job.adapter, job.revision), rows, dict(job.options), job.seed)
    about = file and file.with_suffix(".json")
    if file and about and about.exists():
        begun: Any = read_json(about)
        if not isinstance(begun, dict) or "job" not in begun:
            raise UsageError(f"{about} was not written by skipdecode: move it away, or give another folder")
        if begun["job"] != key:
            raise UsageError(
                f"{file} was written by another model or version, or with other prompts or options: move it away"
            )
        return _read(file, begun["sha256"])
    raw = file and file.with_name(f"{file.stem}.{key[:8]}.raw.jsonl")
    finished = raw and raw.exists() and not raw.with_name(raw.name + ".partial").exists()
    if file and file.exists() and not finished:
        raise UsageError(f"{file} is there and was not written by skipdecode: move it away, or give another folder")
    if raw and finished:
        made: Mapping[int, Completion] = _finished(raw)  # by a run that was killed before it chose from them
    else:
        items = [Item(number, {}, prompt) for number, prompt in enumerate(rows, 1)]
        result = replace(job, input=items, output=raw, speedup=1).run(on_start=on_start, on_batch=on_batch, say=say)
        made = result.completions
        gc.collect()  # gates and layers hold each other: this model is not to stay beside the next
        if not made:
            if raw:
                raw.unlink()
            raise DataError(f"nothing could be written: {items[0].error} (--prompts FILE gives other prompts)")
    texts, left_out = dict[Example, None](), {"empty": 0, "looping": 0, "cut off": 0, "repeated": 0, "refused": 0}
    for index, row in enumerate(rows):
        text = made[index].text if index in made else None
        if text is None:
            left_out["refused"] += 1
        elif not text.strip() or ends_in_loop(text.rstrip()):
            left_out["looping" if text.strip() else "empty"] += 1
        elif ended and made[index].finish_reason != "stop":
            left_out["cut off"] += 1
        elif (written := Example(row, (text,), made[index].finish_reason == "length")) in texts:
            left_out["repeated"] += 1
        else:
            texts[written] = None
    if any(left_out.values()):
        lost = ", ".join(f"{n:,} {what}" for what, n in left_out.items() if n)
        if not texts:
            raise DataError(f"no text is left to learn from ({lost}): give other --prompts, or another --temperature")
        say(f"left out of the own texts: {lost}")
    if file and about and raw:
        lines = (
            {"prompt": as_json(each.prompt), "response": each.references[0]}
            | ({"finish_reason": "length"} if each.cut else {})
            for each in texts
        )
        content = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
        write(file, content)
        checksum = sha256(content.encode()).hexdigest()
        told = {"job": key, "texts": len(texts), "left_out": left_out, "sha256": checksum}
        write(about, json.dumps(told, indent=1) + "\n")
        raw.unlink()
    return [*texts]


def hold_out(texts: Sequence[Example], most: int) -> tuple[list[Example], list[Example]]:
    """Return own texts to learn from, and at most ``most`` to evaluate with.

    The latter are those of a tenth of the prompts, which no other texts follow: texts of one prompt are alike. Of fewer
    than ten prompts, a tenth of the texts.
    """
    prompts = [*dict.fromkeys(each.prompt for each in texts)]
    held = {*prompts[: min(most, len(prompts) // 10)]}
    if len(prompts) < 10:
        count = min(most, len(texts) // 10)
        return [*texts[count:]], [*texts[:count]]
    return [each for each in texts if each.prompt not in held], [each for each in texts if each.prompt in held][:most]


def ends_in_loop(text: str) -> bool:
    """Return whether a text ends in a repetition: ``REPEATS`` rounds at least, and ``REPEATED`` characters."""
    for period in range(1, len(text) // REPEATS + 1):
        same = period
        while same < len(text) and text[-same - 1] == text[-same - 1 + period]:
            same += 1
        if same >= max(REPEATS * period, REPEATED):
            return True
    return False


def _finished(raw: Path) -> dict[int, Completion]:
    """Return the completions of a job's output by row."""
    rows = enumerate(map(json.loads, raw.read_text("utf-8").split("\n")[:-1]))
    return {index: Completion(**row) for index, row in rows if "error" not in row}


def _read(file: Path, checksum: str) -> list[Example]:
    """Return the texts of a file. Raises UsageError if they are not those that were written."""
    written = file.read_bytes() if file.exists() else b""
    if sha256(written).hexdigest() != checksum:
        raise UsageError(f"{file} has changed since it was written: remove it and {file.with_suffix('.json')}")
    found = []
    for row in map(json.loads, written.decode().split("\n")[:-1]):
        prompt = row["prompt"] if isinstance(row["prompt"], str) else parse_messages(row["prompt"])
        found.append(Example(prompt, (row["response"],), row.get("finish_reason") == "length"))
    return found
