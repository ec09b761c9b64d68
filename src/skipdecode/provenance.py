"""What makes two jobs the same: the model's files, and everything else by its hash."""

from __future__ import annotations

import hashlib
import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

#: Files of a checkpoint that decide what it writes. Whatever else lies in its folder does not.
MATTERS = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "chat_template*",
)


def identity(model: str) -> list[Any]:
    """A hub name; for a folder its real path, and the sizes and times of the files that decide what it writes."""
    folder = Path(model)
    if not folder.is_dir():
        return [model]
    folder = folder.resolve()
    files = sorted(p for p in folder.iterdir() if p.is_file() and any(fnmatch(p.name, form) for form in MATTERS))
    return [str(folder), *((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files)]


def fingerprint(*parts: Any) -> str:
    """A hash of plain values, the same in every process."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
