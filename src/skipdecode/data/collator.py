"""Batches of examples in which all prompts end in the same column."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import BatchEncoding, PreTrainedTokenizerBase

from .tasks import Example
from .tokenize import encode_prompts, encode_response


@dataclass
class Collator:
    """Left-pads prompts and right-pads responses, so that all prompts of a batch end in the same column.

    Widths are rounded up to ``multiple``: with a new shape in every batch, the CPU allocator's memory would grow.

    Attributes:
        max_length: positions of the model. In a wider batch, the ends of the longest responses are cut.
    """

    pad_token_id: int
    multiple: int = 8
    max_length: int | None = None

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Batch of rows with ``prompt_ids`` and ``response_ids``.

        It holds ``input_ids``, ``attention_mask`` and ``position_ids`` (batch, P + R - 1), ``labels`` (batch, 1 + R;
        -100 on padding) and ``prompt_length`` P. The last response token is a label only. The first column of labels
        is -100, because the Trainer counts a step's tokens from the second column on.
        """
        longest = max(len(row["prompt_ids"]) for row in rows)
        steps = max(len(row["response_ids"]) for row in rows) - 1
        prompt_length = _round_up(longest, self.multiple)
        fed = _round_up(steps, self.multiple)
        if self.max_length is not None:
            prompt_length = max(longest, min(prompt_length, self.max_length - steps))
            fed = min(fed, self.max_length - prompt_length)
        input_ids = torch.full((len(rows), prompt_length + fed), self.pad_token_id)
        mask = torch.zeros_like(input_ids)
        labels = torch.full((len(rows), 1 + fed + 1), -100)
        for i, row in enumerate(rows):
            response = row["response_ids"][: fed + 1]
            ids = torch.tensor([*row["prompt_ids"], *response[:-1]])
            start = prompt_length - len(row["prompt_ids"])
            input_ids[i, start : start + len(ids)] = ids
            mask[i, start : start + len(ids)] = 1
            labels[i, 1 : 1 + len(response)] = torch.tensor(response)
        return {
            "input_ids": input_ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "labels": labels,
            "prompt_length": prompt_length,
        }


def encoded(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    *,
    as_written: bool = False,
) -> list[dict[str, Any]]:
    """Rows of ``prompt_ids`` and the first reference's ``response_ids``, at most ``max_length`` ids together.

    Longer ones, and empty responses, are left out. ``as_written``: a model wrote them, see :func:`encode_response`.
    """
    prompts = encode_prompts(tokenizer, [example.prompt for example in examples])
    pairs = [(example.prompt, example.references[0]) for example in examples]
    cut = [example.cut for example in examples]
    responses = encode_response(tokenizer, pairs, as_written=as_written, cut=cut)
    return [
        # The sampler groups by "length": by the prompt's padded width first, then by the response's length.
        {"prompt_ids": prompt, "response_ids": response, "length": _round_up(len(prompt), 8) * 10_000 + len(response)}
        for prompt, response in zip(prompts, responses, strict=True)
        if response and (max_length is None or len(prompt) + len(response) <= max_length)
    ]


def batches_of(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    max_length: int | None = None,
    device: torch.device | str = "cpu",
    *,
    as_written: bool = False,
) -> list[dict[str, Any]]:
    """Batches of ``batch_size`` examples on a device; ``max_length`` and ``as_written`` as in :func:`encoded`."""
    rows = encoded(examples, tokenizer, max_length, as_written=as_written)
    return batches(rows, tokenizer, batch_size, max_length, device)


def batches(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    max_length: int | None = None,
    device: torch.device | str = "cpu",
) -> list[dict[str, Any]]:
    """Batches of encoded rows, in their order, on a device."""
    collate = Collator(tokenizer.pad_token_id, max_length=max_length)
    made = [collate(rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]
    return [dict(BatchEncoding(batch).to(device)) for batch in made]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
