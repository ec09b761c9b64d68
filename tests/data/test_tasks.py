"""Tasks: the prompts of the paper's data sets, and prompts and references of any rows."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from skipdecode.data.chat import Message
from skipdecode.data.examples import merge_references, read_examples
from skipdecode.data.metrics import DEFAULT
from skipdecode.data.tasks import TASKS, Example, first_words, get_task, split_answer
from skipdecode.errors import DataError

SHARED = Path(__file__).parents[3] / "shared" / "data"
E2E = SHARED / "e2e"
needs_e2e = pytest.mark.skipif(not E2E.exists(), reason="the E2E release is not beside the checkout")
needs_summaries = pytest.mark.skipif(
    not (SHARED / "reddit_tldr").exists() or not (SHARED / "cnn_dm").exists(),
    reason="no summarization data beside the checkout",
)


def prompt(task: str, row: dict[str, Any], **options: Any) -> str:
    return str(get_task(task, **options).example(row).prompt)


# --- the paper's data sets


@pytest.mark.slow
@needs_e2e
@pytest.mark.parametrize(("system", "bleu", "rouge_l"), [("tgen", 65.93, 68.10), ("slug", 66.19, 67.56)])
def test_scorer_gives_the_challenges_official_bleu(system: str, bleu: float, rouge_l: float) -> None:
    """ROUGE-L has no official figure: the challenge counts it otherwise. Ours is held fast."""
    with (E2E / "challenge_outputs" / f"{system}.tsv").open(encoding="utf-8") as file:
        outputs = {prompt("e2e", {"mr": row["MR"]}): row["output"] for row in csv.DictReader(file, delimiter="\t")}
    examples = merge_references(read_examples(E2E, get_task("e2e"), "test"))
    assert len(examples) == 630
    texts = [outputs[str(example.prompt)] for example in examples]
    scores = [metric.score(texts, [example.references for example in examples]) for metric in DEFAULT]
    assert scores == pytest.approx([bleu, rouge_l], abs=0.005)


@needs_e2e
def test_e2e_splits_have_the_releases_size() -> None:
    task = get_task("e2e")
    sizes = {split: len(read_examples(E2E, task, split)) for split in ("train", "validation", "test")}
    assert sizes == {"train": 42061, "validation": 4672, "test": 4693}


@needs_summaries
def test_summaries_have_their_size_and_no_prompt_is_long() -> None:
    reddit = {
        split: read_examples(SHARED / "reddit_tldr", get_task("reddit_tldr"), split) for split in ("train", "test")
    }
    assert {split: len(examples) for split, examples in reddit.items()} == {"train": 6430, "test": 372}
    assert all(re.fullmatch(r"Post: .* TL;DR:", str(example.prompt)) for example in reddit["train"])
    assert not any("\n" in f"{example.prompt}{example.references[0]}" for example in reddit["train"])
    articles = read_examples(SHARED / "cnn_dm", get_task("cnn_dm"), "validation")
    assert len(articles) == 300
    assert max(len(str(example.prompt).split()) for example in articles) == 401


@pytest.mark.parametrize(
    "mr", ["hello", "name[Aromi", "name[Aromi] food", "Aromi]", "a" * 100_000, " " * 50_000 + "a"], ids=len
)
def test_what_is_no_meaning_representation_is_named(mr: str) -> None:
    """It is never turned into half a prompt, nor looked at for minutes."""
    with pytest.raises(DataError, match="meaning representation"):
        prompt("e2e", {"mr": mr})


@pytest.mark.parametrize(
    ("task", "row", "written"),
    [
        (
            "e2e",
            {"mr": "name[The Rice Boat], priceRange[£20-25]", "ref": "r  r"},
            "name The Rice Boat, priceRange £20-25 ->",
        ),
        ("e2e", {"meaning_representation": "name[A]", "human_reference": "r r"}, "name A ->"),
        ("e2e", {"meaning_representation": "name[A]", "target": "r\nr", "references": []}, "name A ->"),
        ("cnn_dm", {"article": "(CNN)Share,  and", "highlights": "r\nr"}, "(CNN)Share, and\n\nTL;DR:"),
        ("reddit_tldr", {"title": "T  t", "post": "p\np", "summary": "r r"}, "Post: T t. p p TL;DR:"),
        ("reddit_tldr", {"content": "p", "summary": "r r", "body": "p r r"}, "Post: p TL;DR:"),
    ],
)
def test_every_published_form_has_its_prompt(task: str, row: dict[str, Any], written: str) -> None:
    """Line breaks of prompts and references become spaces."""
    assert get_task(task).example(row) == Example(written, ("r r",))


@pytest.mark.parametrize(("task", "column"), [("e2e", "mr"), ("reddit_tldr", "post"), ("cnn_dm", "article")])
def test_a_row_without_a_prompt_is_named(task: str, column: str) -> None:
    for row in ({"id": 1}, {column: None}, {column: " "}, {column: 7}):
        with pytest.raises(DataError, match=f"no text in column {column}.*has {next(iter(row))}"):
            get_task(task).example(row)


def test_long_texts_are_cut_in_words() -> None:
    """Words of links are cut; where a script has no spaces, a character is a word."""
    assert len(prompt("reddit_tldr", {"title": "T", "post": "w " * 500}).split()) == 120 + 3
    assert len(prompt("cnn_dm", {"article": "w " * 500}).split()) == 400 + 1
    assert len(prompt("cnn_dm", {"article": "see http://" + "long/" * 100})) < 60
    assert first_words("猫坐在窗边看书 and so on", 4) == "猫坐在窗"
    assert len(first_words("猫" * 1000, 400)) == 400
    assert first_words("猫坐 the  cat", 4) == "猫坐 the cat"


# --- any rows

QA = {"question": "What sat?", "answer": "The cat.", "id": 7}
USER, ASSISTANT = {"role": "user", "content": "What sat?"}, {"role": "assistant", "content": "The cat."}
ASKED = (Message("user", "What sat?"),)


@pytest.mark.parametrize(
    ("options", "row", "expected", "references"),
    [
        ({}, {"prompt": "What sat?", "response": "The cat."}, "What sat?", ("The cat.",)),
        ({}, {"prompt": "What sat?", "completion": " The cat."}, "What sat?", (" The cat.",)),
        ({}, {"prompt": "What sat?", "response": ["The cat.", "A cat.", ""]}, "What sat?", ("The cat.", "A cat.")),
        ({}, {"text": "What sat?", "response": "The cat."}, "What sat?", ("The cat.",)),
        ({}, {"prompt": "What sat?", "text": "other", "response": "The cat."}, "What sat?", ("The cat.",)),
        ({}, {"prompt": "What sat?", "response": None}, "What sat?", ()),
        ({}, {"prompt": "", "response": "The cat."}, "", ("The cat.",)),
        ({}, {"prompt": ""}, "", ()),
        ({}, {"prompt": "", "messages": [USER, ASSISTANT]}, ASKED, ("The cat.",)),
        ({"prompt_column": "question"}, {"question": "\n"}, "\n", ()),
        ({"prompt_column": "question", "response_column": "answer"}, QA, "What sat?", ("The cat.",)),
        ({"prompt_column": "question"}, QA, "What sat?", ()),
        ({"prompt_column": "text"}, {"text": "What sat?"}, "What sat?", ()),
        ({"prompt_column": "response"}, {"response": "What sat?"}, "What sat?", ()),
        ({}, {"messages": [USER, ASSISTANT]}, ASKED, ("The cat.",)),
        ({}, {"messages": [USER]}, ASKED, ()),
        ({}, {"prompt": [USER], "completion": [ASSISTANT]}, ASKED, ("The cat.",)),
        ({}, {"prompt": [USER], "response": "The cat."}, ASKED, ("The cat.",)),
        ({}, {"prompt": "the cat sat", "messages": [USER, ASSISTANT]}, ASKED, ("The cat.",)),
        ({}, {"prompt": "x", "response": "The cat.", "messages": [USER, USER]}, "x", ("The cat.",)),
        ({}, {"messages": [USER | {"name": None, "tool_calls": []}, ASSISTANT]}, ASKED, ("The cat.",)),
        ({"prompt_column": "conversation"}, {"conversation": [USER, ASSISTANT]}, ASKED, ("The cat.",)),
    ],
)
def test_rows_of_many_forms_are_read(
    options: dict[str, Any], row: dict[str, Any], expected: Any, references: tuple[str, ...]
) -> None:
    """TRL's columns and conversations, several references, and columns of one's own."""
    assert split_answer(get_task("jsonl", **options).example(row)) == Example(expected, references)


@pytest.mark.parametrize(
    ("options", "row", "match"),
    [
        ({}, QA, r"no prompt: expected a column messages or prompt or text, found question, answer, id"),
        ({}, {"prompt": None, "response": "y"}, "no prompt"),
        ({"prompt_share": 0.5}, {"text": "", "prompt": ""}, "no prompt"),
        ({}, {"text": "x", "prompt": ""}, "a plain text: name its column prompt"),
        ({}, {"messages": [USER, ASSISTANT | {"reasoning_content": "hm"}]}, "'reasoning_content' would not reach"),
        ({}, {"messages": [USER, ASSISTANT | {"content": None, "tool_calls": [{}]}]}, "'tool_calls' would not reach"),
        ({}, {"prompt": [USER], "completion": [ASSISTANT | {"weight": 0}]}, "'weight' would not reach"),
        ({}, {"messages": [USER], "chat_template_kwargs": "brief"}, "chat_template_kwargs is an object"),
        ({}, {"messages": [USER | {"chat_template_kwargs": ["brief"]}]}, "chat_template_kwargs is an object"),
        ({"prompt_column": "query"}, QA, r"expected a column query, found question, answer, id"),
        ({"prompt_share": 0.5}, {"prompt": "x", "response": "y"}, "expected a column text"),
        ({"prompt_share": 0.5}, {"text": "x y", "response": "y"}, "prompt_share is for plain text"),
        ({}, {"text": "What sat?"}, "a plain text: name its column prompt"),
        ({}, {"messages": ["hello"]}, "messages: a list"),
        ({}, {"messages": [{"from": "human", "value": "x"}]}, "message 1 has no role"),
        (
            {},
            {"messages": [USER, {"role": "user", "content": [{"type": "image"}]}]},
            "message 2 has no role and content",
        ),
        ({}, {"prompt": "a text", "response": "x", "tools": [{"type": "function"}]}, "tools would not reach the model"),
        ({}, {"messages": [ASSISTANT]}, "no message to answer"),
        ({}, {"prompt": [USER, ASSISTANT], "response": "x"}, "ends with the assistant's message, and the row has"),
        ({}, {"prompt": [USER], "completion": [USER]}, "a response is one message, the assistant's"),
    ],
)
def test_a_row_that_does_not_fit_says_why(options: dict[str, Any], row: dict[str, Any], match: str) -> None:
    """Nothing that a row holds is left out in silence."""
    with pytest.raises(DataError, match=match):
        split_answer(get_task("jsonl", **options).example(row))


@pytest.mark.parametrize(
    ("name", "option", "match"),
    [
        ("nope", {}, "unknown task 'nope': known are e2e"),
        ("e2e", {"prompt_column": "x"}, "prompt_column goes with task jsonl, not with e2e"),
        ("jsonl", {"prompt_share": 1}, "at least 0 and below 1, not 1"),
        ("jsonl", {"prompt_share": float("nan")}, "at least 0 and below 1"),
    ],
)
def test_an_option_that_does_not_fit_its_task_is_refused(name: str, option: dict[str, Any], match: str) -> None:
    """The tasks themselves stay as they are."""
    with pytest.raises(DataError, match=match):
        get_task(name, **option)
    assert get_task("jsonl", prompt_share=0.5) != get_task("jsonl") == get_task() == TASKS["jsonl"]


@pytest.mark.parametrize(
    ("text", "share", "begin"),
    [
        ("  The cat\n sat  on\ta mat. \n", 0.5, "  The cat\n sat"),
        ("  The cat\n sat  on\ta mat. \n", 0, ""),
        ("  The cat\n sat  on\ta mat. \n", 0.01, "  The"),
        ("  The cat\n sat  on\ta mat. \n", 0.99, "  The cat\n sat  on\ta"),
        ("猫坐在窗边看书", 0.5, "猫坐在窗"),
        ("แมวนั่งอยู่", 0.4, "แมว"),
        ("What", 0.5, "What"),
    ],
)
def test_a_plain_text_is_cut_behind_a_word(text: str, share: float, begin: str) -> None:
    """Both parts together are the text, white space included."""
    one = get_task("jsonl", prompt_share=share).example({"text": text})
    assert one.prompt == begin
    assert begin + "".join(one.references) == text


DOCS = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("line", re.findall(r"^    (\{.*\})$", DOCS, re.MULTILINE))
def test_the_documentations_rows_are_read(line: str) -> None:
    """As they stand, or with the columns that stand beside them."""
    row = json.loads(line)
    options: dict[str, Any] = {"prompt_column": "question", "response_column": "answer"} if "question" in row else {}
    options |= {"prompt_share": 0.5} if "text" in row else {}
    assert split_answer(get_task("jsonl", **options).example(row)).references
