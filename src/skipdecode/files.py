"""Files that are written whole or not at all, and JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .errors import FileError


def write(path: str | Path, content: str | bytes, **old: Any) -> None:
    """Write all of ``content``, text as UTF-8, or none of it: a temporary file in the same folder is renamed.

    Raises FileError if ``path`` is no file, its folder is missing or cannot be written to, or the disk is full.
    """
    check_target(path)
    target = Path(os.path.realpath(path))  # a link stays a link
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, target)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def check_target(path: str | Path, **old: Any) -> None:
    """Raise FileError if ``path`` is a folder or device, or in no folder; for a check before long work."""
    target = Path(path).absolute()
    if not target.parent.is_dir() or (target.exists() and not target.is_file()):
        raise FileError(f"{path} cannot be written: give a file in a folder that exists")


def read_json(path: str | Path) -> Any:
    """Value of a JSON file. Raises FileError, which names the file, if it cannot be read or is no JSON."""
    try:
        return json.loads(Path(path).read_text("utf-8-sig"))
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise FileError(f"{path} is not JSON: {error}") from error


# --- old names, until the other rooms have moved: they do nothing

from contextlib import contextmanager, nullcontext  # noqa: E402


@contextmanager
def locked(path: Any, what: Any = None, timeout: float = 0) -> Any:
    """Nothing."""
    yield


def names_file(path: Any) -> Any:
    """Nothing."""
    return nullcontext()


def sync_folder(folder: Any) -> None:
    """Nothing."""


def is_stream(path: Any) -> bool:
    """No."""
    return False


def has_key(key: str) -> Any:
    """A function that tells whether bytes are a JSON object with this key."""
    return lambda data: key in parse_json(data, "it")


def parse_json(text: str | bytes, what: Any) -> Any:
    """JSON."""
    return json.loads(text)
