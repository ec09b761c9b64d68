"""One batch of prompts through the ordinary ``model.generate``, and what it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..core.attach import attach
from ..core.cache import SkipCache, total_kv_bytes
from ..core.checkpoint_config import layer_count
from ..core.schedule import Schedule
from ..weights.device import synchronize
from .finished_rows import track_finished_rows
from .results import Completion, Cost

#: How to decode: a schedule, None for the stock model, or what makes each batch's cache for methods of their own.
Decoding = Schedule | Callable[[PreTrainedModel], DynamicCache] | None


class _Clock(LogitsProcessor):
    """Notes when the prompt's logits are there: ``generate`` calls it once per forward pass."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.calls = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.first is None:
            synchronize(scores.device)
            self.first = time.perf_counter()
        self.calls += 1
        return scores


def generate_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    decoding: Decoding,
    **options: Any,
) -> tuple[list[Completion], Cost]:
    """One batch of token-id prompts; ``decoding`` None is the stock model with its ordinary cache.

    ``options`` go to ``model.generate``; greedy unless ``do_sample`` is among them. Rows that have ended leave the
    batch (:mod:`.finished_rows`).
    """
    width = max(map(len, prompts))
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    layers = layer_count(model.config)
    cache = _cache(model, decoding)
    clock = _Clock()
    # What a checkpoint says of its cache and outputs is for others: the cache is ours, texts are what is wanted.
    defaults = {
        "do_sample": False,
        "num_return_sequences": 1,
        "pad_token_id": pad,
        "use_cache": True,
        "cache_implementation": None,
    }
    options = defaults | options
    options["logits_processor"] = LogitsProcessorList([*(options.get("logits_processor") or []), clock])
    strings = options.get("stop_strings", model.generation_config.stop_strings)
    eos = options.get("eos_token_id", model.generation_config.eos_token_id)
    stops = {eos} if isinstance(eos, int) else set(eos or ())
    finished = track_finished_rows(model, tokenizer, cache, len(prompts), stops, strings, options)
    criteria = options.pop("stopping_criteria", None)
    start = time.perf_counter()
    with finished or nullcontext():
        output = model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            tokenizer=tokenizer if strings else None,
            stopping_criteria=StoppingCriteriaList([finished]) if finished else criteria,
            **options | {"return_dict_in_generate": True},
        )
    synchronize(model.device)
    end = time.perf_counter()
    sequences = output.sequences.where(output.sequences >= 0, pad)  # beams without an end are filled up with -1
    written = sequences[:, width:].tolist()
    ends = _ends(written, stops)
    if strings:
        stop = StopStringCriteria(tokenizer, strings)
        for length in range(1, len(written[0]) + 1):
            for row, met in enumerate(stop(sequences[:, : width + length], None).tolist()):
                if met:
                    ends[row] = min(ends[row] or length, length)
    if criteria:
        ends = [end or _unpadded(row, pad) for row, end in zip(written, ends, strict=True)]
    rows = [_completion(tokenizer, row, end) for row, end in zip(written, ends, strict=True)]
    steps = clock.calls - 1
    in_prompt = decoding.positions_per_layer(width, width) if isinstance(decoding, Schedule) else [width] * layers
    cost = Cost(
        layers,
        rows=len(prompts),
        tokens=sum(row.tokens for row in rows),
        seconds=end - start,
        decode_seconds=end - (clock.first or end),
        steps=steps,
        layer_steps=sum(getattr(cache, "step_depths", [layers] * steps)),
        row_layers=getattr(cache, "row_layers", 0),
        row_steps=getattr(cache, "row_steps", 0),
        prompt_positions=width,
        prompt_layer_positions=sum(in_prompt),
        # A stock cache grows to the end, or until rows leave it.
        peak_kv_bytes=getattr(cache, "peak_kv_bytes", None)
        or max(total_kv_bytes(cache), finished.peak_kv_bytes if finished else 0),
    )
    return rows, cost


def _cache(model: PreTrainedModel, decoding: Decoding) -> DynamicCache:
    if decoding is None:
        return DynamicCache(config=model.config)
    return SkipCache(attach(model), decoding) if isinstance(decoding, Schedule) else decoding(model)


def _ends(written: Sequence[Sequence[int]], stops: set[int]) -> list[int | None]:
    """How many of each row's tokens there are up to the first of ``stops``; None if there is none."""
    return [next((n for n, token in enumerate(row, 1) if token in stops), None) for row in written]


def _unpadded(row: Sequence[int], pad: int) -> int | None:
    """How many tokens there are before the padding at the row's end; None if there is no padding."""
    length = next((n for n in range(len(row), 0, -1) if row[n - 1] != pad), 0)
    return length if length < len(row) else None


def _completion(tokenizer: PreTrainedTokenizerBase, new: list[int], end: int | None) -> Completion:
    text = tokenizer.decode(new[:end], skip_special_tokens=True).strip()
    return Completion(text, len(new[:end]), "length" if end is None else "stop")
