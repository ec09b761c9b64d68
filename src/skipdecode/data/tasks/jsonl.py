"""Any data with ``prompt`` and ``response``: a file, or a folder with train, validation and test files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .base import Example, Task, examples, find, read_split

FORM = {"prompt": "prompt", "response": "response"}
NAMES = {"train": ("train",), "validation": ("validation", "valid", "dev"), "test": ("test",)}


class Jsonl(Task):
    """Prompts as they stand."""

    name = "jsonl"
    columns = ("prompt",)
    reference = "response"
    forms = ({"prompt": "prompt", "response": "response"},)
    max_new_tokens = 128

    def prompt(self, row: Mapping[str, str]) -> str:
        """The prompt itself."""
        return row["prompt"]

    def read(self, folder: Path, split: str) -> list[Example]:
        """``folder`` may also be the training file alone; a missing validation split is empty."""
        if folder.is_file():
            path = folder
            if split != "train":
                return []
        else:
            files = [f"{name}{suffix}" for name in NAMES[split] for suffix in (".jsonl", ".csv")]
            if split != "train" and not any((folder / name).exists() for name in files):
                return []
            path = find(folder, files)
        rows = read_split(path.parent, split, [path.name], [FORM])
        return examples(((row["prompt"], row["response"]) for row in rows), split)
