"""The rows of a job, judged before weights are loaded: which of them can be written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..data.chat import Prompt
from ..data.inputs import Item
from ..data.tokenization import encode_prompts
from ..errors import ModelError
from .generate import max_positions


class JobRows:
    """The rows of a job, judged by the tokenizer: ``ids`` of those that can be written, ``items`` with all errors."""

    def __init__(self, items: Sequence[Item], tokenizer: PreTrainedTokenizerBase, config: Any, new_tokens: int) -> None:
        self.items = list(items)
        self.ids: dict[int, list[int]] = {}
        limit = max_positions(config)
        good = [index for index, item in enumerate(items) if item.error is None]
        for index, ids in zip(good, _encode(tokenizer, [items[index].prompt for index in good]), strict=True):
            error = ids if isinstance(ids, str) else _too_long(len(ids), new_tokens, limit)
            if error is None and not isinstance(ids, str):
                self.ids[index] = ids
            else:
                self.items[index] = replace(items[index], error=error)


def _encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int] | str]:
    """Token ids of each prompt, or what is wrong with it: a chat template may refuse one conversation."""
    try:
        return list(encode_prompts(tokenizer, prompts))
    except ModelError:
        if tokenizer.chat_template is None:
            raise
    found: list[list[int] | str] = []
    for prompt in prompts:
        try:
            found += encode_prompts(tokenizer, [prompt])
        except ModelError as error:
            found.append(str(error))
    return found


def _too_long(length: int, new_tokens: int, limit: int | None) -> str | None:
    if length == 0:
        return "the prompt has no token"
    if limit is not None and length + new_tokens > limit:
        return f"too long: {length} prompt tokens and {new_tokens} new ones, but the model has {limit} positions"
    return None
