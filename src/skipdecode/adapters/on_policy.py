"""Texts that the skipping model writes during its training: from them it learns to go on after its own mistakes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..core.cache import SkipCache
from ..core.cache_name import CACHE
from ..core.schedule import Schedule
from .own_texts import SAMPLED, loop_start

#: Tokens that a repetition must have in all to be cut off.
REPEATED_TOKENS = 12


def rewrite(
    model: PreTrainedModel,
    batch: Mapping[str, Any],
    schedule: Schedule,
    collate: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]],
    seed: int,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """Return a batch with the same prompts and with texts that the skipping model samples.

    A text is at most as long as the longest in ``batch``. A loop at its end is cut off but for its first round. The
    source is generalised knowledge distillation (Agarwal et al., 2024), with all texts the student's.

    Args:
        model: with gates attached, and the adapter that is trained.
        batch: as ``collate`` makes it.
        schedule: whose layers run.
        collate: makes a batch of rows of ``prompt_ids`` and ``response_ids``.
        seed, temperature: of the sampling.
    """
    width, longest = batch["prompt_length"], batch["labels"].shape[1] - 1
    ids, mask = (batch[name][:, :width] for name in ("input_ids", "attention_mask"))
    with torch.random.fork_rng([ids.device] if ids.device.type == "cuda" else []):
        torch.manual_seed(seed)
        cache = SkipCache(model, schedule)
        options = {"attention_mask": mask, CACHE: cache, "max_new_tokens": longest}
        options |= SAMPLED | {"temperature": temperature}
        written: Any = model.generate(ids, **options)
    ends = model.generation_config.eos_token_id
    ends = {*ends} if isinstance(ends, list) else {ends}
    rows = []
    for prompt, kept, text in zip(ids, mask.bool(), written[:, width:].tolist(), strict=True):
        text = text[: next((number for number, token in enumerate(text, 1) if token in ends), None)]
        loop = loop_start(text, REPEATED_TOKENS)
        rows.append({"prompt_ids": prompt[kept].tolist(), "response_ids": text if loop is None else text[:loop]})
    made = collate(rows)
    return {name: each.to(ids.device) if isinstance(each, torch.Tensor) else each for name, each in made.items()}
