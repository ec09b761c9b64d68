"""Identities of models and jobs: two runs with the same ones continue each other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from .errors import UsageError

#: Files of a checkpoint that decide what texts it generates.
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
    """Identify a model: a hub name, or a folder's real path with names, sizes and times of the files that matter."""
    folder = Path(model)
    if not folder.is_dir():
        return [model]
    folder = folder.resolve()
    files = sorted(p for p in folder.iterdir() if p.is_file() and any(fnmatch(p.name, form) for form in MATTERS))
    return [str(folder), *((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files)]


def fingerprint(*parts: Any) -> str:
    """Hash plain values, to the same 16 hex digits in every process.

    Raises:
        UsageError: a value is known by its address in memory alone, so no other process can recognise it.
    """
    text = json.dumps(_with_plain_keys(parts), sort_keys=True, default=_text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _with_plain_keys(value: Any) -> Any:
    if isinstance(value, Mapping):  # keys may be tuples, as those of sequence_bias are
        return {key if isinstance(key, (str, int)) else str(key): _with_plain_keys(x) for key, x in value.items()}
    return [_with_plain_keys(x) for x in value] if isinstance(value, (list, tuple)) else value


def _text(value: Any) -> str:
    text = str(value)
    if f"{id(value):x}" in text.lower():
        raise UsageError(
            f"{type(value).__name__} objects differ from run to run: what is written with one to a file"
            " could not be resumed"
        )
    return text
