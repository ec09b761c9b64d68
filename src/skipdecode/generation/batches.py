"""Batches: prompts of like length, which the model has positions for, within the memory that is free."""

import math
from collections.abc import Sequence
from typing import Any

from ..errors import UsageError
from ..model.config import num_layers
from ..model.inspect import text_config

#: Padded positions of prompts that take about as long as a decode step of a batch.
STEP = 64
#: Share of the free memory that a batch may take.
SHARE = 0.5


def split_batches(
    config: Any, prompts: Sequence[Sequence[int]], batch_size: int, new_tokens: float, room: float = math.inf
) -> list[list[int]]:
    """Indices of prompts, in batches of like length, longest first: what does not fit in memory fails at once.

    A batch ends early, before shorter prompts, where their padding would take longer than the ``new_tokens`` steps of
    another batch; where rotary embeddings change, which a batch's longest row decides for all; and where more rows
    would take more than half of the ``room``, which is counted in numbers of the model's dtype.
    """
    if batch_size < 1:
        raise UsageError(f"batch_size is at least 1, not {batch_size}")
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    change = rope_change(config) or math.inf
    batches = []
    while order:
        size = batch_size
        if room < math.inf:
            size = min(size, int(SHARE * room / row_size(config, len(prompts[order[0]]) + int(new_tokens))) or 1)
        lengths = [len(prompts[i]) for i in order[:size]]
        padding = [(len(lengths) - end) * (lengths[0] - length) for end, length in enumerate(lengths)]
        end = max(range(len(lengths)), key=padding.__getitem__)  # before these rows, most padding is saved
        if padding[end] <= new_tokens * STEP:
            end = len(lengths)
        if lengths[0] > change:
            end = min(end, sum(length > change for length in lengths))
        batches.append(order[:end])
        order = order[end:]
    return batches


def row_size(config: Any, positions: int) -> int:
    """Numbers that a row of a batch takes at most: all layers' keys and values, and the pass of a prompt."""
    config = text_config(config)
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    widths = getattr(config, "intermediate_size", None) or 4 * hidden
    kv = 2 * num_layers(config) * kv_heads * (getattr(config, "head_dim", None) or hidden // heads)
    activations = 3 * (max(widths) if isinstance(widths, (list, tuple)) else widths) + 8 * hidden
    # Masks of bits and of numbers; or, in eager attention, each head's scores and what the softmax needs.
    attention = 4 * heads if config._attn_implementation == "eager" else 2
    return positions * (kv + activations + attention * positions) + 4 * config.vocab_size


def max_positions(config: Any) -> int | None:
    """Positions that the model was trained for; None if its config does not say."""
    return getattr(text_config(config), "max_position_embeddings", None)


def rope_change(config: Any) -> int | None:
    """Positions from which long RoPE rotates all keys in another way (Phi-3); None for other models."""
    rope = getattr(text_config(config), "rope_parameters", None) or {}
    return rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None


def prompt_error(config: Any, prompt: Sequence[int], new_tokens: int) -> str | None:
    """Why no text of ``new_tokens`` can follow a prompt of these token ids; None if one can."""
    if not (length := len(prompt)):
        return "the prompt has no token to go on from"
    if (largest := max(prompt)) >= (size := text_config(config).vocab_size):
        return f"the prompt has the token {largest}: the model has embeddings of {size}"
    needed = f"{length} prompt tokens and {new_tokens} new ones"
    if length + new_tokens > (limit := position_limit(config) or math.inf):
        return f"{needed}: the model has {limit} positions"
    if length <= (change := rope_change(config) or math.inf) < length + new_tokens - 1:
        return f"{needed}: long RoPE changes earlier keys at {change} positions"
    return None


def position_limit(config: Any) -> int | None:
    """Most positions that the model computes; None with RoPE, which has no limit, or if unknown."""
    return None if getattr(text_config(config), "rope_parameters", None) else max_positions(config)
