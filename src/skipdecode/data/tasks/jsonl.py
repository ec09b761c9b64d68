"""The task for the user's own data: prompts and responses, conversations, or plain text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DataError
from ..chat import parse_messages
from .base import Example, Task, holds_text
from .splits import FILES, file_rows, find


@dataclass(frozen=True)
class Jsonl(Task):
    """Rows in TRL's formats, as JSONL or CSV; docs/data.md has an example of each.

    Attributes:
        prompt_column: column of prompts (strings or messages); by default ``prompt``, ``messages`` or ``text``.
        response_column: column of responses (a string, a list of reference strings, or a list of one assistant
            message); by default ``response`` or ``completion``.
        prompt_share: share of a plain text's words that is the prompt; at 0 the prompt is the begin-of-text token
            alone. Required for rows of ``text`` without a response.
    """

    name: str = "jsonl"
    max_new_tokens: int = 128
    prompt_column: str | None = None
    response_column: str | None = None
    prompt_share: float | None = None

    def __post_init__(self) -> None:
        if self.prompt_share is not None and not 0 <= self.prompt_share < 1:
            raise DataError(f"prompt_share is at least 0 and below 1, not {self.prompt_share!r}")
        if self.prompt_column is not None and self.prompt_column == self.response_column:
            raise DataError(f"prompt_column and response_column are both {self.prompt_column}: they must differ")
        if self.prompt_share is not None and self.response_column is not None:
            raise DataError("prompt_share is for plain text, which has no response_column: give one of them")

    @property
    def prompt_columns(self) -> list[tuple[str]]:
        """Return the columns that may hold the prompt; the first that is not empty is used."""
        if self.prompt_column is not None:
            return [(self.prompt_column,)]
        return [("prompt",), ("messages",), ("text",)] if self.prompt_share is None else [("text",)]

    @property
    def described(self) -> str:
        """Return the expected columns, and the options that name others, for error messages."""
        prompts = " or ".join(column for (column,) in self.prompt_columns)
        if self.prompt_share is not None:
            return f"{prompts} (prompt_share is for plain text)"
        responses = self.response_column or "response or completion"
        return f"{prompts} for the prompt, {responses} for the response (prompt_column, response_column name others)"

    def _column(self, row: Mapping[str, Any]) -> str:
        """Return the first column that holds a prompt; but ``messages`` come first if the row has no response."""
        named = [column for (column,) in self.prompt_columns if column in row]
        there = [column for column in named if row[column] is not None]  # blank ones too: the row then gets an error
        filled = [column for column in there if _holds(row[column])]
        if "messages" in filled and not any(_holds(row.get(name)) for name in self._response_columns):
            return "messages"
        return (there or named or [self.prompt_columns[0][0]])[0]

    def example(self, row: Mapping[str, Any]) -> Example:
        """Make an example of a prompt and response, of messages and the last answer, or of a text to split."""
        column = self._column(row)
        value: Any = row.get(column)
        references = self._references(row)
        if not _holds(value):
            self.check_text(row, [column])
        if self.prompt_share is not None and (references or isinstance(value, list)):
            raise DataError("prompt_share is for plain text, but the row has a response or messages")
        if isinstance(value, list):
            return self._chat(column, value, references)
        if column == "messages":
            raise DataError("messages are a list of {'role': …, 'content': …}, not a string")
        if any(isinstance(row.get(name), list) and not _is_strings(row[name]) for name in self._response_columns):
            raise DataError("the response is a message, but the prompt is text: give both in the same form")
        if not self._is_plain(row, column):
            return Example(value, references)
        if self.prompt_share is None:
            raise DataError(
                "a row of plain text: state with prompt_share (--prompt-share) what share of its words is the prompt, "
                "0 for the begin-of-text token alone; or name the column as that of the prompts (--prompt-column text)"
            )
        return split_text(value, self.prompt_share)

    def _is_plain(self, row: Mapping[str, Any], column: str) -> bool:
        """Return whether ``column`` is a plain text to split: by ``prompt_share``, or because it has no response."""
        if self.prompt_share is not None:
            return True
        named = self.prompt_column is not None or self.response_column is not None
        return column == "text" and not named and not any(name in row for name in self._response_columns)

    def _chat(self, column: str, value: list[Any], references: tuple[str, ...]) -> Example:
        chat = parse_messages(value)
        if chat[-1].role == "assistant":
            if references or self.response_column is not None:
                raise DataError(f"{column} ends with the assistant's message, but responses have a column of their own")
            references = (chat[-1].content,) if holds_text(chat[-1].content) else ()
            chat = chat[:-1]
        if not chat or not holds_text(chat[-1].content):
            raise DataError(f"{column} holds no message for the assistant to answer")
        return Example(chat, references)

    @property
    def _response_columns(self) -> tuple[str, ...]:
        names = ("response", "completion") if self.response_column is None else (self.response_column,)
        return tuple(name for name in names if name != self.prompt_column)

    def _references(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the texts of the first response column that has any. Raises DataError for wrong messages."""
        for column in self._response_columns:
            value: Any = row.get(column)
            if holds_text(value):
                return (value,)
            if isinstance(value, list) and value:
                if _is_strings(value):
                    return tuple(filter(holds_text, value))
                chat = parse_messages(value)
                if len(chat) > 1 or chat[0].role != "assistant":
                    raise DataError("a response is one message, the assistant's")
                return (chat[0].content,)
        return ()

    def check_reference(self, row: Mapping[str, Any]) -> None:
        """Raise a DataError that says why a row has no reference."""
        column = self._column(row)
        if column == "messages":
            raise DataError("the last message is not the assistant's: there is no response to learn or to compare with")
        if self._is_plain(row, column):
            raise DataError("a text of one word has no second part: leave it out, or take prompt_share 0")
        named = [name for name in self._response_columns if name in row]
        self.check_text(row, (named or self._response_columns)[:1])

    def read(self, folder: Path, split: str) -> list[Example]:
        """Read a split; ``folder`` may be the training file alone. A missing validation or test split is empty."""
        if split != "train" and folder.exists() and not any((folder / name).exists() for name in FILES[split]):
            return []
        path = folder if folder.is_file() else find(folder, FILES[split])
        return self.examples(file_rows(path, self.prompt_columns[0][0]), split)


def split_text(text: str, share: float) -> Example:
    """Split a text after ``share`` of its words into the prompt and the unchanged rest, as the reference.

    Both parts have at least one word, unless the share is 0 (no prompt) or the text has only one word (no reference).
    """
    if not share:
        return Example("", (text,))
    ends = [word.end() for word in re.finditer(r"\S+", text)]
    count = max(1, min(round(share * len(ends)), len(ends) - 1))
    prompt, rest = text[: ends[count - 1]], text[ends[count - 1] :]
    return Example(prompt, (rest,) if holds_text(rest) else ())


def _holds(value: object) -> bool:
    return holds_text(value) or (isinstance(value, list) and bool(value))


def _is_strings(value: list[Any]) -> bool:
    return all(isinstance(text, str) for text in value)
