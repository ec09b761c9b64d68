"""The generation job: no row lost, none repeated, bad ones reported, whatever kills it."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import accumulate, chain, product
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from skipdecode.data.inputs import Item, read_items
from skipdecode.generation.batch import generate_batch
from skipdecode.generation.engine import EngineConfig
from skipdecode.generation.journal import MAGIC, Journal
from transformers import LlamaConfig, LogitsProcessor

from helpers.profiles import made
from helpers.tiny import TEXTS, no_file_above, run, sentence_pieces
from skipdecode import Schedule, files
from skipdecode.data.chat import Message
from skipdecode.data.tasks import get_task
from skipdecode.errors import DataError, FileError, UsageError
from skipdecode.generation import generate as generation
from skipdecode.generation.job import GenerationJob, encode_items
from skipdecode.generation.stats import Completion, GenerationStats
from skipdecode.latency.profile import shape_of
from skipdecode.loading import load as loading
from skipdecode.loading.device import machine


def write_rows(path: Path, prompts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_output_keeps_the_inputs_order_and_says_what_it_cost(checkpoint: Path, tmp_path: Path) -> None:
    source, target = write_rows(tmp_path / "in.jsonl", TEXTS), tmp_path / "out.jsonl"
    options = ("--max-new-tokens", 9, "--batch-size", 4, "--speedup", 2, "--json")
    done = run("generate", checkpoint, "--input", source, "--output", target, *options)
    assert done.returncode == 0, done.stderr
    rows = read_rows(target)
    assert [row["prompt"] for row in rows] == TEXTS
    assert all(set(row) == {"prompt", "text", "tokens", "finish_reason"} for row in rows)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["rows"] == len(TEXTS)
    assert summary["tokens"] == sum(row["tokens"] for row in rows)
    assert 1 < summary["layer_ratio"] <= 8
    assert summary["peak_kv_bytes"] > 0
    assert not target.with_name("out.jsonl.partial").exists()


@pytest.mark.slow
def test_a_killed_job_goes_on_where_it_was(checkpoint: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle: the second run redoes no finished row and ends with the text of an unbroken run.

    F5: while the first runs, a second is refused, at once and with the first one's number, and disturbs nothing.
    F6: it samples: what is drawn is the same in every process.
    """
    prompts = [f"{text} {i}" for i in range(6) for text in TEXTS[:4]]
    source, target = write_rows(tmp_path / "in.jsonl", prompts), tmp_path / "out.jsonl"
    arguments = ["generate", checkpoint, "--input", source, "--max-new-tokens", 40, "--batch-size", 2]
    arguments += ["--do-sample", "--seed", 5]
    process = subprocess.Popen(
        [sys.executable, "-m", "skipdecode", *map(str, arguments), "--output", str(target)], stderr=subprocess.PIPE
    )
    partial = target.with_name("out.jsonl.partial")
    try:
        wait_for(lambda: partial.exists() and partial.read_bytes().count(b"\n") >= 4, process)
        process.send_signal(signal.SIGSTOP)  # so that it is in the middle for as long as this takes
        written = partial.read_bytes()
        for options in ([], ["--full", "--overwrite"]):
            second = run(*arguments, *options, "--output", target)
            assert second.returncode == 2
            assert f"{target} is in use by process {process.pid} " in second.stderr
            assert "Loading weights" not in second.stderr
        assert partial.read_bytes() == written
    finally:
        process.kill()
        process.communicate()
    assert not target.exists()
    kept = [json.loads(line[:-10]) for line in partial.read_bytes().splitlines(keepends=True)[1:4]]
    # What a kill in the middle of a write leaves behind.
    with partial.open("ab") as file:
        file.write(b'{"rows": {"0": {"te')
    done = run(*arguments, "--output", target)
    assert done.returncode == 0, done.stderr
    assert "rows were done before" in done.stderr
    rows = read_rows(target)
    assert [row["prompt"] for row in rows] == prompts
    for batch in kept:
        for index, row in batch["rows"].items():
            assert rows[int(index)]["text"] == row["text"]
    whole = tmp_path / "whole.jsonl"
    assert run(*arguments, "--output", whole).returncode == 0
    assert whole.read_bytes() == target.read_bytes()
    assert names(tmp_path) == ["in.jsonl", "out.jsonl", "whole.jsonl"]


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 500) -> None:
    """Until ``ready``; fails if the process ends before, or takes too long."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert process.poll() is None, "the job ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def names(folder: Path) -> list[str]:
    """What lies in ``folder``, hidden files too."""
    return sorted(path.name for path in folder.iterdir())


class Killed(BaseException):
    """Ends a job in this process where a kill would."""


class Breaker:
    """Counts the calls of what a job does to the disk, and kills it at the ``last`` one, before or after the call."""

    def __init__(self, patch: pytest.MonkeyPatch, last: int, after: bool) -> None:
        self.calls, self.last, self.after = 0, last, after
        for where, name in ((os, "fsync"), (os, "replace"), (Path, "unlink"), (os, "truncate")):
            patch.setattr(where, name, self.around(getattr(where, name)))

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.last and not self.after:
                raise Killed
            value = function(*arguments, **options)
            if self.calls == self.last:
                raise Killed
            return value

        return called


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_between_any_two_writes_loses_and_repeats_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """G, B5: the same command just goes on, and only the batch under way is computed again.

    With ``--overwrite`` the old output stays until the new one is whole.
    """
    source, whole = write_rows(tmp_path / "in.jsonl", TEXTS[:4]), tmp_path / "whole.jsonl"
    common = ["generate", checkpoint, "--input", source, "--max-new-tokens", 2, "--batch-size", 2, "--json"]
    computed: list[int] = []
    batch = generate_batch

    def counted(model: Any, tokenizer: Any, prompts: Any, *arguments: Any, **options: Any) -> Any:
        computed.append(len(prompts))
        return batch(model, tokenizer, prompts, *arguments, **options)

    network = loading.load(str(checkpoint))
    monkeypatch.setattr(loading, "load", lambda *_, **__: network)
    monkeypatch.setattr(generation, "generate_batch", counted)
    assert run(*common, "--output", whole).returncode == 0
    summary: dict[str, Any] = {}
    target, moments = tmp_path / "out" / "out.jsonl", 0
    target.parent.mkdir()
    for last, after in product(range(1, 100), (False, True)):
        if overwrite:
            target.write_bytes(b"old")
        computed.clear()
        command = [*common, "--output", target, *(["--overwrite"] if overwrite else [])]
        with pytest.MonkeyPatch.context() as patch:
            breaker = Breaker(patch, last, after)
            with suppress(Killed):
                done = run(*command)
        gc.collect()  # a process that is killed holds no lock
        if breaker.calls < last:
            assert done.returncode == 0, done.stderr
            break
        moments += 1
        assert not target.exists() or target.read_bytes() in (b"old", whole.read_bytes())
        assert target.exists() or not overwrite
        anew = overwrite and computed == [2, 2] and not target.with_name("out.jsonl.partial").exists()
        done = run(*command)
        assert done.returncode == 0 or (not overwrite and "already there" in done.stderr), done.stderr
        assert target.read_bytes() == whole.read_bytes()
        assert names(target.parent) == ["out.jsonl"]
        if done.returncode == 0:
            summary = json.loads(done.stdout.splitlines()[-1])
            assert (summary["rows"], summary["bad_rows"]) == (4, 0)
        # Killed when the journal was gone already, --overwrite means the whole job anew.
        assert computed in ([[2] * 4] if anew else [[2, 2], [2, 2, 2]])
        target.unlink()
    assert moments > 10


def test_overwrite_can_be_killed_and_goes_on(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B5: the finished batches of the same command are kept; those of another command are dropped only when asked."""
    source, target = write_rows(tmp_path / "in.jsonl", TEXTS[:4]), tmp_path / "out.jsonl"
    target.write_text("old")
    common = ["generate", checkpoint, "--input", source, "--output", target, "--max-new-tokens", 3, "--batch-size", 2]
    add = Journal.add

    def add_one(self: Journal, *batch: Any) -> None:
        if self.rows:
            raise Killed
        add(self, *batch)

    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        patch.setattr(Journal, "add", add_one)
        run(*common, "--overwrite")
    assert target.read_text() == "old"
    other = run(*common, "--seed", 1)
    assert other.returncode == 2
    assert "another input, model or options" in other.stderr
    same = run(*common)
    assert same.returncode == 2
    assert "already there" in same.stderr
    done = run(*common, "--overwrite")
    assert done.returncode == 0
    assert "2 rows were done before" in done.stderr
    assert len(read_rows(target)) == 4


def test_what_a_job_is(checkpoint: Path, tmp_path: Path) -> None:
    """F7: an output in the model's folder, another name of it, a note beside the weights: still the same job.

    Other weights are another job.
    """
    model = tmp_path / "m"
    shutil.copytree(checkpoint, model)
    source, target = write_rows(tmp_path / "in.jsonl", TEXTS[:4]), model / "texts.jsonl"
    options = ["--input", source, "--output", target, "--max-new-tokens", 3, "--batch-size", 2]
    add = Journal.add

    def begin(name: object) -> None:
        def add_one(self: Journal, *batch: Any) -> None:
            if self.rows:
                raise Killed
            add(self, *batch)

        with pytest.MonkeyPatch.context() as patch, suppress(Killed):
            patch.setattr(Journal, "add", add_one)
            run("generate", name, *options)

    (tmp_path / "link").symlink_to("m")
    for first, again in ((model, model), (model, f"{tmp_path}/./m/"), (tmp_path / "link", model)):
        begin(first)
        (model / "notes.txt").write_text(f"{again}")
        done = run("generate", again, *options)
        assert done.returncode == 0, done.stderr
        assert "2 rows were done before" in done.stderr
        target.unlink()
    begin(model)
    os.utime(model / "model.safetensors", (1, 1))
    done = run("generate", model, *options)
    assert done.returncode == 2
    assert "another input, model or options" in done.stderr


@pytest.mark.parametrize("content", [b"my diary\n", b'{"job": "x"}\n', b"\x00" * 99])
def test_a_file_that_is_no_journal_is_left_alone(checkpoint: Path, tmp_path: Path, content: bytes) -> None:
    """F15: recognised by its content, also with ``--overwrite``."""
    source, target = write_rows(tmp_path / "in.jsonl", TEXTS[:2]), tmp_path / "out.jsonl"
    other = tmp_path / "out.jsonl.partial"
    other.write_bytes(content)
    (tmp_path / "out.jsonl.tmp").write_bytes(content)
    for options in ([], ["--overwrite"]):
        done = run("generate", checkpoint, "--input", source, "--output", target, "--max-new-tokens", 2, *options)
        assert done.returncode == 2
        assert f"{other} is not a journal of skipdecode" in done.stderr
    assert other.read_bytes() == content
    assert names(tmp_path) == ["in.jsonl", "out.jsonl.partial", "out.jsonl.tmp"]


@pytest.mark.parametrize("name", ["o", "o.partial", "link"])
def test_the_input_is_never_written_over(checkpoint: Path, tmp_path: Path, name: str) -> None:
    """F15: the output, its journal, and a link to either."""
    source, target = write_rows(tmp_path / name, TEXTS[:2]) if name != "link" else tmp_path / name, tmp_path / "o"
    if name == "link":
        write_rows(target, TEXTS[:2])
        source.symlink_to("o")
    before = source.read_bytes()
    done = run("generate", checkpoint, "--input", source, "--output", target, "--overwrite")
    assert done.returncode == 2
    assert "is the input" in done.stderr
    assert source.read_bytes() == before


def test_pipes_and_devices_are_written_to(checkpoint: Path, tmp_path: Path) -> None:
    """F15: no ``--overwrite`` is asked for, nothing is left beside them, and they stay what they are."""
    source, pipe = write_rows(tmp_path / "in.jsonl", TEXTS[:2]), tmp_path / "pipe"
    os.mkfifo(pipe)
    common = ["generate", checkpoint, "--input", source, "--max-new-tokens", 2]
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert run(*common, "--output", pipe, "--overwrite").returncode == 0
    reader.join(10)
    assert got[0].count(b"\n") == 2
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert run(*common, "--output", os.devnull).returncode == 0
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert names(tmp_path) == ["in.jsonl", "pipe"]


def test_a_link_stays_one(checkpoint: Path, tmp_path: Path) -> None:
    """F15: its target is written, and the journal is the target's."""
    source, link = write_rows(tmp_path / "in.jsonl", TEXTS[:2]), tmp_path / "link"
    link.symlink_to("there.jsonl")
    assert run("generate", checkpoint, "--input", source, "--output", link, "--max-new-tokens", 2).returncode == 0
    assert link.is_symlink()
    assert len(read_rows(tmp_path / "there.jsonl")) == 2
    assert names(tmp_path) == ["in.jsonl", "link", "there.jsonl"]


def test_a_journal_of_another_job_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    source, target = write_rows(tmp_path / "in.jsonl", TEXTS), tmp_path / "out.jsonl"
    with Journal(target, "another") as journal:
        journal.add([0], [Completion("x", 1, "stop")], GenerationStats(8))
    done = run("generate", checkpoint, "--input", source, "--output", target)
    assert done.returncode == 2
    assert "another input, model or options" in done.stderr


def test_a_job_without_a_finished_batch_leaves_and_stops_nothing(tmp_path: Path) -> None:
    Journal(tmp_path / "out.jsonl", "one").close()
    assert names(tmp_path) == []
    header = seal([b'{"skipdecode journal": 1, "job": "one"}'])
    (tmp_path / "out.jsonl.partial").write_bytes(header)
    with Journal(tmp_path / "out.jsonl", "other") as journal:
        assert journal.rows == {}


def seal(payloads: list[bytes]) -> bytes:
    """Lines as a journal has them: a checksum of all payloads so far at the end of each."""
    data, sofar = b"", 0
    for payload in payloads:
        sofar = zlib.crc32(payload, sofar)
        data += payload + b" %08x\n" % sofar
    return data


ROW = {"text": "x", "tokens": 1, "finish_reason": "stop"}
COST = asdict(GenerationStats(4))
GOOD = {"rows": {"1": ROW}, "cost": COST}


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"7",
        b"{}",
        b"{broken",
        json.dumps(GOOD | {"rows": []}).encode(),
        json.dumps(GOOD | {"rows": {"one": ROW}}).encode(),
        json.dumps(GOOD | {"rows": {"1": 7}}).encode(),
        json.dumps(GOOD | {"rows": {"1": ROW | {"more": 1}}}).encode(),
        json.dumps(GOOD | {"rows": {"1": {"text": "x"}}}).encode(),
        json.dumps(GOOD | {"rows": {"0": ROW}}).encode(),
        json.dumps({"rows": {"1": ROW}}).encode(),
        json.dumps(GOOD | {"cost": COST | {"more": 1}}).encode(),
    ],
)
def test_a_line_of_another_shape_is_cut_off_though_its_checksum_is_right(tmp_path: Path, line: bytes) -> None:
    """F14, G: what follows it is done again; the lines before are kept, and the file goes on from there."""
    head, first = b'{"skipdecode journal": 1, "job": "job"}', json.dumps(GOOD | {"rows": {"0": ROW}}).encode()
    path = tmp_path / "out.jsonl.partial"
    path.write_bytes(seal([head, first, line, json.dumps(GOOD | {"rows": {"2": ROW}}).encode()]))
    with Journal(tmp_path / "out.jsonl", "job") as journal:
        assert journal.rows == {0: Completion("x", 1, "stop")}
        assert len(journal.costs) == 1
        journal.add([1], [Completion("x", 1, "stop")], GenerationStats(4))
    assert path.read_bytes() == seal([head, first, json.dumps(GOOD).encode()])


@pytest.mark.slow
def test_a_cut_journal_loses_only_the_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F14: cut at every byte: what is read back is a prefix of the batches written, and it goes on from there."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thousands of them, and nobody pulls the plug
    target, path = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    rows = [Completion(f"text {i} é", i, "stop") for i in range(3)]

    def add(journal: Journal, i: int) -> None:
        journal.add([i], [rows[i]], GenerationStats(4, rows=1, tokens=i, steps=1, layer_steps=2))

    with Journal(target, "job") as journal:
        for i in range(3):
            add(journal, i)
    data = path.read_bytes()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        with Journal(target, "job") as again:
            n = len(again.rows)
            assert again.rows == dict(enumerate(rows[:n]))
            assert len(again.costs) == n == max(data[:cut].count(b"\n") - 1, 0)
            for i in range(n, 3):
                add(again, i)
        assert path.read_bytes() == data


def test_what_was_added_is_on_the_disk_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File and folder at the first batch, the file at others, the folder when the journal goes."""
    synced: list[bool] = []
    fsync = os.fsync

    def record(file: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(file).st_mode))
        fsync(file)

    monkeypatch.setattr(os, "fsync", record)
    rows, costs = (
        [Completion(f"é {i}", i, "stop") for i in range(3)],
        [GenerationStats(4, rows=1, tokens=i) for i in range(3)],
    )
    target, counts = tmp_path / "out.jsonl", []
    with Journal(target, "job") as journal:
        for i in range(3):
            journal.add([i], rows[i : i + 1], costs[i])
            counts.append((synced.count(False), synced.count(True)))
        assert (journal.rows, journal.costs) == (dict(enumerate(rows)), costs)
    assert counts == [(1, 1), (2, 1), (3, 1)]
    with Journal(target, "job") as again:
        assert (again.rows, again.costs) == (journal.rows, journal.costs)
    with pytest.raises(UsageError):
        Journal(target, "other")
    target.write_text("done")
    with Journal(target, "other", replace=True) as other:
        assert not other.rows
    with Journal(target, "job") as last:
        synced.clear()
        last.finish("done")
        assert synced == [True]
    (tmp_path / "out.jsonl.partial").write_bytes(MAGIC[:5])  # killed within its first line
    Journal(target, "other").close()


def test_a_full_disk_leaves_no_lock(tmp_path: Path) -> None:
    """What a file still holds is written when it is closed: if that fails, the same process can try again at once."""
    journal = Journal(tmp_path / "out.jsonl", "job")
    journal._file = cast(Any, mock.Mock(close=mock.Mock(side_effect=OSError(errno.ENOSPC, "full"))))
    with pytest.raises(OSError, match="full"):
        journal.close()
    Journal(tmp_path / "out.jsonl", "job").close()


class JournalMachine(RuleBasedStateMachine):
    """F5, F14: whatever happens to a journal, it holds a prefix of what was added, in order, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.output = self.folder / "out"
        self.path = self.folder / "out.partial"
        # What was added, and the file's lines after that: a line as it was written counts, if those before it do.
        self.batches: list[tuple[list[int], list[Completion], GenerationStats]] = []
        self.lines: list[bytes] = []
        self.journal: Journal | None = Journal(self.output, "job")
        self.held = 0

    def left(self) -> int:
        """How many batches of the closed journal no damage precedes."""
        content = self.path.read_bytes() if self.path.exists() else b""
        return max(sum(content.startswith(head) for head in accumulate(self.lines)) - 1, 0)

    def teardown(self) -> None:
        if self.journal:
            self.journal.close()
        shutil.rmtree(self.folder)

    @precondition(lambda self: self.journal is not None)
    @rule(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=3))
    def add(self, texts: list[str]) -> None:
        assert self.journal is not None
        first = len(self.journal.rows)
        batch = (
            [first + i for i in range(len(texts))],
            [Completion(t, len(t), "stop") for t in texts],
            GenerationStats(4, len(texts)),
        )
        self.journal.add(*batch)
        self.batches[self.held :] = [batch]
        self.held += 1
        self.lines = self.path.read_bytes().splitlines(keepends=True)
        assert len(self.lines) == 1 + self.held

    @precondition(lambda self: self.journal is not None)
    @rule()
    def close(self) -> None:
        assert self.journal is not None
        self.journal.close()
        self.journal = None

    @precondition(lambda self: self.journal is not None and self.held)
    @rule(data=st.data())
    def kill_while_the_last_batch_is_written(self, data: st.DataObject) -> None:
        self.close()
        kept, last = b"".join(self.lines[: self.held]), self.lines[self.held]
        self.path.write_bytes(kept + last[: data.draw(st.integers(0, len(last) - 1))])

    @precondition(lambda self: self.journal is None and self.path.exists() and self.path.stat().st_size)
    @rule(data=st.data())
    def damage_a_byte(self, data: st.DataObject) -> None:
        content = bytearray(self.path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        self.path.write_bytes(content)

    @precondition(lambda self: self.journal is None and self.path.exists())
    @rule(data=st.data())
    def double_a_line(self, data: st.DataObject) -> None:
        lines = self.path.read_bytes().splitlines(keepends=True)
        if lines and lines[-1].endswith(b"\n"):
            which = data.draw(st.integers(0, len(lines) - 1))
            self.path.write_bytes(b"".join([*lines[: which + 1], *lines[which:]]))

    @precondition(lambda self: self.journal is None)
    @rule()
    def reopen(self) -> None:
        self.held = self.left()
        try:
            self.journal = Journal(self.output, "job")
        except FileError:  # a byte of its very beginning was hit: no longer known as ours, and left alone
            assert not self.path.read_bytes().startswith(MAGIC)
            self.path.unlink()
            assert not self.held

    @precondition(lambda self: self.journal is not None)
    @rule()
    def a_second_one_is_refused(self) -> None:
        with pytest.raises(UsageError, match=f"in use by process {os.getpid()} "):
            Journal(self.output, "job")

    @precondition(lambda self: self.journal is None and self.left())
    @rule()
    def another_job_is_refused(self) -> None:
        # A damaged first line cannot tell whose the rest was.
        with pytest.raises(UsageError, match="another input, model or options"):
            Journal(self.output, "another job")

    @invariant()
    def holds_what_the_model_does(self) -> None:
        if self.journal is not None:
            held = self.batches[: self.held]
            assert self.journal.rows == dict(chain.from_iterable(zip(i, rows, strict=True) for i, rows, _ in held))
            assert self.journal.costs == [cost for _, _, cost in held]


TestJournal = JournalMachine.TestCase
TestJournal.settings = settings(max_examples=40, stateful_step_count=20)


def test_bad_rows_become_errors_with_their_line_number(checkpoint: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    long = " ".join(TEXTS * 9)
    lines = [
        b'{"prompt": "the cat"}',
        b'{"other": 1}',
        b"\xff\xfe",
        b"{broken",
        json.dumps({"prompt": long}).encode(),
        b"7",
        b'{"prompt": "  "}',
        rb'{"prompt": "\ud800"}',
        b'{"prompt": "the dog"}',
    ]
    source.write_bytes(b"\n".join([*lines, b""]))
    done = run("generate", checkpoint, "--input", source, "--output", target, "--max-new-tokens", 5, "--json")
    assert done.returncode == 0, done.stderr
    rows = read_rows(target)
    assert [("error" in row) for row in rows] == [False, *[True] * 7, False]
    for number, word in (
        (2, "no prompt"),
        (3, "not UTF-8"),
        (4, "not JSON"),
        (5, "too long"),
        (6, "object"),
        (7, "no"),
        (8, "not UTF-8"),
    ):
        assert f"line {number}: " in rows[number - 1]["error"]
        assert word in rows[number - 1]["error"]
        assert f"line {number}: " in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["bad_rows"] == 7


def test_csv_rows_keep_their_line_numbers_across_quoted_newlines(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_bytes(b'prompt,x\n"two\nlines",1\nbad \xff,2\nplain,3\n,4\n')
    items = read_items(str(source), get_task("jsonl"))
    assert [item.line for item in items] == [2, 4, 5, 6]
    assert [item.prompt for item in items] == ["two\nlines", "", "plain", ""]
    assert items[1].error == "not UTF-8"
    assert items[3].error == "no prompt"


def test_csv_rows_end_at_line_breaks_only(tmp_path: Path) -> None:
    """Not at the other characters that Python's splitlines takes for one; blank lines count but are no rows."""
    source = tmp_path / "in.csv"
    source.write_text("prompt\none\u2028two\x0bthree\n\nfour\n", encoding="utf-8")
    items = read_items(str(source), get_task("jsonl"))
    assert [(item.line, item.prompt) for item in items] == [(2, "one\u2028two\x0bthree"), (4, "four")]


def test_a_job_whose_every_row_is_bad_fails(checkpoint: Path, tmp_path: Path) -> None:
    """B11: exit code 1, with the errors in the output; brackets in a row are no markup; no weights are loaded."""
    source, target = tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_text('mr\n"bad [/x] worse"\n', encoding="utf-8")
    done = run("generate", checkpoint, "--task", "e2e", "--input", source, "--output", target)
    assert done.returncode == 1
    assert "[/x]" in done.stderr
    assert "Loading weights" not in done.stderr
    assert "line 2: not a meaning representation" in read_rows(target)[0]["error"]
    assert names(tmp_path) == ["in.csv", "out.jsonl"]
    source.write_text(json.dumps({"prompt": " ".join(TEXTS * 9)}))
    assert run("generate", checkpoint, "--format", "jsonl", "--input", source).returncode == 1


@pytest.mark.parametrize(
    "options", [["--do-sample", "--top-p", 0.9, "--seed", 3], ["--do-sample", "--num-beams", 2], ["--full"]]
)
def test_a_resumed_job_writes_what_an_unbroken_one_does(
    checkpoint: Path, tmp_path: Path, options: list[object]
) -> None:
    """Also when it samples: each batch has a seed of its own."""
    source, whole, cut = write_rows(tmp_path / "in.jsonl", TEXTS), tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    common = ["generate", checkpoint, "--input", source, "--max-new-tokens", 8, "--batch-size", 4, *options]
    add = Journal.add
    kept: list[object] = []

    def add_twice(self: Journal, *batch: Any) -> None:
        if len(kept) == 2:
            raise KeyboardInterrupt
        kept.append(batch)
        add(self, *batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "add", add_twice)
        assert run(*common, "--output", cut).returncode != 0
    assert run(*common, "--output", cut).returncode == 0
    assert run(*common, "--output", whole).returncode == 0
    assert cut.read_bytes() == whole.read_bytes()


def test_a_schedule_file_is_followed(checkpoint: Path, tmp_path: Path) -> None:
    from skipdecode import Schedule

    Schedule.from_depths(8, [5, 3, 2]).save(tmp_path / "plan.json")
    source = write_rows(tmp_path / "in.jsonl", TEXTS[:2])
    options = ("--schedule", tmp_path / "plan.json", "--max-new-tokens", 5, "--min-new-tokens", 5, "--json")
    done = run("generate", checkpoint, "--input", source, *options)
    assert json.loads(done.stdout.splitlines()[-1])["average_depth"] == 3


def test_e2e_inputs_repeat_but_are_generated_once(tmp_path: Path) -> None:
    source = tmp_path / "set.csv"
    rows = ["name[Aromi], food[English]", "name[Zizzi]", "name[Aromi], food[English]"]
    source.write_text("mr,ref\n" + "".join(f'"{mr}",text {i}\n' for i, mr in enumerate(rows)), encoding="utf-8")
    items = read_items(str(source), get_task("e2e"))
    assert [item.prompt for item in items] == ["name Aromi, food English ->", "name Zizzi ->"]
    assert items[0].references == ["text 0", "text 2"]


def test_standard_input_and_output(checkpoint: Path) -> None:
    """N7: an untrained model is named once."""
    done = run("generate", checkpoint, "--max-new-tokens", 4, stdin=b"the cat\nthe dog\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was not trained to skip layers") == 1
    assert [json.loads(line)["prompt"] for line in done.stdout.splitlines()] == ["the cat", "the dog"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "./nowhere", "--input", "IN"], "nowhere"),
        (["generate", "MODEL", "--input", "missing.jsonl"], "missing.jsonl cannot be read"),
        (["generate", "MODEL", "--input", "EMPTY"], "holds no rows"),
        (["generate", "MODEL", "--input", "IN", "--schedule", "PLAN"], "schedule is for 24 layers, the model has 8"),
        (["generate", "MODEL", "--input", "IN", "--speedup", "9"], "1 to the number of layers"),
        (["generate", "MODEL", "--input", "IN", "--speedup", "2", "--full"], "one of speedup, schedule and full"),
        (["generate", "MODEL", "--input", "IN", "--task", "nope"], "'nope'"),
        (["generate", "MODEL", "--input", "IN", "--output", "no/such/out.jsonl"], "no folder"),
        (["generate", "MODEL", "--input", "IN", "--output", "PLAN"], "already there"),
        (["generate", "MODEL", "--input", "IN", "--top-p", "0.5"], "need do_sample"),
        (["generate", "MODEL", "--input", "IN", "--batch-size", "0"], "batch-size"),
        (["check", "./nowhere"], "nowhere"),
        (["schedule"], "MODEL or --layers"),
        (["schedule", "--layers", "8", "--speedup", "0.5"], "speed-up"),
        (["train", "MODEL", "--data", "missing", "--output", "x"], "missing"),
        (["train", "--data", "missing"], "MODEL or --from-config"),
    ],
)
def test_what_the_user_can_put_right_is_one_line_and_exit_code_2(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "in.jsonl", TEXTS)
    (tmp_path / "empty.jsonl").write_text("")
    Schedule.for_speedup(2, 24, 16, decay="linear").save(tmp_path / "plan.json")
    given = {"MODEL": checkpoint, "IN": tmp_path / "in.jsonl", "EMPTY": tmp_path / "empty.jsonl"}
    given["PLAN"] = tmp_path / "plan.json"
    done = run(*[given.get(a, a) for a in arguments])
    message = done.stderr
    assert done.returncode == 2, message
    assert words in " ".join(message.split())
    assert "Traceback" not in message
    assert "Loading weights" not in done.stderr


def test_input_without_the_column_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("title\nhello\n")
    with pytest.raises(DataError, match="no column prompt or messages or text; it has title"):
        read_items(str(source), get_task("jsonl"))


# --- outputs


def test_an_output_that_appears_meanwhile_is_kept(checkpoint: Path, tmp_path: Path) -> None:
    """C22: without overwrite it is not replaced; what was written waits for the same command."""
    target = tmp_path / "out.jsonl"
    job = GenerationJob(str(checkpoint), TEXTS[:3], target, speedup=2, options={"max_new_tokens": 3})
    with pytest.raises(FileError, match="is already there"):
        job.run(on_batch=lambda cost: target.write_text("somebody else's"))
    assert target.read_text() == "somebody else's"
    target.unlink()
    told: list[tuple[int, int]] = []
    job.run(on_start=lambda *rows: told.append(rows))
    assert told == []
    assert len(read_rows(target)) == 3


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1"])
def test_a_job_may_write_to_a_stream(checkpoint: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    """C18: from Python too; there is no journal to keep, and no lock to hold."""
    result = GenerationJob(str(checkpoint), TEXTS[:3], name, speedup=2, options={"max_new_tokens": 3}).run()
    assert capfd.readouterr().out == result.jsonl


def test_a_full_disks_line_names_the_file(tmp_path: Path) -> None:
    """A4: the journal, and the output."""
    target = tmp_path / "out.jsonl"
    with Journal(target, "job") as journal:
        with no_file_above(10), pytest.raises(OSError, match=re.escape(str(target.with_name("out.jsonl.partial")))):
            journal.add([0], [Completion("x", 1, "stop")], GenerationStats(8))
        journal.add([0], [Completion("x", 1, "stop")], GenerationStats(8))
        with no_file_above(200), pytest.raises(OSError, match=re.escape(str(target)) + "'"):
            files.write(target, "x" * 300)
    assert names(tmp_path) == ["out.jsonl.partial"]


class Doubles(LogitsProcessor):
    """Does something; nobody can tell what."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return 2 * scores


def test_options_are_told_apart_by_what_they_hold(checkpoint: Path, tmp_path: Path) -> None:
    """C12: keys of every kind, tensors; what cannot be told apart is refused where a job must know itself again."""
    target = tmp_path / "out.jsonl"

    def job(output: Path | None = target, **options: Any) -> GenerationJob:
        return GenerationJob(str(checkpoint), TEXTS[:3], output, batch_size=1, options={"max_new_tokens": 3} | options)

    def begin(**options: Any) -> None:
        with suppress(Killed):
            job(**options).run(on_batch=kill)

    def kill(cost: GenerationStats) -> None:
        raise Killed

    begin(sequence_bias={(5,): -10.0}, eos_token_id=torch.tensor([3, 7]))
    with pytest.raises(UsageError, match="another input, model or options"):
        job(sequence_bias={(6,): -10.0}, eos_token_id=torch.tensor([3, 7])).run()
    told: list[tuple[int, int]] = []
    again = job(sequence_bias={(5,): -10.0}, eos_token_id=[3, 7])
    again.run(on_start=lambda *rows: told.append(rows))
    assert told == [(3, 1)]
    with pytest.raises(UsageError, match="a Doubles does not say what it does"):
        job(logits_processor=[Doubles()]).run()
    assert job(None, logits_processor=[Doubles()]).run().summary["rows"] == 3


# --- a job without a model: what it asks of its engine, and what it makes of the answers


class Echo:
    """An engine that writes the number of each prompt, two at a time, and keeps what it was asked for.

    Args:
        batches: after how many it is killed.
    """

    def __init__(self, name: str = "echo", batches: int = 99) -> None:
        self.name, self.batches = name, batches
        self.checked = 0
        self.asked: list[tuple[EngineConfig, Schedule | None, int]] = []

    def check(self, job: EngineConfig, config: Any, defaults: Any) -> None:
        self.checked += 1

    @contextmanager
    def open(self, job: EngineConfig, schedule: Schedule | None, positions: int) -> Iterator[Any]:
        self.asked.append((job, schedule, positions))
        yield self.write

    def write(self, prompts: Mapping[int, list[int]]) -> Iterator[Any]:
        for number, keys in enumerate(batched(prompts, 2)):
            if number == self.batches:
                raise Killed
            yield (
                [*keys],
                [Completion(f"{key}", 3, "stop") for key in keys],
                GenerationStats(8, rows=len(keys), tokens=3),
            )


def batched(keys: Iterable[int], size: int) -> Iterator[list[int]]:
    """So many keys at a time."""
    left = [*keys]
    return iter(lambda: [left.pop(0) for _ in left[:size]], [])


@pytest.fixture(scope="module")
def rope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model's folder without weights; its 16 positions are no limit."""
    folder = tmp_path_factory.mktemp("rope")
    tokenizer = sentence_pieces(bos=False)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    tokenizer.save_pretrained(folder)
    LlamaConfig(num_hidden_layers=8, max_position_embeddings=16, vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


NEW: dict[str, Any] = {"options": {"max_new_tokens": 4}}


def test_an_engine_gets_what_is_left_to_write(rope: Path, tmp_path: Path) -> None:
    """Once, and the room for it; the figures are those of all runs together."""
    prompts, target = ["a b c d e f", "a", "a b", "a b c"], tmp_path / "out.jsonl"
    first, second, starts = Echo(batches=1), Echo(), []
    with pytest.raises(Killed):
        GenerationJob(str(rope), prompts, target, engine=first, speedup=1, **NEW).run()
    said: list[str] = []
    job = GenerationJob(str(rope), prompts, target, engine=second, speedup=1, **NEW)
    result = job.run(on_start=lambda *counts: starts.append(counts), say=said.append)
    assert (first.checked, second.checked) == (1, 1)
    tokenizer = loading.load_tokenizer(str(rope))
    lengths = [len(ids) for ids in tokenizer(prompts)["input_ids"]]
    assert [(schedule, room) for _, schedule, room in first.asked] == [(None, max(lengths) + 4)]
    assert [(schedule, room) for _, schedule, room in second.asked] == [(None, max(lengths[2:]) + 4)]
    assert type(second.asked[0][0]) is EngineConfig
    assert starts == [(4, 2)]
    assert said == ["2 rows were done before"]
    assert result.texts == ["0", "1", "2", "3"]
    assert (result.summary["rows"], result.summary["tokens"], result.summary["target_speedup"]) == (4, 6, 1.0)


@pytest.mark.parametrize(
    "other",
    [{"engine": Echo("another")}, {"prepack": True}, {"quantization": "int8"}, {"full": True}, {"speedup": 4}],
    ids=lambda other: next(iter(other)),
)
def test_a_job_with_other_settings_is_another(rope: Path, tmp_path: Path, other: dict[str, Any]) -> None:
    """Whatever a text may depend on; so a killed one is not gone on with."""
    common: dict[str, Any] = {"speedup": 2, **NEW}
    with pytest.raises(Killed):
        GenerationJob(str(rope), ["a"] * 4, tmp_path / "out", engine=Echo(batches=1), **common).run()
    common |= {"speedup": None} if "full" in other else {}
    with pytest.raises(UsageError):
        GenerationJob(str(rope), ["a"] * 4, tmp_path / "out", **{"engine": Echo()} | common | other).run()
    assert GenerationJob(str(rope), ["a"] * 4, tmp_path / "out", engine=Echo(), speedup=2, **NEW).run().texts


def test_texts_beyond_the_trained_positions_are_said_to_be_poor(rope: Path) -> None:
    """From the first position too many, for the longest prompt; nothing is said of the unmodified model else."""
    length = len(loading.load_tokenizer(str(rope))("a b c")["input_ids"])
    for new, count in ((16 - length, 0), (17 - length, 1)):
        said: list[str] = []
        job = GenerationJob(str(rope), ["a", "a b c"], engine=Echo(), speedup=1, options={"max_new_tokens": new})
        job.run(say=said.append)
        assert ["16 positions" in each for each in said] == [True] * count


def test_bad_rows_beside_good_ones(rope: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Each with its line and its reason; with ``chat`` a text is what the user says, and a conversation stays one."""
    source = tmp_path / "in.jsonl"
    rows = [{"prompt": "hi"}, {"prompt": 7}, {"prompt": [{"role": "user", "content": "ho"}]}]
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = GenerationJob(str(rope), source, engine=Echo(), speedup=1, chat=True, **NEW).run()
    assert [item.prompt for item in result.items if not item.error] == [
        (Message("user", "hi"),),
        (Message("user", "ho"),),
    ]
    assert [item.line for item in result.items if item.error] == [2]
    assert result.summary["bad_rows"] == 1
    silent, nothing = loading.load_tokenizer(str(rope)), Item(1, {}, (Message("user", "hi"),))
    silent.chat_template, silent.bos_token, silent.eos_token = "{{ '' }}", None, None
    assert encode_items([nothing], silent, LlamaConfig(), 4) == {}
    assert nothing.error == "the prompt has no token"
    length = len(loading.load_tokenizer(str(checkpoint))("the cat")["input_ids"])
    for new, bad in ((96 - length, []), (97 - length, [2])):
        options = {"max_new_tokens": new}
        result = GenerationJob(str(checkpoint), ["a", "the cat"], engine=Echo(), speedup=1, options=options).run()
        assert [item.line for item in result.items if item.error] == bad
        assert result.jsonl.count("line 2: too long") == len(bad)


def test_a_profile_counts_only_where_there_is_work(rope: Path) -> None:
    """A text of one token has a step all the same; without any good row there is nothing to plan."""
    config = loading.read_config(str(rope))
    profile = replace(made((0,) * 8), shape=shape_of(config), machine=machine("cpu"), device="cpu")
    common: dict[str, Any] = {"engine": Echo(), "speedup": 1.5, "clock": "step", "profile": profile, "device": "cpu"}
    assert GenerationJob(str(rope), ["a"], **common, options={"max_new_tokens": 1}).run().texts == ["0"]
    assert GenerationJob(str(rope), [""], **common, options={"max_new_tokens": 8}).run().texts == []


ON_A_CLOCK = {"prompt_layers": None, "clock": "step"}


@pytest.mark.parametrize(
    "options", [{"schedule": Schedule.full(8)}, {"schedule": Schedule.full(8), **ON_A_CLOCK}, {"full": True}]
)
def test_prompts_layers_and_clocks_go_with_a_speedup(options: dict[str, Any]) -> None:
    """A schedule has its own."""
    with pytest.raises(UsageError, match="go with a speedup"):
        GenerationJob("demo", ["a"], **{"prompt_layers": 3} | options)


def test_a_name_that_is_no_file_is_no_input_to_be_written_over(tmp_path: Path) -> None:
    """Standard input, say."""
    (tmp_path / "out.jsonl").write_text("")
    assert GenerationJob("demo", "-", tmp_path / "out.jsonl", overwrite=True).input == "-"
