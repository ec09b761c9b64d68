"""Write files whole or not at all, replace only files of SkipDecode, lock outputs, and read JSON."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .errors import FileError, UsageError

#: Seconds; a temporary file older than this was left by a killed process.
HOUR = 3600


def write(path: str | Path, content: str | bytes, *, may_replace: Callable[[bytes], bool] | None = None) -> None:
    """Write all of ``content`` or none of it, and flush it to the disk.

    A temporary file in the same folder is written, flushed and renamed to ``path``. If ``path`` is a symbolic link, its
    target is replaced. Pipes and devices are written directly.

    Args:
        path: the file; its folder must exist.
        content: text is written as UTF-8.
        may_replace: returns whether a file with these bytes may be replaced; None: any file may.

    Raises:
        FileError: ``path`` is a folder, its folder is missing, or ``may_replace`` refuses the existing file.
        OSError: the disk is full, read-only, or not the user's to write to. The old file is unchanged.
    """
    target = Path(os.path.realpath(path))
    data = content.encode("utf-8") if isinstance(content, str) else content
    check_target(path, may_replace=may_replace)
    with names_file(path):
        if is_stream(path):
            number = _number(path)
            # Opening the descriptor's file by name would truncate it.
            with open(path if number is None else os.dup(number), "wb") as stream:
                stream.write(data)
        else:
            _replace(target, data)


@contextmanager
def names_file(path: str | Path) -> Iterator[None]:
    """Add the file's name to an OSError raised inside: errors of writes and flushes to a full disk have none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _replace(target: Path, data: bytes) -> None:
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666
    temporary = _temporary(target)
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(mode)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def _temporary(target: Path) -> Path:
    """Return a path beside ``target`` for this thread's temporary file; delete old ones that killed processes left."""
    prefix = f".skipdecode-{zlib.crc32(target.name.encode(errors='surrogateescape')):08x}-"
    for left in target.parent.glob(f"{prefix}*.tmp"):
        with suppress(OSError):  # another process may have deleted it
            if left.stat().st_mtime < time.time() - HOUR:
                left.unlink()
    return target.with_name(f"{prefix}{os.getpid()}-{threading.get_native_id()}.tmp")


def check_target(path: str | Path, *, may_replace: Callable[[bytes], bool] | None = None) -> None:
    """Raise FileError if :func:`write` with the same arguments would; call it before long work that ends in a file."""
    if is_stream(path):
        return
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise FileError(f"{path} is a folder: give a file")
    if not target.parent.is_dir():
        raise FileError(f"{path} cannot be written: there is no folder {target.parent}")
    if may_replace is not None and target.is_file() and not may_replace(target.read_bytes()):
        raise FileError(f"{path} is there and was not written by skipdecode: move it away, or give another name")


def is_stream(path: str | Path) -> bool:
    """Tell whether ``path`` is a pipe, a device or an open descriptor: written in place, without a rename."""
    return _number(path) is not None or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


def _number(path: str | Path) -> int | None:
    """Return the file descriptor that a path like ``/dev/stdout`` or ``/dev/fd/3`` names; None for other paths."""
    named = re.fullmatch(r"/(?:dev|proc/self)/(?:(stdin|stdout|stderr)|fd/(\d+))", os.path.abspath(path))
    if named is None:
        return None
    return ("stdin", "stdout", "stderr").index(named[1]) if named[1] else int(named[2])


def sync_folder(folder: Path) -> None:
    """Flush new and deleted file names in ``folder`` to the disk, if the system can."""
    with suppress(OSError):  # Windows cannot open folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def locked(path: str | Path, what: str | None = None, timeout: float = 0) -> Iterator[None]:
    """Lock ``path`` against other processes and threads; the system releases the lock when the process ends.

    Args:
        path: the file; a lock file is kept in its folder for as long as the lock.
        what: what the message of an error calls the file; None: its path.
        timeout: seconds to wait for another process; -1 waits without limit.

    Raises:
        UsageError: another process, whose number and command the message gives, has the lock.
    """
    target = Path(os.path.realpath(path))
    note = target.with_name(f".{target.name}.skipdecode-lock")
    # Two threads of one process may not work on one output either.
    lock, owner = FileLock(note, thread_local=False), ""
    try:
        lock.acquire(timeout=timeout)
    except Timeout:
        with suppress(OSError):  # the owner writes it just after locking
            owner = note.read_text(encoding="utf-8", errors="replace").strip()
        raise UsageError(f"{what or path} is in use by {owner or 'another process'}: wait for it, or stop it") from None
    try:
        with suppress(OSError):  # on Windows, nobody can write to a locked file
            note.write_text(f"process {os.getpid()} on {socket.gethostname()} ({' '.join(sys.argv)[:200]})\n")
        yield
    finally:
        note.unlink(missing_ok=True)  # before release: processes that wait then see that it is gone
        lock.release()


def has_key(key: str) -> Callable[[bytes], bool]:
    """Return a function that tells whether a file's bytes are a JSON object with this key (for ``may_replace``)."""

    def may_replace(data: bytes) -> bool:
        with suppress(FileError):
            values = parse_json(data, "it")
            return isinstance(values, dict) and key in values
        return False

    return may_replace


def parse_json(text: str | bytes, what: str | Path) -> Any:
    """Return the value of a JSON text. Raises FileError, naming ``what``, if it is no JSON, no UTF-8, or too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise FileError(f"{what} is nested too deep to be read") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise FileError(f"{what} is not JSON: {error}") from None


def read_json(path: str | Path) -> Any:
    """Return the value of a JSON file. Raises FileError, which names the file, if it cannot be read or is no JSON."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from None
    return parse_json(data.removeprefix(b"\xef\xbb\xbf"), path)
