"""Files that are written whole or not at all, JSON, and records that survive a kill."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import FileError, UsageError


def write(path: str | Path, content: str | bytes) -> None:
    """Write all of ``content``, text as UTF-8, or none of it: a temporary file in the same folder is renamed.

    Raises FileError if ``path`` is no file, its folder is missing or cannot be written to, or the disk is full.
    """
    target = Path(os.path.realpath(path))  # a link stays a link
    if target.exists() and not target.is_file():
        raise FileError(f"{path} cannot be written: it is a folder or a device")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
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


class Records:
    """JSONL file that grows by a value a line, behind a line of settings. A line that a kill cut short is dropped.

    Attributes:
        values: those that earlier processes appended.

    Raises:
        UsageError, FileError: the file has other settings, or is damaged; ``overwrite`` drops its values instead.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], overwrite: bool = False) -> None:
        self.path = path
        data = path.read_bytes() if path.exists() else b""
        expected = json.loads(json.dumps(settings))
        try:
            lines = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
            other = sorted(name for name, value in expected.items() if lines and lines[0].get(name) != value)
        except (ValueError, AttributeError) as error:
            if not overwrite:
                raise FileError(f"{path} is damaged: give another --output, or --overwrite") from error
            other = list(expected)
        if other and not overwrite:
            raise UsageError(f"{path} was begun with another {other[0]}: give another --output, or --overwrite")
        self.values = [] if other else lines[1:]
        write(path, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in [expected, *self.values]))

    def append(self, value: Any) -> None:
        """Append a value, in one write."""
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")
