"""Tasks: the scorer is the challenge's, prompts are reversible enough to check, wrong data is named."""

from __future__ import annotations

import csv
import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skipdecode.data.chat import Message
from skipdecode.data.inputs import read_items
from skipdecode.data.tasks import TASKS, Example, Task, get_task
from skipdecode.errors import DataError, MissingExtra

SHARED = Path(__file__).parents[2] / "shared" / "data"
DATA = SHARED / "e2e"
needs_e2e = pytest.mark.skipif(
    not DATA.exists(), reason="the E2E release is not beside the checkout (docs/training.md)"
)
needs_summaries = pytest.mark.skipif(
    not (SHARED / "reddit_tldr").exists() or not (SHARED / "cnn_dm").exists(),
    reason="no summarization data beside the checkout",
)


def prompt(task: str, row: dict[str, Any], **options: Any) -> str:
    """What the model is given for one row."""
    return str(get_task(task, **options).example(row).prompt)


@pytest.mark.slow
@needs_e2e
@pytest.mark.usefixtures("stemmed_once")
@pytest.mark.parametrize(("system", "bleu", "rouge_l"), [("tgen", 65.93, 68.10), ("slug", 66.19, 67.56)])
def test_scorer_gives_the_challenges_official_bleu(system: str, bleu: float, rouge_l: float) -> None:
    """ROUGE-L has no official figure to meet: the challenge's own scorer counts it otherwise. Ours is held fast."""
    task = get_task("e2e")
    with (DATA / "challenge_outputs" / f"{system}.tsv").open(encoding="utf-8") as file:
        outputs = {prompt("e2e", {"mr": row["MR"]}): row["output"] for row in csv.DictReader(file, delimiter="\t")}
    examples = task.read(DATA, "test")
    assert len(examples) == 630
    score = task.score([outputs[str(e.prompt)] for e in examples], [e.references for e in examples])
    assert score["bleu"] == pytest.approx(bleu, abs=0.005)
    assert score["rouge_l"] == pytest.approx(rouge_l, abs=0.005)


@needs_e2e
def test_e2e_splits_have_the_releases_size() -> None:
    """No row is lost, and each reference is counted."""
    task = get_task("e2e")
    assert len(task.read(DATA, "train")) == 42061
    assert sum(len(e.references) for e in task.read(DATA, "validation")) == 4672
    assert sum(len(e.references) for e in task.read(DATA, "test")) == 4693


@pytest.mark.parametrize("mr", ["hello", "name[Aromi", "name[Aromi] food", "Aromi]"])
def test_what_is_no_meaning_representation_is_named(mr: str) -> None:
    """It is never turned into half a prompt."""
    with pytest.raises(DataError, match="meaning representation"):
        prompt("e2e", {"mr": mr})


def test_e2e_prompt_keeps_every_attribute() -> None:
    """In their order, with their values."""
    mr = "name[The Rice Boat], priceRange[£20-25], customer rating[5 out of 5], familyFriendly[no]"
    expected = "name The Rice Boat, priceRange £20-25, customer rating 5 out of 5, familyFriendly no ->"
    assert prompt("e2e", {"mr": mr}) == expected


def test_jsonl_gathers_references_outside_training(tmp_path: Path) -> None:
    """One example per row to train on, one per prompt to score."""
    rows = [("a", "1"), ("b", "2"), ("a", "3")]
    for name in ("train", "valid"):
        lines = (json.dumps({"prompt": p, "response": r}) for p, r in rows)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    task = get_task("jsonl")
    assert [(e.prompt, e.references) for e in task.read(tmp_path, "train")] == [(p, (r,)) for p, r in rows]
    assert [(e.prompt, e.references) for e in task.read(tmp_path, "validation")] == [("a", ("1", "3")), ("b", ("2",))]


@pytest.mark.parametrize("line", ['{"prompt": "a"}', "[1]", '{"prompt": 1, "response": "x"}', "{"])
def test_training_data_must_be_whole(tmp_path: Path, line: str) -> None:
    """A row without text under both columns is an error, with its file."""
    (tmp_path / "train.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=r"train\.jsonl"):
        get_task("jsonl").read(tmp_path, "train")


def test_unknown_task_and_missing_files_are_named(tmp_path: Path) -> None:
    """The message says which, and what is known or looked for."""
    with pytest.raises(DataError, match="unknown task"):
        get_task("nope")
    with pytest.raises(DataError, match=r"trainset\.csv"):
        get_task("e2e").read(tmp_path, "train")
    with pytest.raises(DataError, match=r"train\.jsonl"):
        get_task("jsonl").read(tmp_path, "train")


@needs_summaries
def test_summaries_have_their_size_and_no_prompt_is_long() -> None:
    """No row is lost, and prompts are cut."""
    reddit, news = get_task("reddit_tldr"), get_task("cnn_dm")
    splits = {split: reddit.read(SHARED / "reddit_tldr", split) for split in ("train", "validation", "test")}
    assert {split: sum(len(e.references) for e in rows) for split, rows in splits.items()} == {
        "train": 6430,
        "validation": 390,
        "test": 372,
    }
    assert all(re.fullmatch(r"Post: .* TL;DR:", str(e.prompt)) for e in splits["train"])
    assert not any("\n" in f"{e.prompt}{e.references[0]}" for e in splits["train"])
    articles = news.read(SHARED / "cnn_dm", "validation")
    assert len(articles) == 300
    assert max(len(str(e.prompt).split()) for e in articles) == 401


def test_summarization_prompts_are_cut_in_words() -> None:
    """Line breaks become spaces; words of links are cut."""
    row = {"title": "Weird  crash", "post": "GPU\nis fried \n\nand so am I", "summary": "x"}
    assert prompt("reddit_tldr", row) == "Post: Weird crash. GPU is fried and so am I TL;DR:"
    assert prompt("cnn_dm", {"article": "(CNN)Share,  and"}) == "(CNN)Share, and\n\nTL;DR:"
    link = {"article": "see http://" + "long/" * 100}
    assert len(prompt("cnn_dm", link)) < 60  # a path of hundreds of tokens would take a model's positions
    assert len(prompt("reddit_tldr", row | {"post": "w " * 500}).split()) == 120 + 4
    assert len(prompt("cnn_dm", {"article": "w " * 500}).split()) == 400 + 1


def write(path: Path, *rows: Any) -> None:
    """Rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_splits_go_by_either_name_and_are_gathered_outside_training(tmp_path: Path) -> None:
    """The full name goes first."""
    rows = [{"title": "T", "post": "p", "summary": summary} for summary in ("one\ntwo", "three")]
    write(tmp_path / "train.jsonl", *rows)
    write(tmp_path / "valid.jsonl", *rows)
    task = get_task("reddit_tldr")
    assert [e.references for e in task.read(tmp_path, "train")] == [("one two",), ("three",)]
    assert [e.references for e in task.read(tmp_path, "validation")] == [("one two", "three")]
    write(tmp_path / "validation.jsonl", rows[0])
    assert [e.references for e in task.read(tmp_path, "validation")] == [("one two",)]


def test_the_first_300_articles_stand_in_for_the_validation_split(tmp_path: Path) -> None:
    """If the whole split is not there."""
    write(tmp_path / "validation.jsonl", {"article": "a", "highlights": "all"})
    write(tmp_path / "validation_300.jsonl", {"article": "a", "highlights": "some"})
    assert get_task("cnn_dm").read(tmp_path, "validation")[0].references == ("all",)
    (tmp_path / "validation.jsonl").unlink()
    assert get_task("cnn_dm").read(tmp_path, "validation")[0].references == ("some",)


@pytest.mark.parametrize(
    ("task", "good"),
    [("reddit_tldr", {"title": "T", "post": "p", "summary": "s"}), ("cnn_dm", {"article": "a", "highlights": "h"})],
)
def test_an_incomplete_row_is_named(tmp_path: Path, task: str, good: dict[str, str]) -> None:
    """By its file and line, whatever is wrong with it."""
    missing = [{k: v for k, v in good.items() if k != name} for name in good]
    empty: list[Any] = [{**good, name: value} for name in good for value in (" ", None, 1)]
    for bad in (*missing, *empty, [1]):
        write(tmp_path / "validation.jsonl", good, bad)
        with pytest.raises(
            DataError, match=r"validation\.jsonl, line 2: (no (title|post|summary|article|highlights)\b|not a)"
        ):
            get_task(task).read(tmp_path, "validation")
    with pytest.raises(DataError, match=r"train\.jsonl"):
        get_task(task).read(tmp_path, "train")


@pytest.mark.parametrize(
    ("task", "name", "row", "written"),
    [
        ("e2e", "tuetschek/e2e_nlg", {"meaning_representation": "name[A]", "human_reference": "r  r"}, "name A ->"),
        ("e2e", "GEM/e2e_nlg", {"meaning_representation": "name[A]", "target": "r r", "references": []}, "name A ->"),
        ("cnn_dm", "abisee/cnn_dailymail", {"article": "a", "highlights": "r\nr", "id": "1"}, "a\n\nTL;DR:"),
        ("reddit_tldr", "an/other", {"title": "T", "post": "p", "summary": "r r"}, "Post: T. p TL;DR:"),
        ("reddit_tldr", "webis/tldr-17", {"content": "p", "summary": "r r", "body": "p r r"}, "Post: p TL;DR:"),
    ],
)
def test_hub_data_sets_are_read_by_name(
    monkeypatch: pytest.MonkeyPatch, task: str, name: str, row: dict[str, Any], written: str
) -> None:
    """Tests have no network: ``load_dataset`` is replaced, and the columns are those the hub's cards give."""
    import datasets

    asked: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> datasets.Dataset:
        asked.append((args, kwargs))
        return datasets.Dataset.from_list([row])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    examples = get_task(task).read(Path(name), "validation")
    assert [(e.prompt, e.references) for e in examples] == [(written, ("r r",))]
    assert asked == [((name, "3.0.0" if task == "cnn_dm" else None), {"split": "validation"})]


def test_a_hub_data_set_with_a_script_is_read_from_its_parquet_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have no network: this raises what ``load_dataset`` raises for a repository with a loading script."""
    import datasets

    asked: list[str | None] = []

    def load_dataset(*_: Any, revision: str | None = None, data_dir: str | None = None, **__: Any) -> datasets.Dataset:
        if revision is None:
            raise RuntimeError("Dataset scripts are no longer supported, but found e2e_nlg.py")
        assert revision == "refs/convert/parquet"
        asked.append(data_dir)
        row = {"meaning_representation": "name[A]", "human_reference": "r", "article": "a", "highlights": "b"}
        return datasets.Dataset.from_list([row])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(get_task("e2e").read(Path("tuetschek/e2e_nlg"), "test")) == 1
    assert len(get_task("cnn_dm").read(Path("ccdv/cnn_dailymail"), "test")) == 1
    assert asked == [None, "3.0.0"]  # of several configurations the one that was asked for


def test_what_the_hub_does_not_give_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests have no network: ``load_dataset`` is replaced."""
    import datasets

    for error in (ConnectionError("no network"), ValueError('Unknown split "test"'), RuntimeError("script")):
        monkeypatch.setattr(datasets, "load_dataset", mock.Mock(side_effect=error))
        with pytest.raises(DataError, match=r"owner/name is no folder here.*test"):
            get_task("cnn_dm").read(Path("owner/name"), "test")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list([{"prompt": "x"}]))
    with pytest.raises(DataError, match=r"trl-lib/tldr \(test\), row 1: .* post and summary or content and summary"):
        get_task("reddit_tldr").read(Path("trl-lib/tldr"), "test")
    # A folder comes first, and a path that cannot be a name is never asked for.
    monkeypatch.setattr(datasets, "load_dataset", mock.Mock(side_effect=AssertionError))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    for folder in ("owner/name", "../name", "name", str(tmp_path / "none")):
        with pytest.raises(DataError, match=r"holds no test\.jsonl|there is no"):
            get_task("cnn_dm").read(Path(folder), "test")


# --- data of one's own

QA = {"question": "What sat?", "answer": "The cat.", "id": 7}
TALK = [{"role": "user", "content": "What sat?"}, {"role": "assistant", "content": "The cat."}]


def both_ways(folder: Path, task: Task, *rows: dict[str, Any]) -> list[tuple[Any, tuple[str, ...]]]:
    """Prompts and references of rows, which are the same in training and in a job."""
    write(folder / "test.jsonl", *rows)
    items = read_items(str(folder / "test.jsonl"), task)
    assert [item.error for item in items] == [None] * len(rows)
    read = [(item.prompt, tuple(item.references)) for item in items]
    assert [(e.prompt, e.references) for e in task.read(folder, "test")] == read
    write(folder / "train.jsonl", *rows)
    training = [(e.prompt, e.references) for e in task.read(folder, "train")]
    assert training == [(prompt, (text,)) for prompt, references in read for text in references]
    return read


@pytest.mark.parametrize(
    ("options", "row", "references"),
    [
        ({}, {"prompt": "What sat?", "response": "The cat."}, ("The cat.",)),
        ({}, {"prompt": "What sat?", "completion": " The cat."}, (" The cat.",)),
        ({}, {"prompt": "What sat?", "response": ["The cat.", "A cat.", ""]}, ("The cat.", "A cat.")),
        ({}, {"text": "What sat?", "response": "The cat."}, ("The cat.",)),
        ({}, {"prompt": "What sat?", "text": "other", "response": "The cat."}, ("The cat.",)),
        ({"prompt_column": "question", "response_column": "answer"}, QA, ("The cat.",)),
        ({"prompt_column": "question"}, {"question": "What sat?", "completion": "The cat."}, ("The cat.",)),
        ({"response_column": "answer"}, {"prompt": "What sat?", "answer": ["A", "B"]}, ("A", "B")),
        ({"prompt_column": "text", "response_column": "answer"}, {"text": "What sat?", "answer": "A"}, ("A",)),
    ],
)
def test_rows_of_many_forms_are_read(
    tmp_path: Path, options: dict[str, Any], row: dict[str, Any], references: tuple[str, ...]
) -> None:
    """H: TRL's columns, several references, and columns of one's own."""
    assert both_ways(tmp_path, get_task("jsonl", **options), row) == [("What sat?", references)]


def test_columns_of_ones_own_may_hold_messages(tmp_path: Path) -> None:
    """The column's name does not matter, what it holds does."""
    chat = (Message("user", "What sat?"),)
    task = get_task("jsonl", prompt_column="conversation")
    assert both_ways(tmp_path, task, {"conversation": TALK}) == [(chat, ("The cat.",))]
    task = get_task("jsonl", prompt_column="asked", response_column="answered")
    assert both_ways(tmp_path, task, {"asked": TALK[:1], "answered": TALK[1:]}) == [(chat, ("The cat.",))]


def test_a_csv_has_columns_of_ones_own(tmp_path: Path) -> None:
    """As JSONL has; messages do not fit in a cell."""
    (tmp_path / "train.csv").write_text("question,answer\nWhat sat?,The cat.\n", encoding="utf-8")
    task = get_task("jsonl", prompt_column="question", response_column="answer")
    assert task.read(tmp_path, "train") == [Example("What sat?", ("The cat.",))]
    (tmp_path / "train.csv").write_text(f'messages\n"{json.dumps(TALK).replace(chr(34), chr(34) * 2)}"\n')
    with pytest.raises(DataError, match=r"line 2: messages are a list .* not a string"):
        get_task("jsonl").read(tmp_path, "train")


@pytest.mark.parametrize(
    ("options", "row", "match"),
    [
        ({}, QA, r"no prompt: the columns are prompt or messages or text .* it has question, answer, id"),
        ({}, {"prompt": "x", "answer": "y"}, r"no response: .* response or completion .* it has prompt, answer"),
        ({}, {"prompt": "x", "response": None}, r"no response$"),
        ({}, {"prompt": "x", "completion": ["", " "]}, r"no completion$"),
        ({}, {"prompt": " ", "response": "y"}, r"no prompt$"),
        ({}, {"text": "", "id": 1}, r"no text$"),
        ({}, {"text": "What sat?", "response": ""}, r"no response$"),
        ({"prompt_column": "query"}, QA, r"no query: .*query for the prompt.* it has question, answer, id"),
        ({"prompt_column": "question"}, QA, r"no response: .* it has question, answer, id"),
        ({"response_column": "answer"}, {"text": "What sat?"}, r"no answer: .* it has text"),
        ({"response_column": "answer"}, {"messages": TALK}, "responses have a column of their own"),
        ({"prompt_share": 0.5}, {"prompt": "x", "response": "y"}, r"no text: .*prompt_share is for plain text"),
        ({"prompt_share": 0.5}, {"text": "x y", "response": "y"}, "prompt_share is for plain text"),
        ({"prompt_share": 0.5, "prompt_column": "a"}, {"a": TALK}, "prompt_share is for plain text, but the row has"),
        ({"prompt_share": 0.5}, {"text": "What"}, "a text of one word"),
        ({}, {"text": "What sat?"}, "a row of plain text: state with prompt_share"),
    ],
)
def test_a_row_that_does_not_fit_says_what_it_has(
    tmp_path: Path, options: dict[str, Any], row: dict[str, Any], match: str
) -> None:
    """H: the columns that were found are named, beside those that are looked for."""
    write(tmp_path / "train.jsonl", row)
    with pytest.raises(DataError, match=rf"train\.jsonl, line 1: .*{match}"):
        get_task("jsonl", **options).read(tmp_path, "train")


@pytest.mark.parametrize(
    ("name", "option", "match"),
    [
        ("e2e", {"prompt_column": "x"}, "prompt_column goes with jsonl, not with e2e"),
        ("cnn_dm", {"response_column": "x"}, "response_column goes with jsonl, not with cnn_dm"),
        ("reddit_tldr", {"prompt_share": 0.5}, "prompt_share goes with jsonl, not with reddit_tldr"),
        ("jsonl", {"prompt_share": 1}, "at least 0 and below 1, not 1"),
        ("jsonl", {"prompt_share": -0.1}, "at least 0 and below 1"),
        ("jsonl", {"prompt_share": float("nan")}, "at least 0 and below 1"),
        ("jsonl", {"prompt_share": 0.5, "response_column": "x"}, "give one of them"),
    ],
)
def test_an_option_that_does_not_fit_its_task_is_refused(name: str, option: dict[str, Any], match: str) -> None:
    """H: it would be ignored."""
    with pytest.raises(DataError, match=match):
        get_task(name, **option)


def test_options_make_a_task_and_leave_the_others_alone() -> None:
    """`TASKS` holds the defaults."""
    assert get_task("jsonl", prompt_share=0.5) != get_task("jsonl") == TASKS["jsonl"]
    assert prompt("jsonl", {"text": "the cat"}, prompt_share=0) == ""


@pytest.mark.parametrize(
    ("share", "begin", "rest"),
    [
        (0.5, "  The cat\n sat", "  on\ta mat. \n"),
        (0, "", "  The cat\n sat  on\ta mat. \n"),
        (0.01, "  The", " cat\n sat  on\ta mat. \n"),
        (0.99, "  The cat\n sat  on\ta", " mat. \n"),
    ],
)
def test_a_plain_text_is_cut_behind_a_word(tmp_path: Path, share: float, begin: str, rest: str) -> None:
    """H: a corpus of texts can be used; what share of a text is the prompt has to be stated."""
    text = "  The cat\n sat  on\ta mat. \n"
    task = get_task("jsonl", prompt_share=share)
    assert both_ways(tmp_path, task, {"text": text}) == [(begin, (rest,))]
    assert begin + rest == text
    (item,) = read_items(str(tmp_path / "test.jsonl"), task)
    assert item.columns == {"prompt": begin or text}  # the output's own `text` is what was generated


def test_lines_of_a_text_file_may_be_plain_text(tmp_path: Path) -> None:
    """They are whole prompts, unless a share is asked for; with one they can be trained on as well."""
    path = tmp_path / "corpus.txt"
    path.write_text("the cat sat on\nthe dog ran far\n", encoding="utf-8")
    assert [item.prompt for item in read_items(str(path), get_task("jsonl"))] == ["the cat sat on", "the dog ran far"]
    halves = get_task("jsonl", prompt_share=0.5)
    assert [item.prompt for item in read_items(str(path), halves)] == ["the cat", "the dog"]
    assert halves.read(path, "train") == [Example("the cat", (" sat on",)), Example("the dog", (" ran far",))]
    with pytest.raises(DataError, match="line 1: no response"):
        get_task("jsonl").read(path, "train")


DOCS = (Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("line", re.findall(r"^    (\{.*\})$", DOCS, re.MULTILINE))
def test_the_documentations_rows_are_read(tmp_path: Path, line: str) -> None:
    """Every example of docs/data.md: as it stands, or with the columns that stand beside it."""
    row = json.loads(line)
    options: dict[str, Any] = {"prompt_column": "question", "response_column": "answer"} if "question" in row else {}
    options |= {"prompt_share": 0.5} if "text" in row else {}
    assert both_ways(tmp_path, get_task("jsonl", **options), row)


def test_the_documentations_refusal_is_ours(tmp_path: Path) -> None:
    """Word for word."""
    write(tmp_path / "train.jsonl", {"question": "q", "answer": "a", "id": 1})
    with pytest.raises(DataError) as caught:
        get_task("jsonl").read(tmp_path, "train")
    assert str(caught.value).removeprefix(f"{tmp_path}/") in DOCS


# --- damaged data ends in one line, whatever the damage

GOOD = "prompt,response\na,b\nc,d\n"


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ('prompt,response\n"a,b\nc,d\n', r"train\.csv, line 2"),
        ('prompt,response\n"a"x,b\nc,"d"\n', r"train\.csv, line 2"),
        ('prompt,response\n"a,b\nc,"d"\n', r"train\.csv, line 2"),
        ("prompt,response\na, and more,b\n", r"train\.csv, line 2: 3 fields where the header has 2"),
        ("prompt,response\na\n", r"train\.csv, line 2: no response"),
        ("prompt,response,prompt\na,b,c\n", r"train\.csv.*twice"),
        ("question,answer\na,b\n", r"line 2: no prompt: the columns are prompt or messages .* it has question, answer"),
    ],
)
def test_a_csv_of_which_rows_could_be_lost_is_refused(tmp_path: Path, data: str, match: str) -> None:
    """F16: a stray quote swallowed the rows up to the next one; an unquoted comma cut the prompt."""
    (tmp_path / "train.csv").write_text(data, encoding="utf-8")
    with pytest.raises(DataError, match=match):
        get_task("jsonl").read(tmp_path, "train")


def test_a_csv_of_long_fields_quotes_and_line_breaks_is_read(tmp_path: Path) -> None:
    """F16: strict is not narrow."""
    long = "x" * 200_000
    (tmp_path / "train.csv").write_text(
        f'\ufeffprompt,response\n"a ""b"", c\nd",{long}\n5" pipe,e\n\n', encoding="utf-8"
    )
    rows = [(e.prompt, e.references) for e in get_task("jsonl").read(tmp_path, "train")]
    assert rows == [('a "b", c\nd', (long,)), ('5" pipe', ("e",))]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("[" * 100_000, "line 2.*nested too deep"),
        ('{"prompt": "a\\ud800", "response": "b"}', "line 2.*not UTF-8"),
        ('{"prompt": "a", "response": "\\udfff b"}', "line 2.*not UTF-8"),
        ('{"prompt": ' + "1" * 5000 + "}", "line 2"),
        ("NaN", "line 2: not a JSON object"),
        ('"text"', "line 2: not a JSON object"),
    ],
)
def test_a_line_that_no_tokenizer_takes_is_named(tmp_path: Path, line: str, match: str) -> None:
    """G: RecursionError, and TypeError from the tokenizer."""
    good = json.dumps({"prompt": "a", "response": "b"})
    (tmp_path / "train.jsonl").write_text(f"{good}\n{line}\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"train\.jsonl, {match}") as caught:
        get_task("jsonl").read(tmp_path, "train")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("task", sorted(TASKS))
def test_what_is_not_there_is_said_to_be_not_there(tmp_path: Path, task: str) -> None:
    """G: `--data nope` "holds no train.jsonl" though it does not exist."""
    with pytest.raises(DataError, match=f"there is no folder {tmp_path / 'nope'}"):
        get_task(task).read(tmp_path / "nope", "train")
    with pytest.raises(DataError, match=f"there is no file {tmp_path / 'nope.jsonl'}"):
        get_task(task).read(tmp_path / "nope.jsonl", "train")
    with pytest.raises(DataError, match=f"{tmp_path} holds no train"):
        get_task(task).read(tmp_path, "train")
    if task != "jsonl":
        (tmp_path / "file.csv").write_text(GOOD, encoding="utf-8")
        with pytest.raises(DataError, match=r"there is no folder .*file\.csv"):
            get_task(task).read(tmp_path / "file.csv", "train")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@settings(max_examples=150)
@given(
    data=st.binary(max_size=60)
    | st.text(st.sampled_from('prmtesonul,":{}[]\\\n\r \x00ud8é'), max_size=60).map(str.encode)
)
@example(data=b'{"prompt": "a", "response": "\\ud800"}')
@example(data=b"\xef\xbb\xbf\xef\xbb\xbfprompt,response\n\r\n,\n")
def test_whatever_a_file_holds_reading_ends_in_examples_or_one_line(tmp_path: Path, suffix: str, data: bytes) -> None:
    """G: never a traceback of csv, json or a codec; what is read can be written and tokenized."""
    path = tmp_path / f"train{suffix}"
    head = b"prompt,response\n" if suffix == ".csv" else b'{"prompt": "a", "response": "b"}\n'
    for content in (data, head + data):
        path.write_bytes(content)
        with suppress(DataError):
            for one in get_task("jsonl").read(path, "train"):
                assert f"{one.prompt}{one.references[0]}".encode()


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """G: "No module named 'datasets'" names no remedy."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"pip install 'skipdecode\[train\]'"):
        get_task("cnn_dm").read(Path("owner/name"), "test")


def test_a_column_is_prompt_or_response(tmp_path: Path) -> None:
    """A prompt's column is never its own reference; a blank prompt is not replaced by another column."""
    (tmp_path / "in.jsonl").write_text(json.dumps({"response": "R"}))
    (item,) = read_items(str(tmp_path / "in.jsonl"), get_task("jsonl", prompt_column="response"))
    assert (item.prompt, item.references) == ("R", [])
    with pytest.raises(DataError, match="they must differ"):
        get_task("jsonl", prompt_column="a", response_column="a")
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "", "text": "T", "response": "R"}))
    (item,) = read_items(str(tmp_path / "in.jsonl"), get_task("jsonl"))
    assert item.error == "no prompt"
