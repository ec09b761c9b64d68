"""What text tasks look like: how each is read, prompted and scored. One file per task."""

from __future__ import annotations

from dataclasses import replace

from ...errors import TaskError
from .base import Example, Task, subsample
from .cnn_dm import CnnDm
from .e2e import E2E
from .jsonl import Jsonl
from .reddit_tldr import RedditTldr

TASKS: dict[str, Task] = {task.name: task for task in (E2E(), RedditTldr(), CnnDm(), Jsonl())}


def get_task(name: str, words: int | None = None) -> Task:
    """The task called ``name``; ``words``: where summaries cut their source. Raises TaskError."""
    if name not in TASKS:
        raise TaskError(f"unknown task {name!r}; known are {', '.join(TASKS)}")
    task = TASKS[name]
    if words is None:
        return task
    if not isinstance(task, (RedditTldr, CnnDm)):
        raise TaskError(f"only summaries have a source to cut after {words} words; {name} has none")
    return replace(task, words=words)


__all__ = ["TASKS", "Example", "Task", "get_task", "subsample"]
