"""Files: whole or not at all, and JSON that is named when it cannot be read."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from skipdecode.errors import FileError, UsageError
from skipdecode.files import Records, read_json, write


def test_a_file_is_replaced_and_a_link_stays_a_link(tmp_path: Path) -> None:
    """Text is written as UTF-8, bytes as they are; nothing else is left in the folder."""
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"old")
    link.symlink_to(path)
    write(link, "né\n")
    assert path.read_bytes() == "né\n".encode()
    write(path, b"\xff")
    assert link.is_symlink()
    assert link.read_bytes() == b"\xff"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "link"]


def test_a_write_that_fails_leaves_the_old_bytes_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FileError, match="file cannot be written: No space left"):
        write(path, "new")
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("where", [".", "missing/file"])
def test_a_folder_or_a_file_in_no_folder_is_refused(tmp_path: Path, where: str) -> None:
    with pytest.raises(FileError, match="cannot be written"):
        write(tmp_path / where, "text")
    assert not list(tmp_path.iterdir())


def test_devices_are_not_replaced() -> None:
    with pytest.raises(FileError, match="cannot be written"):
        write(os.devnull, "text")
    assert not Path(os.devnull).is_file()


def test_a_file_name_that_is_not_utf8_can_be_written_down(tmp_path: Path) -> None:
    """As JSON writes half a character."""
    name = os.fsdecode(b"in\xff")
    write(tmp_path / "a", json.dumps(name, ensure_ascii=False))
    assert read_json(tmp_path / "a") == name
    for expected in ([], [name]):
        records = Records(tmp_path / "records", {"file": name})
        assert records.values == expected
        records.append(name)


def test_json_is_read_or_named(tmp_path: Path) -> None:
    """With a byte order mark too."""
    path = tmp_path / "values.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(path) == {"a": 1}
    for content in (b"", b"{", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(FileError, match=r"values\.json is not JSON"):
            read_json(path)
    with pytest.raises(FileError, match=r"none\.json cannot be read"):
        read_json(tmp_path / "none.json")


def test_records_survive_a_kill_anywhere(tmp_path: Path) -> None:
    """Whole lines are kept, in order; another appended value follows them."""
    path = tmp_path / "records"
    for value in (values := ["é", {"a": [1, None]}, 3.5]):
        Records(path, {"seed": 1}).append(value)
    data = path.read_bytes()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        kept = max(data[:cut].count(b"\n") - 1, 0)
        records = Records(path, {"seed": 1})
        assert records.values == values[:kept]
        records.append("more")
        assert Records(path, {"seed": 1}).values == [*values[:kept], "more"]


@pytest.mark.parametrize("content", ["garbage\n", "[1]\n", '{"seed": 1}\n{oops\n', '{"seed": 1}\n\n2\n', "\xff\n"])
def test_damaged_records_are_kept_unless_told(tmp_path: Path, content: str) -> None:
    path = tmp_path / "records"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(FileError, match=r"records is damaged: .*--overwrite"):
        Records(path, {"seed": 1})
    assert path.read_text(encoding="latin-1") == content
    assert Records(path, {"seed": 1}, overwrite=True).values == []
    assert Records(path, {"seed": 1}).values == []


def test_records_of_other_settings_are_kept_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "records"
    Records(path, {"seed": 1, "model": "a"}).append(1)
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"another model: .*--overwrite"):
        Records(path, {"seed": 1, "model": "b"})
    assert path.read_bytes() == before
    assert Records(path, {"seed": 1, "model": "b"}, overwrite=True).values == []
