"""Texts that a model writes itself at full depth: what an adapter learns from, so that it needs no data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..data.chat import Prompt
from ..data.inputs import Item, read_items
from ..data.tasks import Example, Task
from ..data.tasks.base import subsample
from ..errors import TaskError
from ..generation.jobs import GenerationJob

#: A text that ends in so many repetitions of some tokens, together at least so many, is left out.
REPEATS, REPEATED = 4, 24


def read_prompts(source: str | Path | None, task: Task) -> list[Prompt]:
    """Return the prompts of a file, or of a task's training split; None: one empty text, the begin-of-text token.

    Raises TaskError if there are none.
    """
    if source is None:
        return [""]
    if Path(source).is_dir():
        prompts = [example.prompt for example in task.read(Path(source), "train")]
    else:
        prompts = [item.prompt for item in read_items(str(source), task) if item.error is None]
    if not prompts:
        raise TaskError(f"{source} holds no prompts")
    return list(dict.fromkeys(prompts))


def own_texts(
    job: GenerationJob, prompts: Sequence[Prompt], count: int, **run: Any
) -> tuple[list[Example], dict[str, int]]:
    """Let a model write ``count`` texts, sampled at full depth from its own distribution (temperature 1).

    Args:
        job: the model, its ``max_new_tokens``, batch size and seed; with an output file a killed run goes on there.
        prompts: if there are more than ``count``, evenly spaced ones are taken; if fewer, each has several texts.
        run: callbacks of :meth:`GenerationJob.run`.

    Returns:
        The texts that are worth learning from, and how many were left out as ``empty`` and ``looping``.
    """
    chosen = [example.prompt for example in subsample([Example(p, ()) for p in prompts], min(count, len(prompts)))]
    rows = [chosen[i % len(chosen)] for i in range(count)]
    options = dict(job.options) | {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    items = [Item(number, {"prompt": prompt}, prompt) for number, prompt in enumerate(rows, 1)]
    result = replace(job, input=items, full=True, options=options).run(**run)
    texts, dropped = [], {"empty": 0, "looping": 0}
    for index, row in enumerate(rows):
        text = result.completions[index].text if index in result.completions else ""
        fault = "empty" if not text.strip() else "looping" if loops(text) else None
        if fault is None:
            texts.append(Example(row, (text,)))
        else:
            dropped[fault] += 1
    return texts, dropped


def loops(text: str) -> bool:
    """Tell whether a text ends in the same characters again and again."""
    return any(
        text.endswith(text[-period:] * repeats)
        for period in range(1, len(text) // REPEATS + 1)
        for repeats in [max(REPEATS, -(-REPEATED // period))]
    )


def say_dropped(dropped: dict[str, int], say: Callable[[str], object]) -> None:
    """Tell the user how many texts were left out, if any."""
    if any(dropped.values()):
        say("left out of the own texts: " + ", ".join(f"{n:,} {what}" for what, n in dropped.items() if n))
