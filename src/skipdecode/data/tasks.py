"""Tasks: the prompts and references of the paper's data sets, and of any rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..errors import DataError
from .chat import Prompt, parse_messages
from .metrics import WORD_OR_CHARACTER, is_unspaced

#: Words of a post, and of an article, in a prompt.
POST, ARTICLE = 120, 400
ATTRIBUTE = re.compile(r"\s*([^\[\],]+)\[([^\]]*)\]\s*(?:,|$)")


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
    """A way to make prompts and references of rows.

    Attributes:
        example: makes the example of a row. Raises DataError if the row has no prompt.
        columns: columns that may hold the prompt; a line of text is the first.
        max_new_tokens: default of the longest generated text.
        repeats: prompts stand in several rows, one for each reference.
        hub_config: configuration of the data set on the Hub.
    """

    name: str
    example: Callable[[Mapping[str, Any]], Example]
    columns: tuple[str, ...]
    max_new_tokens: int
    repeats: bool = False
    hub_config: str | None = None


def get_task(
    name: str = "jsonl",
    prompt_column: str | None = None,
    response_column: str | None = None,
    prompt_share: float | None = None,
) -> Task:
    """Task by its name: ``e2e``, ``reddit_tldr``, ``cnn_dm``, or ``jsonl`` for any rows.

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
    options: dict[str, Any] = {
        "prompt_column": prompt_column,
        "response_column": response_column,
        "prompt_share": prompt_share,
    }
    options = {option: value for option, value in options.items() if value is not None}
    if options and name != "jsonl":
        raise DataError(f"{', '.join(options)} goes with task jsonl, not with {name}")
    if prompt_share is not None and not 0 <= prompt_share < 1:
        raise DataError(f"prompt_share is at least 0 and below 1, not {prompt_share}")
    task = TASKS[name]
    if options:
        columns = (prompt_column,) if prompt_column else task.columns if prompt_share is None else ("text",)
        task = replace(task, example=partial(plain, **options), columns=columns)
    return task


def e2e(row: Mapping[str, Any]) -> Example:
    """``name[Aromi], food[English]`` as ``name Aromi, food English ->``, which has a third fewer tokens."""
    meaning = _text(row, "mr", "meaning_representation")
    attributes = ATTRIBUTE.findall(meaning)
    if not attributes or ATTRIBUTE.sub("", meaning).strip():
        raise DataError(f"not a meaning representation like 'name[Aromi], food[English]': {meaning!r}")
    prompt = ", ".join(f"{key.strip()} {value.strip()}" for key, value in attributes) + " ->"
    return Example(prompt, _references(row, "ref", "human_reference", "target"))


def reddit_tldr(row: Mapping[str, Any]) -> Example:
    """``Post: Weird crash. After installing my new GPU … TL;DR:``; line breaks become spaces."""
    post = first_words(_text(row, "post", "content"), POST)
    title = row.get("title")
    begin = f"{' '.join(str(title).split())}. " if _is_text(title) else ""
    return Example(f"Post: {begin}{post} TL;DR:", _references(row, "summary"))


def cnn_dm(row: Mapping[str, Any]) -> Example:
    """A prompt like GPT-2's: the article's beginning, an empty line, and ``TL;DR:``."""
    return Example(f"{first_words(_text(row, 'article'), ARTICLE)}\n\nTL;DR:", _references(row, "highlights"))


def plain(
    row: Mapping[str, Any],
    prompt_column: str | None = None,
    response_column: str | None = None,
    prompt_share: float | None = None,
) -> Example:
    """Prompt and response, conversation, or text to split, in TRL's formats; :func:`get_task` has the options.

    The last message of a conversation without a response is the reference, if it is the assistant's.
    """
    if _filled(row.get("tools")):
        raise DataError("tools would not reach the model: they are not supported")
    names = [response_column] if response_column else ["response", "completion"]
    references = _responses(row, [name for name in names if name != prompt_column])
    columns = [prompt_column] if prompt_column else ["prompt", "messages", "text"]
    if prompt_share is not None:
        columns = [prompt_column or "text"]
    elif not prompt_column and not references:
        columns = ["messages", "prompt", "text"]
    column = next((name for name in columns if _filled(row.get(name))), None)
    if column is None:
        raise DataError(f"no prompt: expected a column {' or '.join(columns)}, found {', '.join(row) or 'none'}")
    value = row[column]
    if not isinstance(value, str):
        return _conversation(value, references)
    is_split = prompt_share is not None or (column == "text" and not references and not prompt_column)
    if not is_split:
        return Example(value, references)
    if references:
        raise DataError("prompt_share is for plain text, but the row has a response")
    if prompt_share is None:
        raise DataError("a plain text: give --prompt-share, the share that is the prompt, or --prompt-column text")
    return split_text(value, prompt_share)


def _conversation(value: Any, references: tuple[str, ...]) -> Example:
    chat = parse_messages(value)
    if chat[-1].role == "assistant":
        if references:
            raise DataError("the conversation ends with the assistant's message, and the row has a response as well")
        references = (chat[-1].content,) if chat[-1].content.strip() else ()
        chat = chat[:-1]
    if not chat or not chat[-1].content.strip():
        raise DataError("the conversation has no message to answer")
    return Example(chat, references)


def _responses(row: Mapping[str, Any], columns: Sequence[str]) -> tuple[str, ...]:
    """References of the first column that has any: a text, several, or one message of the assistant."""
    value = next((row[name] for name in columns if _filled(row.get(name))), None)
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    if all(isinstance(text, str) for text in value):
        return tuple(text for text in value if text.strip())
    chat = parse_messages(value)
    if len(chat) > 1 or chat[0].role != "assistant":
        raise DataError("a response is one message, the assistant's")
    return (chat[0].content,)


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
    text = " ".join(word if is_unspaced(word) else word[:30] for word in text.split())
    ends = [word.end() for word in WORD_OR_CHARACTER.finditer(text)]
    return text if len(ends) <= count else text[: ends[count - 1]]


def _text(row: Mapping[str, Any], *columns: str) -> str:
    """Text of the first of ``columns`` that has any. Raises DataError if none does."""
    for name in columns:
        if _is_text(row.get(name)):
            return row[name]
    raise DataError(f"no text in column {' or '.join(columns)}; the row has {', '.join(row) or 'none'}")


def _references(row: Mapping[str, Any], *columns: str) -> tuple[str, ...]:
    """Reference in the first of ``columns`` that has any, with line breaks as spaces."""
    text = next((row[name] for name in columns if _is_text(row.get(name))), "")
    return (" ".join(text.split()),) if text else ()


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _filled(value: object) -> bool:
    return _is_text(value) or (isinstance(value, list | tuple) and bool(value))


#: E2E NLG (Novikova et al., 2017), ``tuetschek/e2e_nlg`` on the Hub; Webis-TLDR-17 (Völske et al., 2017); CNN/DailyMail
#: (See et al., 2017), ``abisee/cnn_dailymail``; and any rows.
TASKS = {
    "e2e": Task("e2e", e2e, ("mr", "meaning_representation"), 80, repeats=True),
    "reddit_tldr": Task("reddit_tldr", reddit_tldr, ("post", "content"), 60),
    "cnn_dm": Task("cnn_dm", cnn_dm, ("article",), 120, hub_config="3.0.0"),
    "jsonl": Task("jsonl", plain, ("prompt", "messages", "text"), 128),
}
