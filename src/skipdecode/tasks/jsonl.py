"""Any data with ``prompt`` and ``response``: a file, or a folder with train, validation and test files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..errors import TaskError
from .base import Example, Task, examples, has_text, read_rows

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
        path = self._file(folder, split)
        if path is None:
            if split == "train":
                raise TaskError(f"{folder} holds no train.jsonl or train.csv")
            return []
        rows = list(read_rows(path))
        for number, row in enumerate(rows, 1):
            if not has_text(row, ("prompt", "response")):
                raise TaskError(f"{path}, row {number}: needs text under prompt and response")
        return examples(((row["prompt"], row["response"]) for row in rows), split)

    @staticmethod
    def _file(folder: Path, split: str) -> Path | None:
        if folder.is_file():
            return folder if split == "train" else None
        candidates = (folder / f"{name}{suffix}" for name in NAMES[split] for suffix in (".jsonl", ".csv"))
        return next((path for path in candidates if path.exists()), None)
