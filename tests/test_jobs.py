"""The generation job: no row lost, none repeated, bad ones reported, whatever kills it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from skipdecode import jobs
from skipdecode.errors import InputError
from skipdecode.generation import Cost, Row
from skipdecode.inputs import read_items
from skipdecode.tasks import get_task
from tiny import TEXTS, run, save_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def write_rows(path, prompts):
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts), encoding="utf-8")
    return path


def read_rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_output_keeps_the_inputs_order_and_says_what_it_cost(checkpoint, tmp_path):
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


def test_a_killed_job_goes_on_where_it_was(checkpoint, tmp_path):
    """SIGKILL in the middle: the second run redoes no finished row and ends with the text of an unbroken run."""
    prompts = [f"{text} {i}" for i in range(12) for text in TEXTS[:4]]
    source, target = write_rows(tmp_path / "in.jsonl", prompts), tmp_path / "out.jsonl"
    arguments = ["generate", checkpoint, "--input", source, "--max-new-tokens", 40, "--batch-size", 2]
    process = subprocess.Popen(
        [sys.executable, "-m", "skipdecode.cli", *map(str, arguments), "--output", str(target)], stderr=subprocess.PIPE
    )
    partial = target.with_name("out.jsonl.partial")
    deadline = time.time() + 120
    while time.time() < deadline and (not partial.exists() or partial.read_bytes().count(b"\n") < 4):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not target.exists()
    kept = [json.loads(line) for line in partial.read_bytes().splitlines()[1:4]]
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


def test_a_journal_of_another_job_is_refused(checkpoint, tmp_path):
    source, target = write_rows(tmp_path / "in.jsonl", TEXTS), tmp_path / "out.jsonl"
    jobs.Journal(target, "another").add([0], [Row("x", 1, "stop")], Cost(8))
    done = run("generate", checkpoint, "--input", source, "--output", target)
    assert done.returncode == 2
    assert "another input, model or options" in done.stderr


def test_a_journal_without_a_finished_batch_stops_nobody(tmp_path):
    jobs.Journal(tmp_path / "out.jsonl", "one")
    assert jobs.Journal(tmp_path / "out.jsonl", "other").rows == {}


def test_journal_loses_only_the_torn_line(tmp_path):
    """Cut at every byte: what is read back is a prefix of the batches written, and appending goes on from there."""
    target = tmp_path / "out.jsonl"
    journal = jobs.Journal(target, "job")
    rows = [Row(f"text {i} é", i, "stop") for i in range(3)]
    for i, row in enumerate(rows):
        journal.add([i], [row], Cost(4, rows=1, tokens=i, steps=1, layer_steps=2))
    data = journal.path.read_bytes()
    for cut in range(0, len(data), 11):
        journal.path.write_bytes(data[:cut])
        again = jobs.Journal(target, "job")
        n = len(again.rows)
        assert again.rows == dict(enumerate(rows[:n]))
        assert len(again.costs) == n == max(data[:cut].count(b"\n") - 1, 0)
        for i in range(n, 3):
            again.add([i], [rows[i]], Cost(4, rows=1, tokens=i, steps=1, layer_steps=2))
        assert again.path.read_bytes() == data


def test_bad_rows_become_errors_with_their_line_number(checkpoint, tmp_path):
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


def test_csv_rows_keep_their_line_numbers_across_quoted_newlines(tmp_path):
    source = tmp_path / "in.csv"
    source.write_bytes(b'prompt,x\n"two\nlines",1\nbad \xff,2\nplain,3\n,4\n')
    items = read_items(str(source), get_task("jsonl"))
    assert [item.line for item in items] == [2, 4, 5, 6]
    assert [item.prompt for item in items] == ["two\nlines", "", "plain", ""]
    assert items[1].error == "not UTF-8"
    assert items[3].error == "no prompt"


def test_csv_rows_end_at_line_breaks_only(tmp_path):
    """Not at the other characters that Python's splitlines takes for one; blank lines count but are no rows."""
    source = tmp_path / "in.csv"
    source.write_text("prompt\none\u2028two\x0bthree\n\nfour\n", encoding="utf-8")
    items = read_items(str(source), get_task("jsonl"))
    assert [(item.line, item.prompt) for item in items] == [(2, "one\u2028two\x0bthree"), (4, "four")]


def test_brackets_in_a_bad_row_are_no_markup(checkpoint, tmp_path):
    (tmp_path / "in.csv").write_text('mr\n"bad [/x] worse"\n', encoding="utf-8")
    done = run("generate", checkpoint, "--task", "e2e", "--input", tmp_path / "in.csv")
    assert done.returncode == 0, done.stderr
    assert "[/x]" in done.stderr


@pytest.mark.parametrize("options", [["--do-sample", "--top-p", 0.9, "--seed", 3], ["--num-beams", 2], ["--full"]])
def test_a_resumed_job_writes_what_an_unbroken_one_does(checkpoint, tmp_path, options):
    """Also when it samples: each batch has a seed of its own."""
    source, whole, cut = write_rows(tmp_path / "in.jsonl", TEXTS), tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    common = ["generate", checkpoint, "--input", source, "--max-new-tokens", 8, "--batch-size", 4, *options]
    add, kept = jobs.Journal.add, []

    def add_twice(self, *batch):
        if len(kept) == 2:
            raise KeyboardInterrupt
        kept.append(batch)
        add(self, *batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs.Journal, "add", add_twice)
        assert run(*common, "--output", cut).returncode != 0
    assert run(*common, "--output", cut).returncode == 0
    assert run(*common, "--output", whole).returncode == 0
    assert cut.read_bytes() == whole.read_bytes()


def test_a_schedule_file_is_followed(checkpoint, tmp_path):
    from skipdecode import Schedule

    Schedule.from_depths(8, [5, 3, 2]).save(tmp_path / "plan.json")
    source = write_rows(tmp_path / "in.jsonl", TEXTS[:2])
    options = ("--schedule", tmp_path / "plan.json", "--max-new-tokens", 5, "--min-new-tokens", 5, "--json")
    done = run("generate", checkpoint, "--input", source, *options)
    assert json.loads(done.stdout.splitlines()[-1])["average_depth"] == 3


def test_e2e_inputs_repeat_but_are_generated_once(tmp_path):
    source = tmp_path / "set.csv"
    rows = ["name[Aromi], food[English]", "name[Zizzi]", "name[Aromi], food[English]"]
    source.write_text("mr,ref\n" + "".join(f'"{mr}",text {i}\n' for i, mr in enumerate(rows)), encoding="utf-8")
    items = read_items(str(source), get_task("e2e"))
    assert [item.prompt for item in items] == ["name Aromi, food English ->", "name Zizzi ->"]
    assert items[0].references == ["text 0", "text 2"]


def test_standard_input_and_output(checkpoint):
    done = run("generate", checkpoint, "--max-new-tokens", 4, stdin=b"the cat\nthe dog\n")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["prompt"] for line in done.stdout.splitlines()] == ["the cat", "the dog"]
    assert "not trained for skipping" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "./nowhere", "--input", "IN"], "nowhere"),
        (["generate", "MODEL", "--input", "missing.jsonl"], "missing.jsonl cannot be read"),
        (["generate", "MODEL", "--input", "EMPTY"], "holds no rows"),
        (["generate", "MODEL", "--input", "IN", "--schedule", "PLAN"], "schedule is for 24 layers, the model has 8"),
        (["generate", "MODEL", "--input", "IN", "--speedup", "9"], "1 to the number of layers"),
        (["generate", "MODEL", "--input", "IN", "--speedup", "2", "--full"], "one of --speedup"),
        (["generate", "MODEL", "--input", "IN", "--task", "nope"], "unknown task"),
        (["generate", "MODEL", "--input", "IN", "--output", "no/such/out.jsonl"], "no folder"),
        (["generate", "MODEL", "--input", "IN", "--output", "IN"], "already there"),
        (["generate", "MODEL", "--input", "IN", "--top-p", "0.5"], "go with --do-sample"),
        (["generate", "MODEL", "--input", "IN", "--batch-size", "0"], "--batch-size"),
        (["check", "./nowhere"], "nowhere"),
        (["schedule"], "MODEL or --layers"),
        (["schedule", "--layers", "8", "--speedup", "0.5"], "speed-up"),
        (["train", "MODEL", "--data", "missing", "--output", "x"], "missing"),
        (["train", "--data", "missing"], "MODEL or --from-config"),
    ],
)
def test_what_the_user_can_put_right_is_one_line_and_exit_code_2(checkpoint, tmp_path, arguments, words):
    from skipdecode import Schedule

    write_rows(tmp_path / "in.jsonl", TEXTS)
    (tmp_path / "empty.jsonl").write_text("")
    Schedule.for_speedup(2, 24, 16).save(tmp_path / "plan.json")
    names = {"MODEL": checkpoint, "IN": tmp_path / "in.jsonl", "EMPTY": tmp_path / "empty.jsonl"}
    names["PLAN"] = tmp_path / "plan.json"
    done = run(*[names.get(a, a) for a in arguments])
    message = done.stderr
    assert done.returncode == 2, message
    assert words in " ".join(message.split())
    assert "Traceback" not in message
    assert "Loading weights" not in done.stderr


def test_input_without_the_column_is_refused(tmp_path):
    source = tmp_path / "in.csv"
    source.write_text("text\nhello\n")
    with pytest.raises(InputError, match="no column prompt"):
        read_items(str(source), get_task("jsonl"))
