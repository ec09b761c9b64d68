"""The form of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import TaskError
from ..chat import Prompt
from .splits import JSONL, split_rows


@dataclass(frozen=True)
class Example:
    """One prompt and the responses that people wrote for it (none where only a prompt is known)."""

    prompt: Prompt
    references: tuple[str, ...]


class Task(ABC):
    """How a task is read, prompted and scored. The fields of a task are its options."""

    name: str
    #: For each form that rows come in, what its columns are called here.
    forms: Sequence[Mapping[str, str]]
    #: What the column of the reference text is called here.
    reference: str
    #: Files of each split, in the order they are looked for in a folder.
    files: Mapping[str, Sequence[str]] = JSONL
    #: The configuration that the data set on the hub needs.
    hub_config: str | None = None
    #: Whether inputs repeat, one row per reference, and are meant to be generated once.
    distinct: bool = False
    #: How many new tokens its texts need at most.
    max_new_tokens: int

    @abstractmethod
    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """What the model is given for one row, whose columns are called as here. Raises TaskError."""

    @property
    def prompt_forms(self) -> list[tuple[str, ...]]:
        """The columns that a prompt is made of, for each form."""
        return [self._prompt_columns(form) for form in self.forms]

    @property
    def described(self) -> str:
        """The columns of a whole row, for messages."""
        return " or ".join(" and ".join(form) for form in self.forms)

    def columns(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """The columns that this row's prompt is made of."""
        return self._prompt_columns(self._form(row))

    def shown(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What an output repeats of a row: the columns of its prompt."""
        return {column: row.get(column) for column in self.columns(row)}

    def example(self, row: Mapping[str, Any]) -> Example:
        """The prompt of a row, and the reference where it has one. Raises TaskError for a row without a prompt."""
        form = self._form(row)
        self.check_text(row, self._prompt_columns(form))
        own = {name: row[column] for column, name in form.items() if holds_text(row.get(column))}
        reference = own.get(self.reference)
        return Example(self.prompt(own), () if reference is None else (normalize_whitespace(reference),))

    def _prompt_columns(self, form: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(column for column, name in form.items() if name != self.reference)

    def _form(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        """The form that most of the row's text is in, that of its prompt above all."""

        def fills(form: Mapping[str, str]) -> tuple[bool, int]:
            texts = {name for column, name in form.items() if holds_text(row.get(column))}
            return {*form.values()} - texts <= {self.reference}, len(texts)

        return max(self.forms, key=fills)

    def check_text(self, row: Mapping[str, Any], columns: Iterable[str]) -> None:
        """Raises TaskError for columns without text; where there are no such columns, it says which there are."""
        empty = [column for column in columns if not holds_text(row.get(column))]
        if not empty:
            return
        message = f"no {' and no '.join(empty)}"
        if not set(empty) <= set(row):
            message += f": the columns are {self.described}; it has {', '.join(map(str, row))[:200] or 'none'}"
        raise TaskError(message)

    def read(self, folder: Path, split: str) -> list[Example]:
        """Examples of a split (``train``, ``validation`` or ``test``) from the task's own files, or from the hub.

        ``train`` keeps one example per reference; the others gather all references of a prompt.

        Raises:
            TaskError: no such data, or a row without prompt or reference.
        """
        return self.examples(folder, split, self.files[split])

    def examples(self, source: Path, split: str, files: Sequence[str]) -> list[Example]:
        """As :meth:`read`, from the first of these files that is there."""
        pairs: list[tuple[Prompt, str]] = []
        for where, row in split_rows(source, split, files, self.hub_config, self.columns({})[0]):
            try:
                example = self.example(row)
                if not example.references:
                    self.check_reference(row)
            except TaskError as problem:
                raise TaskError(f"{where}: {problem}") from None
            pairs += [(example.prompt, reference) for reference in example.references]
        return [Example(prompt, (text,)) for prompt, text in pairs] if split == "train" else gather(pairs)

    def check_reference(self, row: Mapping[str, Any]) -> None:
        """Raises TaskError for a row without a reference."""
        form = self._form(row)
        self.check_text(row, [column for column, name in form.items() if name == self.reference])

    def score(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        """Corpus BLEU (lower-cased sacrebleu) and mean ROUGE-L, 0 to 100: each text against all its references."""
        from ..metrics import DEFAULT

        return {metric.name: metric.score(texts, references) for metric in DEFAULT}


def holds_text(value: object) -> bool:
    """Whether it is a string of more than white space."""
    return isinstance(value, str) and bool(value.strip())


def subsample(examples: Sequence[Example], count: int) -> list[Example]:
    """So many of them, from beginning to end: data sets are often sorted by length."""
    count = min(count, len(examples))
    return [examples[i * len(examples) // count] for i in range(count)]


def gather(pairs: Iterable[tuple[Prompt, str]]) -> list[Example]:
    """One example per distinct prompt, with all its references, in order of first appearance."""
    references: dict[Prompt, list[str]] = {}
    for prompt, reference in pairs:
        references.setdefault(prompt, []).append(reference)
    return [Example(prompt, tuple(texts)) for prompt, texts in references.items()]


def normalize_whitespace(text: str, max_words: int | None = None) -> str:
    """One space between words and no line breaks; with ``max_words``, only so many, each up to 30 characters.

    A path or a link can have hundreds of tokens, and a model has only so many positions.
    """
    parts = text.split()
    return " ".join(parts if max_words is None else [part[:30] for part in parts[:max_words]])
