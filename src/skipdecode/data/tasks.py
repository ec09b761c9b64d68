"""Tasks: the prompts and references of the paper's data sets, and of any rows."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..errors import DataError
from .chat import OPTIONS, Message, Prompt, parse_messages
from .metrics import WORD_OR_CHARACTER

#: Words of a post, and of an article, in a prompt.
POST, ARTICLE = 120, 400
ATTRIBUTE = re.compile(r"([^\[\],]+)\[([^\]]*)\]\s*(?:,|$)")


@dataclass(frozen=True)
class Example:
    """One prompt and its reference responses, of which there may be none.

    Attributes:
        cut: the response was cut off, so that it has no end to learn.
    """

    prompt: Prompt
    references: tuple[str, ...] = ()
    cut: bool = False


@dataclass(frozen=True)
class Task:
    """A way to make prompts and references of rows."""

    name: str
    example: Callable[[Mapping[str, Any]], Example]  #: Raises DataError if the row has no prompt.
    text_column: str  #: Column that a line of a text file is.
    max_new_tokens: int  #: Default of the longest generated text.
    repeats: bool = False  #: Prompts stand in several rows, one for each reference.
    hub_config: str | None = None  #: Configuration of the data set on the Hub.


def get_task(
    name: str = "jsonl",
    prompt_column: str | None = None,
    response_column: str | None = None,
    prompt_share: float | None = None,
) -> Task:
    """Task by its name, one of :data:`TASKS`. The other arguments are for ``jsonl``, which takes any rows.

    Args:
        name: the task.
        prompt_column: column of prompts; default ``prompt``, ``messages`` or ``text``.
        response_column: column of responses; default ``response`` or ``completion``.
        prompt_share: share of a plain text's words that is the prompt, at least 0 and below 1.

    Raises:
        DataError: there is no such task, or it has no such option.
    """
    if name not in TASKS:
        raise DataError(f"unknown task {name!r}: known are {', '.join(TASKS)}")
    given = {"prompt_column": prompt_column, "response_column": response_column, "prompt_share": prompt_share}
    options: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    if not 0 <= (prompt_share or 0) < 1:
        raise DataError(f"prompt_share is at least 0 and below 1, not {prompt_share}")
    if not options:
        return TASKS[name]
    if name != "jsonl":
        raise DataError(f"{', '.join(options)} goes with task jsonl, not with {name}")
    text_column = prompt_column or ("prompt" if prompt_share is None else "text")
    return replace(TASKS[name], example=partial(plain, **options), text_column=text_column)


def e2e(row: Mapping[str, Any]) -> Example:
    """``name[Aromi], food[English]`` as ``name Aromi, food English ->``, which has a third fewer tokens."""
    meaning = _text(row, "mr", "meaning_representation")
    attributes, end = [], 0
    while found := ATTRIBUTE.match(meaning, end):  # findall would look for a match from every character
        attributes.append(found.groups())
        end = found.end()
    if not attributes or meaning[end:].strip():
        raise DataError(f"not a meaning representation like 'name[Aromi], food[English]': {meaning!r}")
    prompt = ", ".join(f"{key.strip()} {value.strip()}" for key, value in attributes) + " ->"
    return Example(prompt, _references(row, "ref", "human_reference", "target"))


def reddit_tldr(row: Mapping[str, Any]) -> Example:
    """``Post: Weird crash. After installing my new GPU … TL;DR:``; line breaks become spaces."""
    post = first_words(_text(row, "post", "content"), POST)
    title = "".join(f"{title}. " for title in _references(row, "title"))
    return Example(f"Post: {title}{post} TL;DR:", _references(row, "summary"))


def cnn_dm(row: Mapping[str, Any]) -> Example:
    """A prompt like GPT-2's: the article's beginning, an empty line, and ``TL;DR:``."""
    return Example(f"{first_words(_text(row, 'article'), ARTICLE)}\n\nTL;DR:", _references(row, "highlights"))


def plain(
    row: Mapping[str, Any],
    prompt_column: str | None = None,
    response_column: str | None = None,
    prompt_share: float | None = None,
) -> Example:
    """Prompt and response, conversation, or text to split, in TRL's formats; :func:`get_task` has the options."""
    names = [response_column] if response_column else ["response", "completion"]
    references = _responses(row, [name for name in names if name != prompt_column])
    columns = ["prompt", "messages", "text"] if references else ["messages", "prompt", "text"]
    if prompt_column or prompt_share is not None:
        columns = [prompt_column or "text"]
    value = _first(row, *columns)
    if value is None and prompt_share is None:
        value = row.get(prompt_column or "prompt")  # it may be empty
    if value is None:
        raise DataError(f"no prompt: expected a column {' or '.join(columns)}, found {', '.join(row) or 'none'}")
    if not isinstance(value, str):
        return Example(parse_messages(value, row), references)
    if unused := [name for name in OPTIONS if row.get(name)]:
        raise DataError(f"{' and '.join(unused)} would not reach the model: the prompt is a text, no messages")
    if prompt_share is None:
        if not (references or prompt_column or value == row.get("prompt")):
            raise DataError("a plain text: name its column prompt; to train on it, set prompt_share in --config")
        return Example(value, references)
    if references:
        raise DataError("prompt_share is for plain text, but the row has a response")
    return split_text(value, prompt_share)


def split_answer(example: Example) -> Example:
    """The example of a conversation whose last message, the assistant's, is the reference; others as they are."""
    if isinstance(example.prompt, str) or example.prompt[-1].role != "assistant":
        return example
    if example.references:
        raise DataError("the conversation ends with the assistant's message, and the row has a response as well")
    *chat, answer = example.prompt
    if not chat:
        raise DataError("the conversation has no message to answer")
    return Example(tuple(chat), _answer(answer))


def _answer(message: Message) -> tuple[str, ...]:
    """The message's text, if it has one. Raises DataError if it has more, which would not be learnt."""
    if more := sorted(message.fields().keys() - {"role", "content"}):
        raise DataError(f"the answer's {more[0]!r} would not reach the model: write it in the content, or leave it out")
    return (message.content,) if message.content.strip() else ()


def _responses(row: Mapping[str, Any], columns: Sequence[str]) -> tuple[str, ...]:
    """References of the first column that has any: a text, several, or one message of the assistant."""
    value = _first(row, *columns) or []
    value = [value] if isinstance(value, str) else value
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return tuple(text for text in value if text.strip())
    chat = parse_messages(value)
    if len(chat) > 1 or chat[0].role != "assistant":
        raise DataError("a response is one message, the assistant's")
    return _answer(chat[0])


def split_text(text: str, share: float) -> Example:
    """A text split after ``share`` of its words: the prompt, and the unchanged rest as the reference.

    Both have at least one word, unless the share is 0 (no prompt) or there is only one word (no reference). A
    character is a word where a script has no spaces.
    """
    if not share:
        return Example("", (text,))
    ends = [word.end() for word in WORD_OR_CHARACTER.finditer(text)]
    count = max(1, min(round(share * len(ends)), len(ends) - 1))
    rest = text[ends[count - 1] :]
    return Example(text[: ends[count - 1]], (rest,) if rest.strip() else ())


def first_words(text: str, count: int) -> str:
    """First ``count`` words, joined by single spaces, each of at most 30 characters: links have many tokens.

    A character is a word where a script has no spaces.
    """
    text = " ".join(word[:30] if WORD_OR_CHARACTER.fullmatch(word) else word for word in text.split())
    ends = [word.end() for word in WORD_OR_CHARACTER.finditer(text)]
    return text if len(ends) <= count else text[: ends[count - 1]]


def _first(row: Mapping[str, Any], *columns: str) -> Any:
    """The first text or list in ``columns`` that is not empty; None without any."""
    values = (row.get(name) for name in columns)
    return next((value for value in values if value and (not isinstance(value, str) or value.strip())), None)


def _text(row: Mapping[str, Any], *columns: str) -> str:
    text = _first(row, *columns)
    if not isinstance(text, str):
        raise DataError(f"no text in column {' or '.join(columns)}; the row has {', '.join(row) or 'none'}")
    return text


def _references(row: Mapping[str, Any], *columns: str) -> tuple[str, ...]:
    """Reference in the first of ``columns`` that has any, with line breaks as spaces."""
    text = _first(row, *columns)
    return (" ".join(text.split()),) if isinstance(text, str) else ()


#: E2E NLG (Novikova et al., 2017), ``tuetschek/e2e_nlg`` on the Hub; Webis-TLDR-17 (Völske et al., 2017); CNN/DailyMail
#: (See et al., 2017), ``abisee/cnn_dailymail``; and any rows.
TASKS = {
    "e2e": Task("e2e", e2e, "mr", 80, repeats=True),
    "reddit_tldr": Task("reddit_tldr", reddit_tldr, "post", 60),
    "cnn_dm": Task("cnn_dm", cnn_dm, "article", 120, hub_config="3.0.0"),
    "jsonl": Task("jsonl", plain, "prompt", 128),
}
