"""Decide whether two jobs are the same, by the model's files and a hash of all settings."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from .errors import UsageError

#: Patterns of a checkpoint's files that affect the texts it generates.
MATTERS = (
    "config.json",
    "generation_config.json",
    "skipdecode_adapter.json",
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
    """Return [hub name], or [real path, (name, size, time) of the file, or of a folder's in :data:`MATTERS`]."""
    path = Path(model).resolve()
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.is_file() and any(fnmatch(p.name, each) for each in MATTERS))
    elif path.is_file():
        files = [path]
    else:
        return [model]
    return [str(path), *((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files)]


def fingerprint(*parts: Any) -> str:
    """Return a hash of the values' content that is the same in every process.

    Raise UsageError for an object, such as a function, that shows only its memory address.
    """
    return hashlib.sha256(json.dumps(_plain(parts), sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Return the value as types that JSON has. Raises UsageError if it shows only its memory address."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else json.dumps(_plain(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(each) for each in value), key=json.dumps)
    for method in ("tolist", "to_dict"):  # tensors and arrays; configs of transformers
        if callable(getattr(value, method, None)):
            return _plain(getattr(value, method)())
    text = str(value)
    if re.search(r" at 0x[0-9a-fA-F]+", text):
        raise UsageError(
            f"a {type(value).__name__} does not say what it does, so two of them cannot be told apart: a job that "
            "could be killed and resumed takes none, leave output out"
        )
    return text
