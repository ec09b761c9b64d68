"""Rows in: every row is read as it was written, or is an error with its number."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from contextlib import suppress
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skipdecode.data.examples import merge_references, read_examples, read_rows, split_references, subsample
from skipdecode.data.tasks import Example, get_task
from skipdecode.errors import DataError

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
JSONL = get_task("jsonl")


def rows(path: Path) -> list[dict[str, Any]]:
    return [dict(row) for _, row in read_rows(path)]


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that property tests write over again and again."""
    return tmp_path_factory.mktemp("rows")


# --- formats

VALUES = [
    {"prompt": "2020-01-01", "response": "NA", "id": "007"},
    {"prompt": "1e5", "response": "null", "id": "  x "},
    {"prompt": 'a "b", c\nd é', "response": "None", "id": "10:00"},
]


def test_every_format_gives_back_the_texts_that_were_written(tmp_path: Path) -> None:
    """Also texts that look like dates, numbers or missing values; compressed, with a byte order mark."""
    pytest.importorskip("datasets", reason="needs skipdecode[train]")
    from datasets import Dataset

    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, ["prompt", "response", "id"])
    writer.writeheader()
    writer.writerows(VALUES)
    lines = "".join(json.dumps(value, ensure_ascii=False) + "\n\n" for value in VALUES)
    for name, content in (("a.jsonl", lines), ("a.csv", "\ufeff" + table.getvalue())):
        (tmp_path / name).write_bytes(content.encode())
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
        assert rows(tmp_path / name) == rows(tmp_path / f"{name}.gz") == VALUES
    Dataset.from_list(VALUES).to_parquet(tmp_path / "a.parquet")
    assert rows(tmp_path / "a.parquet") == VALUES


def test_columns_of_any_type_become_values_of_json(tmp_path: Path) -> None:
    """Dates are text; a missing number is null, at whatever depth."""
    pytest.importorskip("datasets", reason="needs skipdecode[train]")
    from datasets import Dataset

    columns = {"day": datetime(2020, 1, 2, tzinfo=timezone.utc), "score": math.nan, "more": {"scores": [1.5, math.nan]}}
    Dataset.from_list([{"prompt": "a"} | columns]).to_parquet(tmp_path / "a.parquet")
    (row,) = rows(tmp_path / "a.parquet")
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert row["day"].startswith("2020-01-02")
    assert (row["score"], row["more"]) == (None, {"scores": [1.5, None]})
    for value, match in ((b"abc", "row 1: a column holds bytes"), (math.inf, "row 1: a column holds Infinity")):
        Dataset.from_list([{"prompt": "a", "more": value}]).to_parquet(tmp_path / "b.parquet")
        with pytest.raises(DataError, match=match):
            rows(tmp_path / "b.parquet")


def test_rows_may_differ_in_their_values(tmp_path: Path) -> None:
    """JSON has no columns: a text in one row, messages in another, other keys."""
    values = [{"prompt": "a", "meta": {"k": 1}}, {"prompt": [{"role": "user", "content": "b"}], "meta": {"j": "x"}}]
    assert rows(write(tmp_path / "a.jsonl", *values)) == values


def test_a_line_of_text_is_a_prompt(tmp_path: Path) -> None:
    """Whatever it begins with; a blank one is none, as in JSONL and CSV."""
    (tmp_path / "a.txt").write_bytes(b"[INST] hello\r\n\n \n{x}\n")
    assert [row["prompt"] for row in rows(tmp_path / "a.txt")] == ["[INST] hello", "{x}"]


@settings(max_examples=20)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1))
def test_csv_rows_come_back_as_they_were_written(folder: Path, pairs: list[tuple[str, str]]) -> None:
    """Whatever quotes, commas and line breaks are in them, and however long they are."""
    table = io.StringIO(newline="")
    csv.writer(table, quoting=csv.QUOTE_ALL).writerows([("prompt", "other"), *pairs, ("x" * 200_000, "y")])
    (folder / "in.csv").write_bytes(table.getvalue().encode())
    assert [(row["prompt"], row["other"]) for row in rows(folder / "in.csv")][:-1] == pairs


# --- bad rows

PACKED = gzip.compress(b'{"prompt": "a b c d e f g"}\n', mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.jsonl", '{"prompt": "a"}\n\n{oops\n', "row 3 is not JSON"),
        ("a.jsonl", '{"prompt": "a", "score": NaN}\n', "row 1 is not JSON: NaN is no finite number"),
        ("a.jsonl", '{"prompt": "a"}\n{"score": -1e400}\n', "row 2 is not JSON: -1e400 is no finite number"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": ' + "[" * 100_000, "row 2 is not JSON"),
        ("a.jsonl", '{"prompt": "a"}\n[1]\n', "row 2 is not a JSON object"),
        ("a.json", '[{"prompt": "a"}]\n', "row 1 is not a JSON object: one object a line"),
        ("a.csv", "prompt,id,prompt,,\na,1,b,,\n", "the header names 'prompt' twice"),
        ("a.csv", "prompt\na\nb, c\n", "row 2 has 2 fields, the header 1"),
        ("a.csv", 'prompt\n"a\nb\n', "unexpected end of data"),
        ("a.csv", 'prompt\n"a" b"\nc\n', "expected after"),
        ("a.txt", b"a\n\xff\n", "utf-8"),
        ("a.jsonl.gz", b"no gzip", "Not a gzipped file"),
        ("a.jsonl.gz", PACKED[:-12], "ended before"),
        ("a.jsonl.GZ", PACKED[:10] + b"\xff" * 9, "Error -3 while decompressing"),
        ("a.data", "x", "none of .jsonl, .json, .csv, .txt and .parquet"),
        ("a", "x", "none of"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_row(tmp_path: Path, name: str, content: Any, match: str) -> None:
    """No row is lost in silence, or read as something else."""
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=rf"{name}.*{match}"):
        rows(tmp_path / name)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nope\.jsonl: .*No such file"):
        rows(tmp_path / "nope.jsonl")
    with pytest.raises(DataError, match=r"holds no train split: expected a file such as train\.jsonl"):
        read_examples(tmp_path, JSONL, "train")


@pytest.mark.parametrize("name", ["train.jsonl", "train.csv", "train.txt.gz"])
@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_data_without_rows_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    """A file, and a folder, whose split is named."""
    if name == "train.csv":
        content = b"prompt,response\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    with pytest.raises(DataError, match=rf"{name} holds no rows$"):
        read_examples(path, JSONL, references=False)
    with pytest.raises(DataError, match=r"holds no rows of the train split$"):
        read_examples(tmp_path, JSONL, "train", references=False)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@settings(max_examples=60)
@given(
    data=st.binary(max_size=60)
    | st.text(st.sampled_from('prmtesonul,":{}[]\\\n\r \x00ud8é'), max_size=60).map(str.encode)
)
@example(data=b'{"prompt": "a", "response": "\\ud800"}')
def test_whatever_a_file_holds_reading_ends_in_rows_or_one_error(folder: Path, suffix: str, data: bytes) -> None:
    path = folder / f"any{suffix}"
    head = b"prompt,response\n" if suffix == ".csv" else b'{"prompt": "a", "response": "b"}\n'
    for content in (data, head + data):
        path.write_bytes(content)
        with suppress(DataError):
            read_examples(path, JSONL)


def test_a_row_that_does_not_fit_its_task_is_named(tmp_path: Path) -> None:
    """By its number; a row without a response is one where responses are needed."""
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "response": "b"}, {"question": "c"})
    with pytest.raises(DataError, match=r"a\.jsonl, row 2: no prompt: expected a column .* found question"):
        read_examples(path, JSONL)
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "response": " "})
    with pytest.raises(DataError, match=r"a\.jsonl, row 1: no response"):
        read_examples(path, JSONL)
    assert read_examples(path, JSONL, references=False) == [Example("a")]


# --- splits


def test_a_split_is_the_first_of_its_files(tmp_path: Path) -> None:
    """Of any format; a file stands for every split."""
    for name in ("valid.jsonl", "train.jsonl"):
        write(tmp_path / name, {"prompt": name, "response": "b", "finish_reason": "length"})
    assert read_examples(tmp_path, JSONL, "validation") == [Example("valid.jsonl", ("b",), cut=True)]
    (tmp_path / "validation.csv").write_text("prompt,response\na,b\n")
    assert read_examples(tmp_path, JSONL, "validation") == [Example("a", ("b",))]
    assert read_examples(tmp_path / "validation.csv", JSONL, "train") == [Example("a", ("b",))]


@pytest.mark.parametrize("name", ["train.txt", "train.TXT.GZ", "Train.JSONL", "train.json.gz", "train.Jsonl.GZ"])
def test_a_splits_file_may_have_any_suffix_in_any_case(tmp_path: Path, name: str) -> None:
    content = b"a" if ".txt" in name.lower() else b'{"prompt": "a"}'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.lower().endswith(".gz") else content)
    assert read_examples(tmp_path, JSONL, "train", references=False) == [Example("a")]
    assert rows(tmp_path / name) == [{"prompt": "a"}]


def test_hub_data_sets_are_read_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests have no network: ``load_dataset`` is replaced. A folder comes first, and a path is never looked up."""
    datasets = pytest.importorskip("datasets", reason="needs skipdecode[train]")
    calls: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> Any:
        calls.append((args, options))
        if args[0] == "a/script" and "revision" not in options:
            raise RuntimeError("Dataset scripts are no longer supported")
        return datasets.Dataset.from_list([{"article": "a", "highlights": "r\nr", "id": "1"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = get_task("cnn_dm")
    assert read_examples("abisee/cnn_dailymail", task, "validation") == [Example("a\n\nTL;DR:", ("r r",))]
    assert calls.pop() == (("abisee/cnn_dailymail", "3.0.0"), {"split": "validation"})
    assert read_examples("a/script", task, "test")
    assert calls[-1][1] == {"revision": "refs/convert/parquet", "data_dir": "3.0.0", "split": "test"}
    with pytest.raises(DataError, match="an/other, row 1: no text in column post or content"):
        read_examples("an/other", get_task("reddit_tldr"), "test")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    files = (f"data/test{suffix}" for suffix in (".jsonl", ".JSONL", ".csv.gz", ".txt"))
    for source in ("owner/name", "../name", "name", *files):
        with pytest.raises(DataError, match=r"holds no test split|No such file|is none of"):
            read_examples(source, task, "test")


# --- examples


def test_references_are_merged_by_prompt_and_split_again() -> None:
    """One example a prompt to score, one a reference to train on."""
    read = [Example("a", ("1",)), Example("b", ("2", "4"), cut=True), Example("a", ("3",))]
    merged = merge_references(read)
    assert merged == [Example("a", ("1", "3")), Example("b", ("2", "4"), cut=True)]
    assert split_references(merged) == [
        Example("a", ("1",)),
        Example("a", ("3",)),
        Example("b", ("2",), cut=True),
        Example("b", ("4",), cut=True),
    ]


@given(st.integers(0, 50), st.integers(1, 60))
def test_a_subsample_is_evenly_spaced(length: int, count: int) -> None:
    examples = [Example(str(i)) for i in range(length)]
    chosen = [int(str(one.prompt)) for one in subsample(examples, count)]
    assert len(chosen) == min(count, length)
    steps = {b - a for a, b in pairwise(chosen)}
    assert not steps or max(steps) - min(steps) <= 1
