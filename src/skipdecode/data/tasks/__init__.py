"""Text tasks: how each is read, prompted and scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import TaskError
from .base import Example, Task, subsample
from .datasets import CNN_DM, E2E, REDDIT_TLDR
from .jsonl import Jsonl

TASKS: dict[str, Task] = {task.name: task for task in (E2E, REDDIT_TLDR, CNN_DM, Jsonl())}

#: Options of tasks, and why others do not have them.
OPTIONS = {
    "max_source_words": "only summaries (reddit_tldr, cnn_dm) have a source to cut",
    "prompt_column": "its columns have fixed names, only those of jsonl can be chosen",
    "response_column": "its columns have fixed names, only those of jsonl can be chosen",
    "prompt_share": "only rows of jsonl can be plain text",
}


def get_task(name: str, **options: Any) -> Task:
    """The task called ``name``.

    Args:
        name: ``jsonl`` for any data, or a data set with a prompt format of its own: ``e2e``, ``reddit_tldr``,
            ``cnn_dm``.
        options: ``max_source_words`` (summaries: where their source is cut); ``prompt_column``, ``response_column``
            (jsonl: columns of other names) and ``prompt_share`` (jsonl: rows are plain text, of which this share of
            the words is the prompt). None: not given.

    Raises:
        TaskError: no such task, or an option that it does not have.
    """
    if name not in TASKS:
        raise TaskError(f"unknown task {name!r}; known are {', '.join(TASKS)}")
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        if option not in TASKS[name].options:
            raise TaskError(f"{option} does not go with {name}: {OPTIONS.get(option, 'no task has it')}")
    return replace(TASKS[name], **given)


def task_from(options: Mapping[str, Any]) -> Task:
    """The task that the options of a verb or a run name, with those of them that are a task's. Raises TaskError."""
    return get_task(options["task"], **{name: options[name] for name in OPTIONS})


__all__ = ["TASKS", "Example", "Task", "get_task", "subsample", "task_from"]
