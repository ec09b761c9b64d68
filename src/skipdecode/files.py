"""Files that are written whole or not at all, and JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .errors import FileError


def write(path: str | Path, content: str | bytes) -> None:
    """Write all of ``content``, text as UTF-8, or none of it: a temporary file in the same folder is renamed.

    Raises FileError if ``path`` is no file, its folder is missing or cannot be written to, or the disk is full.
    """
    target = Path(os.path.realpath(path))  # a link stays a link
    if target.exists() and not target.is_file():
        raise FileError(f"{path} cannot be written: it is a folder or a device")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, target)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: str | Path) -> Any:
    """Value of a JSON file. Raises FileError, which names the file, if it cannot be read or is no JSON."""
    try:
        return json.loads(Path(path).read_text("utf-8-sig"))
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise FileError(f"{path} is not JSON: {error}") from error
