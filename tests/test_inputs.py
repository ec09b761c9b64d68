"""Rows in: each is read, or reported with its line; none is lost without a word."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skipdecode.data.inputs import Item, read_items
from skipdecode.data.rows import FORMATS, read_rows
from skipdecode.data.tasks import TASKS, get_task
from skipdecode.data.tasks.datasets import DataSet
from skipdecode.errors import DataError

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that property tests write over again and again."""
    return tmp_path_factory.mktemp("inputs")


def read(folder: Path, content: bytes, name: str, task: str = "jsonl") -> list[Item]:
    """The items of a file of this content."""
    (folder / name).write_bytes(content)
    return read_items(str(folder / name), get_task(task))


@pytest.mark.parametrize("content", [b'[{"prompt": "x"}]', b'\xef\xbb\xbf [\n{"prompt": "x"}\n]', b"[]"])
@pytest.mark.parametrize("name", ["in.json", "in.jsonl"])
def test_a_json_array_is_refused(tmp_path: Path, content: bytes, name: str) -> None:
    """B11: it would be one error per line."""
    with pytest.raises(DataError, match="is a JSON array: one object per line"):
        read(tmp_path, content, name)


def test_lines_of_text_may_begin_with_a_bracket(tmp_path: Path) -> None:
    """Only JSON can be an array."""
    assert [item.prompt for item in read(tmp_path, b"[INST] hello\n[]\n", "in.txt")] == ["[INST] hello", "[]"]


FORMS = {name: [*task.versions] for name, task in TASKS.items() if isinstance(task, DataSet)}
FORMS["jsonl"] = [{"prompt": "prompt", response: "reference"} for response in ("response", "completion")]


@pytest.mark.parametrize("name", TASKS)
def test_every_form_of_a_task_can_be_generated_from(tmp_path: Path, name: str) -> None:
    """B12, N6: the columns that training and evaluation take, as JSONL and as CSV; the output repeats all of a row."""
    task = get_task(name)
    for form in FORMS[name]:
        row = {column: "name[Aromi], food[English]" if own == "mr" else f"some {own}" for column, own in form.items()}
        row["id"] = "17"
        table = io.StringIO()
        writer = csv.DictWriter(table, row)
        writer.writeheader()
        writer.writerow(row)
        for file, content in (("in.jsonl", json.dumps(row)), ("in.csv", table.getvalue())):
            (item,) = read(tmp_path, content.encode(), file, name)
            assert item.error is None
            assert item.prompt == task.example(row).prompt
            assert item.references == ["some reference"]
            assert item.columns == row


def test_a_csv_of_no_form_names_what_is_wanted_and_what_is_there(tmp_path: Path) -> None:
    """B12, H: both, so that it can be put right."""
    with pytest.raises(DataError, match=r"mr or meaning_representation.*has text, label"):
        read(tmp_path, b"text,label\nx,y\n", "in.csv", "e2e")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b'prompt\nthe cat\n"the dog\nthe mat\n', 3),
        (b'prompt\n"the "cat" sat"\nthe mat\n', 2),
        (b'prompt\n"the dog\nthe mat\n"the log\nthe cat\n', 2),
        (b'prompt\nthe cat\n"', 3),
    ],
)
def test_a_stray_quote_swallows_no_rows(tmp_path: Path, content: bytes, line: int) -> None:
    """F16: what is between two stray quotes, or after the last, is not one long prompt."""
    with pytest.raises(DataError, match=rf"in\.csv, line {line}: the row that begins here cannot be read: .*quote"):
        read(tmp_path, content, "in.csv")


def test_a_row_with_more_fields_than_the_header_is_bad(tmp_path: Path) -> None:
    """F16: an unquoted comma cuts the prompt; it is not generated from its first half."""
    items = read(tmp_path, b"prompt\nhello, world\nhello\n", "in.csv")
    assert [(item.line, item.error) for item in items] == [
        (2, "2 fields where the header has 1: quote text with commas"),
        (3, None),
    ]


def test_fields_may_be_of_any_length(tmp_path: Path) -> None:
    """B14: the csv library's own limit is 131,072 characters."""
    assert len(read(tmp_path, b"prompt\n" + b"x" * 1_000_000, "in.csv")[0].prompt) == 1_000_000


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1))
def test_csv_rows_come_back_as_they_were_written(folder: Path, rows: list[tuple[str, str]]) -> None:
    """F16: whatever quotes, commas and line breaks are in them."""
    table = io.StringIO(newline="")
    writer = csv.writer(table, quoting=csv.QUOTE_ALL)
    writer.writerows([("prompt", "other"), *rows])
    items = read(folder, table.getvalue().encode(), "in.csv")
    assert [item.columns["prompt"] for item in items] == [prompt for prompt, _ in rows]
    assert [item.error for item in items] == [None if prompt.strip() else "no prompt" for prompt, _ in rows]


@given(st.lists(st.binary(max_size=12).filter(lambda line: not {10, 13} & set(line))))
def test_any_bytes_are_a_row_or_an_error_per_line(folder: Path, lines: list[bytes]) -> None:
    """No input raises anything but DataError, and no line of JSONL or text goes missing."""
    for name, blank in (("in.jsonl", False), ("in.csv", False), ("in.txt", True)):
        try:
            items = read(folder, b"\n".join(lines), name)
        except DataError:
            continue
        assert [item.line for item in items] == sorted({item.line for item in items})
        if blank:
            assert len(items) == len((b"\n".join(lines)).splitlines())
        assert all(bool(item.error) != bool(item.prompt) for item in items)
        json.dumps([item.columns for item in items], ensure_ascii=False).encode()


@settings(max_examples=300)
@given(
    data=st.binary(max_size=60)
    | st.text(st.sampled_from('prompt,":{}[]\\\n\r \x00ud8é\u2028\x0b'), max_size=60).map(str.encode),
    format=st.sampled_from([None, *FORMATS]),
)
@example(data=b"\xef\xbb\xbf\xef\xbb\xbf{}", format="jsonl")
@example(data=b"a\rb\r\nc\n\rd", format="text")
@example(data=b'a\n"\r\n\r"\n\xff', format="csv")
def test_reading_is_a_row_per_line_or_one_refusal(data: bytes, format: str | None) -> None:
    """Strictly it is the same rows, as long as none has an error; the first one ends it, as DataError."""
    try:
        rows, refused = list(read_rows(data, format)), False
    except DataError:
        rows, refused = [], True
    lines = [line for line, _, _ in rows]
    assert lines == sorted(set(lines))
    assert len(lines) <= len(data.splitlines())
    assert json.dumps([row for _, row, _ in rows], ensure_ascii=False).encode()
    if refused or any(error for _, _, error in rows):
        with pytest.raises(DataError):
            list(read_rows(data, format, strict=True))
    else:
        assert list(read_rows(data, format, strict=True)) == rows


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("format", [None, *FORMATS])
def test_other_encodings_are_named(encoding: str, format: str | None) -> None:
    """Their lines would be read as text with zeros in between."""
    data = "\ufeffhi\r\nyou".encode(encoding)
    with pytest.raises(DataError, match="UTF-16"):
        list(read_rows(data, format))


@pytest.mark.parametrize("header", [b"prompt,id", b"id\tprompt\r", b'\xef\xbb\xbf"id","prompt"'])
def test_a_csv_without_a_name_is_no_text(header: bytes) -> None:
    """Its header would be the first prompt; said to be text, it is."""
    with pytest.raises(DataError, match="--format csv"):
        list(read_rows(header + b"\na,b"))
    assert len(list(read_rows(header + b"\na,b", "text"))) == 2
    assert len(list(read_rows(b"a prompt, and more\nb"))) == 2


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv", "in.txt"])
def test_a_file_is_read_as_its_content_is(tmp_path: Path, name: str) -> None:
    """Rows of a path are taken from the disk one by one."""
    data = b'prompt\nthe "cat"\n\xff\n'
    (tmp_path / name).write_bytes(data)
    rows = list(read_rows(tmp_path / name))
    assert rows == list(read_rows(data, {".jsonl": "jsonl", ".csv": "csv", ".txt": "text"}[name[2:]]))
    assert rows[-1][0] == 3
    assert rows[-1][2] == "not UTF-8"
    with pytest.raises(DataError, match=rf"{name}, line \d: "):
        list(read_rows(tmp_path / name, strict=True))
    with pytest.raises(DataError, match="gone cannot be read: No such file"):
        list(read_rows(tmp_path / "gone"))
    with pytest.raises(DataError, match="gone cannot be read: No such file"):
        list(read_rows(tmp_path / "gone", strict=True))
    with pytest.raises(DataError, match="format is jsonl, csv, text, not 'xml'"):
        list(read_rows(data, "xml"))


def test_a_row_that_is_nested_too_deep_is_bad(tmp_path: Path) -> None:
    """G: RecursionError."""
    for depth, error in ((90, "message 1 has no role"), (100_000, "nested too deep")):
        (item,) = read(tmp_path, b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}", "in.jsonl")
        assert str(item.error).startswith(error)


def test_a_csv_row_begins_at_its_own_line(tmp_path: Path) -> None:
    """Whatever line breaks are in it, or blank lines before it."""
    items = read(tmp_path, b'prompt\r\n"a\r\nb\rc\nd"\r\n\r\ne\r\n', "in.csv")
    assert [(item.line, item.prompt) for item in items] == [(2, "a\r\nb\rc\nd"), (7, "e")]


def test_a_csv_may_begin_with_a_row_without_a_prompt(tmp_path: Path) -> None:
    """Its header says that there are prompts; the row alone is bad."""
    assert [item.error for item in read(tmp_path, b"prompt,id\n,1\nthe cat sat,2\n", "in.csv")] == ["no prompt", None]
    header = b"content,summary\n"
    assert [item.error is None for item in read(tmp_path, header + b",x\na post,y\n", "in.csv", "reddit_tldr")] == [
        False,
        True,
    ]


def test_a_reference_that_is_no_text_makes_its_row_bad(tmp_path: Path) -> None:
    """G: `evaluate` ended in the tokenizer's TypeError; in JSONL a bad byte anywhere is the row's."""
    path = tmp_path / "in.csv"
    path.write_bytes(b"prompt,response\nthe cat,sat \xff\nthe dog,ran\n")
    items = read_items(str(path), get_task("jsonl"))
    assert [(item.error, item.references) for item in items] == [("not UTF-8", []), (None, ["ran"])]
    path = path.with_suffix(".jsonl")
    path.write_text('{"prompt": "the cat", "response": "sat \\ud800"}\n')
    assert [(item.error, item.references) for item in read_items(str(path), get_task("jsonl"))] == [
        ("not UTF-8: it escapes half a character (a lone surrogate)", [])
    ]


def test_jsonl_of_other_columns_is_refused_in_one_line(tmp_path: Path) -> None:
    """As a CSV is; where one row has a prompt, or cannot be read, the others are bad rows."""
    other, good = b'{"question": "a", "id": 1}\n', b'{"prompt": "b"}\n'
    with pytest.raises(DataError, match="no column prompt or messages or text; it has question, id"):
        read(tmp_path, other * 3, "in.jsonl")
    assert [item.error is None for item in read(tmp_path, other + good, "in.jsonl")] == [False, True]
    assert [item.error is None for item in read(tmp_path, other + b"{\n", "in.jsonl")] == [False, False]


def test_a_bad_row_keeps_its_columns(tmp_path: Path) -> None:
    """N6: so that it can be found again; what the output has of its own is not repeated, but for the prompt."""
    rows = b'{"prompt": " ", "id": 3}\n{"prompt": "the cat", "id": 4, "tokens": 9}\n{"text": "the dog", "id": 5}\n'
    items = read(tmp_path, rows, "in.jsonl")
    assert [item.columns for item in items] == [
        {"prompt": " ", "id": 3},
        {"prompt": "the cat", "id": 4},
        {"prompt": "the dog", "id": 5},
    ]
    assert [item.error is None for item in items] == [False, True, False]
