"""What text tasks look like: how each is read, prompted and scored. One file per task."""

from __future__ import annotations

from .base import Example, Task, TaskError
from .cnn_dm import CnnDm
from .e2e import E2E
from .jsonl import Jsonl
from .reddit_tldr import RedditTldr

TASKS: dict[str, Task] = {task.name: task for task in (E2E(), RedditTldr(), CnnDm(), Jsonl())}


def get_task(name: str) -> Task:
    """The task called ``name``. Raises TaskError for a name that is none."""
    if name not in TASKS:
        raise TaskError(f"unknown task {name!r}; known are {', '.join(TASKS)}")
    return TASKS[name]


__all__ = ["TASKS", "Example", "Task", "TaskError", "get_task"]
