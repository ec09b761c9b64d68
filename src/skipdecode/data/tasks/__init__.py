"""Tasks: how to read data, make prompts, and score texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import DataError
from .base import Example, Task, subsample
from .datasets import CNN_DM, E2E, REDDIT_TLDR
from .jsonl import Jsonl

TASKS: dict[str, Task] = {task.name: task for task in (E2E, REDDIT_TLDR, CNN_DM, Jsonl())}

#: Options of the task jsonl.
OPTIONS = ("prompt_column", "response_column", "prompt_share")


def get_task(name: str, **options: Any) -> Task:
    """Return the task called ``name``.

    Args:
        name: ``jsonl`` for any data, or a data set with its own prompt format: ``e2e``, ``reddit_tldr``, ``cnn_dm``.
        options: fields of ``Jsonl`` that a user may set; None: not given.

    Raises:
        DataError: there is no such task, or it does not have an option.
    """
    if name not in TASKS:
        raise DataError(f"unknown task {name!r}; known are {', '.join(TASKS)}")
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        if name != "jsonl" or option not in OPTIONS:
            raise DataError(f"{option} goes with {'jsonl' if option in OPTIONS else 'no task'}, not with {name}")
    return replace(TASKS[name], **given)


def task_from(options: Mapping[str, Any]) -> Task:
    """Return the task that a command's or plan's options choose, with the task's own options. Raises DataError."""
    return get_task(options["task"], **{name: options[name] for name in OPTIONS})


__all__ = ["TASKS", "Example", "Task", "get_task", "subsample", "task_from"]
