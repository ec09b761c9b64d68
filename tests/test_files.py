"""Files of ours: whole or not at all, only over what is ours, one holder at a time."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skipdecode import files
from skipdecode.errors import FileError, UsageError

HOLD = """
import sys
from skipdecode.files import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()  # until it is killed
"""


@contextmanager
def another_process(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A second process that holds ``path``; killed at the end, if it was not before."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def names(folder: Path) -> list[str]:
    """What lies in ``folder``, hidden files too."""
    return sorted(path.name for path in folder.iterdir())


def test_what_killed_writes_left_behind_goes(tmp_path: Path) -> None:
    """Temporary files of an hour ago are nobody's; younger ones may be another process's. The longest name will do."""
    path = tmp_path / ("x" * 251 + ".txt")
    left = files._temporary(path)
    for name, age in ((left.name, 7200), (left.name.replace(".tmp", "1.tmp"), 60)):
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    files.write(path, "new")
    assert names(tmp_path) == sorted([left.name.replace(".tmp", "1.tmp"), path.name])


@pytest.mark.parametrize("function", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_bytes_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, error: BaseException
) -> None:
    """B10, F4: whatever fails, at whichever step, the file is as it was."""
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(type(error)):
        files.write(path, "new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_file_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B10: content first, then the name, then the folder: a power cut finds the old file or the whole new one."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "content")
        fsync(descriptor)

    def renamed(*paths: Path) -> None:
        calls.append("name")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    files.write(tmp_path / "file", "new")
    assert calls == ["content", "name", "folder"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """F4, for real: the system lets the process write no more than 4 kB to a file."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    code = (
        "import resource, sys; from skipdecode.files import write\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: write(sys.argv[1], 'x' * 100_000)\n"
        "except OSError as error: print(error.filename)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(path), "A4: the error of a write names no file by itself"
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_links_modes_and_special_files_stay_what_they_are(tmp_path: Path) -> None:
    """F15: a link's target is written, a mode is kept, a pipe is written to."""
    path, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    path.write_bytes(b"old")
    path.chmod(0o640)
    link.symlink_to(path)
    files.write(link, "new")
    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    files.write(pipe, "through")
    reader.join()
    assert got == [b"through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    files.write(os.devnull, "gone")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert names(tmp_path) == ["file", "link", "pipe"]


@pytest.mark.parametrize("where", ["pipe", "file"])
def test_standard_output_is_written_to_not_replaced(tmp_path: Path, where: str) -> None:
    """F15: ``/dev/stdout`` is a link to a pipe, or to a file that a shell has open: neither is renamed over."""
    code = (
        "from skipdecode.files import write; print('before', flush=True)\n"
        "write('/dev/stdout', 'text\\n'); print('after')"
    )
    target = tmp_path / "out"
    with target.open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE if where == "pipe" else file, check=True
        )
    said = done.stdout if where == "pipe" else target.read_bytes()
    assert said == b"before\ntext\nafter\n"


def test_what_is_not_ours_is_not_replaced(tmp_path: Path) -> None:
    """F15: recognised by content; the refusal names the file and leaves it."""
    path = tmp_path / "file"
    path.write_bytes(b"a diary")

    def may_replace(data: bytes) -> bool:
        return data.startswith(b"ours")

    for refused in (files.check_target, lambda path, may_replace: files.write(path, "new", may_replace=may_replace)):
        with pytest.raises(FileError, match=f"{path} is there and was not written by skipdecode"):
            refused(path, may_replace=may_replace)
    assert path.read_bytes() == b"a diary"
    path.write_bytes(b"ours, old")
    files.write(path, "ours, new", may_replace=may_replace)
    assert path.read_bytes() == b"ours, new"


def test_folders_are_named(tmp_path: Path) -> None:
    """A folder in the file's place, and a folder that is missing."""
    with pytest.raises(FileError, match="is a folder"):
        files.write(tmp_path, "x")
    with pytest.raises(FileError, match="there is no folder"):
        files.write(tmp_path / "no" / "file", "x")


def test_a_held_file_is_refused_with_its_holder(tmp_path: Path) -> None:
    """F5: another process and another thread are refused at once, with the number of the process that holds it."""
    path = tmp_path / "file"
    with another_process(path) as process:
        with pytest.raises(UsageError, match=rf"{path} is in use by process {process.pid} on .*wait for it"):
            files.locked(path).__enter__()
        # F5: a kill frees it at once, though the lock file is still there.
        process.send_signal(signal.SIGKILL)
        process.wait()
        refusals: list[str] = []

        def second() -> None:
            try:
                with files.locked(path):
                    refusals.append("")
            except UsageError as error:
                refusals.append(str(error))

        with files.locked(path, "the run"):
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()
        assert len(refusals) == 1
        assert f"process {os.getpid()} " in refusals[0]
    assert names(tmp_path) == []


def test_two_names_of_one_file_are_one_lock(tmp_path: Path) -> None:
    """F5: a link and its target."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to("file")
    with files.locked(tmp_path / "link"), pytest.raises(UsageError, match="in use"):
        files.locked(tmp_path / "file").__enter__()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 100_000, "nested too deep"),
        (b'{"a": 1', "is not JSON"),
        (b"", "is not JSON"),
        (b'"\xff"', "is not JSON"),
        (b"\x00\x00", "is not JSON"),
    ],
)
def test_json_that_cannot_be_read_names_its_file(tmp_path: Path, content: bytes, words: str) -> None:
    """G: deep nesting, cut files, other encodings."""
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(FileError, match=words) as refused:
        files.read_json(path)
    assert str(path) in str(refused.value)
    with pytest.raises(FileError, match="cannot be read"):
        files.read_json(tmp_path / "missing.json")


def test_json_is_read_in_every_unicode_encoding(tmp_path: Path) -> None:
    """With and without a byte-order mark."""
    path = tmp_path / "file.json"
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        path.write_bytes('{"é": 1}'.encode(encoding))
        assert files.read_json(path) == {"é": 1}
