"""Read the examples to evaluate or calibrate on: a split of a task's data, or any file that ``generate`` reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..data.chat import Prompt
from ..data.inputs import read_items
from ..data.tasks import Example, Task


def read_examples(task: Task, source: Path, split: str, say: Callable[[str], object]) -> list[Example]:
    """Read the examples of a split, or all valid examples of a file; those with equal prompts in a file are merged.

    Args:
        task: how the data is read and prompted.
        source: folder with the task's files, hub name, or one file, in which prompts are enough.
        split: ``validation`` or ``test``; ignored for a file.
        say: called with a message about each bad line of a file.

    Raises:
        TaskError: the data cannot be read.
    """
    source = Path(source)
    if not source.is_file():
        return task.read(source, split)
    items = read_items(str(source), task)
    for item in items:
        if item.error:
            say(f"{source}, line {item.line}: {item.error}")
    references: dict[Prompt, list[str]] = {}
    for item in items:
        if not item.error:
            references.setdefault(item.prompt, []).extend(item.references)
    return [Example(prompt, tuple(texts)) for prompt, texts in references.items()]
