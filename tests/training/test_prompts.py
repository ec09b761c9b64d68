"""Prompts that a model makes up: their kinds, and that each is as the chat template has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import TEXTS, write_jsonl
from skipdecode.data.chat import Chat, render
from skipdecode.data.tasks import get_task
from skipdecode.errors import DataError, UsageError
from skipdecode.generation.stats import Completion
from skipdecode.loading.load import Checkpoint
from skipdecode.training import prompts as made

JSONL = get_task("jsonl")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
#: Takes no system message, as some.
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
#: Takes one message alone.
ONE_TURN = "{% if messages[1:] %}{{ raise_exception('one message') }}{% endif %}" + TEMPLATE


def never(*_: Any) -> Any:
    pytest.fail("the file has the prompts")


def chat_model(checkpoint: Path, template: str) -> Checkpoint:
    base = Checkpoint.resolve(str(checkpoint))
    base.tokenizer.bos_token = "<s>"
    base.tokenizer.chat_template = template
    return base


class Writer:
    """A model that writes numbered messages, each with another beginning, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: dict[str, list[Any]] = {}

    def __call__(self, prompts: Any, options: dict[str, Any], name: str) -> list[Completion]:
        assert name not in self.asked, "jobs of one name share a file"
        self.asked[name] = list(prompts)
        if name.startswith("openings"):
            return [Completion(f"{'ABCDE'[place % 5]} b", 2, "length") for place in range(len(prompts))]
        if name.startswith("answers"):
            return [Completion(f" answer {place} of {name} ", 3, "stop") for place in range(len(prompts))]
        assert options["stop_strings"] == ["<end>"]
        return [Completion(f" c {place} of {name} <end>", 3, "stop") for place in range(len(prompts))]


def test_prompts_are_those_of_a_file(checkpoint: Path, tmp_path: Path) -> None:
    """Each once, with or without responses; few are told."""
    rows = write_jsonl(tmp_path / "prompts.jsonl", ({"prompt": text} for text in [*TEXTS, TEXTS[0]]))
    said: list[str] = []
    base = Checkpoint.resolve(str(checkpoint))
    assert made.find_prompts(base, rows, JSONL, 9, never, said.append) == TEXTS
    assert said == [f"{rows} has {len(TEXTS)} different prompts: some hundreds teach more"]
    with pytest.raises(DataError):
        made.find_prompts(base, tmp_path / "none.jsonl", JSONL, 9, never, said.append)


@pytest.mark.parametrize("passages", [["one", "two"], []])
def test_a_base_model_continues_passages(checkpoint: Path, passages: list[str]) -> None:
    """That it wrote itself: those that were cut, since behind an end nothing comes; else it begins by itself."""
    base = Checkpoint.resolve(str(checkpoint))
    with pytest.raises(UsageError, match="no begin-of-text token"):
        made.find_prompts(base, None, JSONL, 3, never, str)
    base.tokenizer.bos_token = "a"

    def write(prompts: Any, options: dict[str, Any], name: str) -> list[Completion]:
        assert prompts == [""] * 3
        cut = [Completion(text, options["max_new_tokens"], "length") for text in passages]
        return cut + [Completion(f"whole {place}", 2, "stop") for place in range(3 - len(cut))]

    assert made.find_prompts(base, None, JSONL, 3, write, str) == (passages or [""])


@pytest.mark.parametrize("begin", ["", "{{ bos_token }}"])
def test_conversations_are_as_the_template_has_them(checkpoint: Path, begin: str) -> None:
    """Each message behind what the template puts there, begin-of-text once; all kinds come; none twice."""
    base, writer = chat_model(checkpoint, begin + TEMPLATE), Writer()
    found = made.find_prompts(base, None, JSONL, 64, writer, str)
    assert len({*found}) == len(found)
    kinds = {tuple(message.role for message in chat) for chat in found if not isinstance(chat, str)}
    turns = ("user",), ("user", "assistant", "user"), ("user", "assistant", "user", "assistant", "user")
    assert kinds >= {*turns, ("system", *turns[0]), ("system", *turns[1])}
    assert {role for kind in kinds for role in kind[-1:]} == {"user"}
    texts = {render(base.tokenizer, chat) for chat in found if not isinstance(chat, str)}
    for name, asked in writer.asked.items():
        if name.startswith("messages"):
            for place, before in enumerate(asked):
                assert any(text.startswith(f"{before} c {place} of {name}<end>") for text in texts)


def test_beginnings_are_spread_evenly(checkpoint: Path) -> None:
    """Each different one goes on as often as another, however often it was drawn."""
    base = chat_model(checkpoint, TEMPLATE)

    def write(prompts: Any, options: dict[str, Any], name: str) -> list[Completion | None]:
        if name.startswith("openings"):
            assert options["max_new_tokens"] == made.OPENING
            drawn: list[Completion | None] = [Completion(text, 2, "length") for text in ("Why is", "How", "How", "How")]
            return [*drawn, Completion("I<end>", 2, "stop"), None]
        assert prompts == ["<user>Why is", "<user>How"] * 3
        return [Completion(f" it {place}<end>", 3, "stop") for place in range(6)]

    found = made.next_messages(base, [()] * 6, write, str, "1")
    assert [chat[0].content for chat in found] == [f"{('Why is', 'How')[place % 2]} it {place}" for place in range(6)]


@pytest.mark.parametrize(
    ("texts", "kept"),
    [
        ([" so?<end>", " so? <end>", "<end>"], ["Why so?", "Why"]),
        (
            [
                " do I boil an egg in a large pan of salted water?<end>",
                " do I boil an egg in a large pan of salted oil?<end>",
            ],
            1,
        ),
        ([" on and on", None], 0),
    ],
)
def test_messages_that_teach_nothing_are_left_out(checkpoint: Path, texts: list[str | None], kept: Any) -> None:
    """What does not end, and what begins like another."""
    base = chat_model(checkpoint, TEMPLATE)

    def write(prompts: Any, options: dict[str, Any], name: str) -> list[Completion | None]:
        if name.startswith("openings"):
            return [Completion("Why", 2, "length")] * len(prompts)
        ends = ("length", "stop")
        return [(text and Completion(text, 3, ends[text.endswith("<end>")])) or None for text in texts]

    found = made.next_messages(base, [()] * len(texts), write, str, "1")
    contents = [chat[0].content for chat in found]
    assert contents == kept or len(contents) == kept


@pytest.mark.parametrize(
    ("template", "refused"), [(NO_SYSTEM, lambda chat: chat[0].role == "system"), (ONE_TURN, lambda chat: chat[1:])]
)
def test_what_a_template_refuses_is_told(checkpoint: Path, template: str, refused: Callable[[Chat], Any]) -> None:
    """And the other kinds are written."""
    said: list[str] = []
    found = made.conversations(chat_model(checkpoint, template), 64, Writer(), said.append)
    assert found
    assert not any(refused(chat) for chat in found)
    assert any("without" in each for each in said)
    with pytest.raises(DataError, match="no user message that ends"):
        made.conversations(chat_model(checkpoint, template), 8, lambda rows, *_: [None] * len(rows), str)
