"""The one place that writes files of ours: whole or not at all, only over what is ours, under a lock with a name."""

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
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from .errors import FileError, JobError

#: No write takes as long: a temporary file older than that is of a process that was killed.
HOUR = 3600


def write(path: str | Path, content: str | bytes, *, may_replace: Callable[[bytes], bool] | None = None) -> None:
    """Write all of ``content`` or none of it; it is on the disk when this returns.

    A temporary file beside ``path`` is filled, flushed to the disk and renamed over it. A symbolic link stays one: its
    target is written. Pipes and devices are written to as they are.

    Args:
        path: the file; its folder must be there.
        content: text is written as UTF-8.
        may_replace: tells from the bytes that are there now whether they may be replaced; None: anything may.

    Raises:
        FileError: ``path`` is a folder, its folder is missing, or what is there is not ours.
        OSError: the disk is full, read-only, or not the user's to write to. What was there is still there.
    """
    target = Path(os.path.realpath(path))
    data = content.encode("utf-8") if isinstance(content, str) else content
    check_target(path, may_replace=may_replace)
    with names_file(path):
        if is_stream(path):
            with _open_stream(path) as stream:
                stream.write(data)
        else:
            _replace(target, data)


@contextmanager
def names_file(path: str | Path) -> Iterator[None]:
    """Give an OSError of the block the file's name: those of a full disk, met in a write or a flush, have none."""
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
    """Return a short name of this thread's own beside ``target``, and delete those that killed processes left."""
    prefix = f".skipdecode-{zlib.crc32(target.name.encode(errors='surrogateescape')):08x}-"
    for left in target.parent.glob(f"{prefix}*.tmp"):
        with suppress(OSError):  # another process may have taken it away
            if left.stat().st_mtime < time.time() - HOUR:
                left.unlink()
    return target.with_name(f"{prefix}{os.getpid()}-{threading.get_native_id()}.tmp")


def check_target(path: str | Path, *, may_replace: Callable[[bytes], bool] | None = None) -> None:
    """Raises FileError for a path that :func:`write` would refuse: to be called before the work is done."""
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
    """Whether ``path`` is a pipe, a device or an open descriptor: written to as it is, with nothing to keep."""
    return _number(path) is not None or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


def _number(path: str | Path) -> int | None:
    """Return the descriptor that a name like ``/dev/stdout`` or ``/dev/fd/3`` stands for; None for other names."""
    named = re.fullmatch(r"/(?:dev|proc/self)/(?:(stdin|stdout|stderr)|fd/(\d+))", os.path.abspath(path))
    if named is None:
        return None
    return ("stdin", "stdout", "stderr").index(named[1]) if named[1] else int(named[2])


def _open_stream(path: str | Path) -> BinaryIO:
    number = _number(path)
    # Opened by its name, a descriptor's file would be cut to nothing.
    return open(path if number is None else os.dup(number), "wb")


def sync_folder(folder: Path) -> None:
    """Flush new and deleted names in ``folder`` to the disk, where the system can."""
    with suppress(OSError):  # Windows opens no folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def locked(path: str | Path, what: str | None = None, timeout: float = 0) -> Iterator[None]:
    """Lock ``path`` against other processes and threads; the lock goes with the process, however it ends.

    Args:
        path: the file; the lock lies beside it while it is held.
        what: its name in the message.
        timeout: seconds to wait for another process; -1 waits as long as it takes.

    Raises:
        JobError: another process (the message gives its number and command) holds it.
    """
    target = Path(os.path.realpath(path))
    note = target.with_name(f".{target.name}.skipdecode-lock")
    # Not shared between threads either: two jobs of one process on one output are two jobs.
    lock = FileLock(note, thread_local=False)
    try:
        lock.acquire(timeout=timeout)
    except Timeout:
        raise JobError(f"{what or path} is in use by {_owner(note)}: wait for it, or stop it first") from None
    try:
        with suppress(OSError):  # Windows lets nobody write to a locked file: it then has no name
            note.write_text(f"process {os.getpid()} on {socket.gethostname()} ({' '.join(sys.argv)[:200]})\n")
        yield
    finally:
        note.unlink(missing_ok=True)  # while it is held: whoever waits for this file sees that it is gone
        lock.release()


def _owner(note: Path, patience: float = 1.0) -> str:
    """Say who holds a lock, waiting for it to write so: it does just after it has taken it."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        with suppress(OSError):
            if owner := note.read_text(encoding="utf-8", errors="replace").strip():
                return owner
        time.sleep(0.01)
    return "another process"


def parse_json(text: str | bytes, what: str | Path) -> Any:
    """Parse JSON; ``what`` names it in the message.

    Raises:
        FileError: it is not JSON, not UTF-8, or nested so deep that it cannot be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise FileError(f"{what} is nested too deep to be read") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise FileError(f"{what} is not JSON: {error}") from None


def read_json(path: str | Path) -> Any:
    """Read a JSON file. Raises FileError, which names the file."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from None
    return parse_json(data.removeprefix(b"\xef\xbb\xbf"), path)
