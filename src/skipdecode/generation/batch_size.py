"""``batch_size="auto"``: rows of like length, as many at once as fit into memory.

What a row takes is measured on this very model, not derived from its family: two short passes give the bytes per
position of each layer (:mod:`skipdecode.planning.kv_bytes` counts positions), a pass over the longest prompt gives
what its activations take. From the schedule follows how many layers hold how many positions at the worst moment of the
job: freed layers make room for rows. (Buckets of like length with a batch size each: BucketServe, arXiv 2507.17120.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..core.attach import attach
from ..core.cache import SkipCache, layer_kv_bytes
from ..core.checkpoint_config import layer_count
from ..core.growing import ROOM, GrowingLayer
from ..core.schedule import Schedule
from ..core.stack import with_lenders_first
from ..errors import UsageError
from ..planning.kv_bytes import LayerKV, peak_kv_bytes, positions_stored
from ..weights.memory import PeakMeter, available_memory, mapped_bytes
from .batch import Decoding, generate_batch
from .options import num_beams

BatchSize = int | Literal["auto"]

#: The share of the free memory that a batch's tensors may take. Buffers of kernels and what malloc keeps come on top:
#: processes grew by up to 1.44 times what is predicted of their tensors (docs/memory.md).
SHARE = 0.6
#: The most rows at once: a job that is killed loses a batch, and a batch goes on for its longest text.
MOST_ROWS = 256
#: Lengths at which the bytes of a layer's positions are measured: shorter than any window.
PROBES = (2, 3)


def check_batch_size(batch_size: BatchSize, options: Mapping[str, Any], defaults: GenerationConfig) -> None:
    """Raises UsageError for ``auto`` where a text would depend on it, MissingExtra where memory cannot be told."""
    if batch_size != "auto":
        return
    if options.get("do_sample") and num_beams(options, defaults) > 1:
        raise UsageError("sampled beams are drawn for a batch as a whole: give batch_size as a number")
    available_memory("cpu")


@dataclass(frozen=True)
class Footprint:
    """What one row of a batch takes.

    Attributes:
        layers: keys, values and states of each layer, for one beam.
        schedule: which layers keep theirs.
        steps: decode steps at most.
        beams: that a row is searched with.
        step_bytes: a step over hardly any text: activations, logits, and what choosing a token takes.
        width, prompt_bytes: tokens of the longest prompt, and most bytes at once in its pass.
    """

    layers: Sequence[LayerKV]
    schedule: Schedule
    steps: int
    beams: int
    step_bytes: int
    width: int
    prompt_bytes: int

    def kv_bytes(self, width: int) -> float:
        """Most keys, values and states that a prompt of ``width`` tokens and its steps hold at once, for one beam.

        (A layer that stops after the prompt is part of what was measured of the prompt's pass.)
        """
        layers = self.layers
        if self.beams > 1:  # put in order after each step, their layers move at each
            layers = [replace(each, fixed=each.fixed + each.room * each.per_position) for each in layers]
        return peak_kv_bytes(layers, self.schedule, width, self.steps)

    def row_bytes(self, width: int) -> float:
        """Most bytes that a row with a prompt of ``width`` tokens takes at once, all its beams together."""
        # What a prompt takes grows with its length, and faster than it: it lies below the line between two lengths.
        share = (width - 1) / max(self.width - 1, 1)
        prompt = self.step_bytes + max(self.prompt_bytes - self.step_bytes, 0) * share
        # A layer that grows is held twice for a moment, and so is one whose beams are put in order.
        twice = max(layer.at(width, width + self.steps) for layer in self.layers)
        return max(prompt, self.beams * (self.kv_bytes(width) + twice) + self.step_bytes)


class BatchSizes:
    """How many rows the next batch takes, for one job.

    Args:
        row_bytes: of a prompt's width: what one row takes at most.
        budget: bytes for a batch.
    """

    def __init__(self, row_bytes: Callable[[int], float], budget: float) -> None:
        self._row_bytes = row_bytes
        self._budget = budget
        self._most = MOST_ROWS

    def next(self, lengths: Sequence[int]) -> int:
        """Rows of the next batch.

        Args:
            lengths: prompt tokens of the rows to come, longest first.
        """
        like = sum(2 * length > lengths[0] for length in lengths)  # at most half of a row is padding
        fit = max(min(self._most, int(self._budget / max(self._row_bytes(lengths[0]), 1))), 1)
        return math.ceil(like / math.ceil(like / fit))  # batches of like size, not one of what is left

    def halve(self, rows: int) -> None:
        """A batch of so many rows did not fit after all."""
        self._most = max(rows // 2, 1)


def batch_sizes(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    options: Mapping[str, Any],
) -> BatchSizes:
    """Measure what a row takes, and how much memory there is now.

    Raises:
        UsageError, MissingExtra: as :func:`check_batch_size`.
    """
    check_batch_size("auto", options, model.generation_config)
    if len(prompts) == 1:
        return BatchSizes(lambda width: 0.0, 0.0)
    # Weights that are read as a file is, the system may drop and read again: nothing is gained by their room.
    budget = SHARE * available_memory(model.device, kept=mapped_bytes() if model.device.type == "cpu" else 0)
    return BatchSizes(footprint(model, tokenizer, max(prompts, key=len), decoding, options).row_bytes, budget)


def footprint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    longest: Sequence[int],
    decoding: Decoding,
    options: Mapping[str, Any],
) -> Footprint:
    """Measured with one row: four short passes and one over the longest prompt."""
    schedule = decoding if isinstance(decoding, Schedule) else Schedule.full(layer_count(model.config))
    beams = num_beams(options, model.generation_config)

    def peak(prompt: Sequence[int], new_tokens: int) -> int:
        greedy = {"do_sample": False, "num_beams": beams, "stop_strings": None}
        # A meter on torch's stack would have dynamo give up for good a model that the caller compiled.
        with torch.compiler.set_stance("force_eager"), PeakMeter() as meter:
            length = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
            generate_batch(model, tokenizer, [list(prompt)], decoding, **length, **greedy)
        return meter.peak

    new_tokens = options.get("max_new_tokens") or model.generation_config.max_new_tokens or 0
    if not new_tokens:
        new_tokens = max((options.get("max_length") or len(longest) + 20) - 1, 1)
    return Footprint(
        layers=measure_layer_kv(model, isinstance(decoding, Schedule)),
        schedule=with_lenders_first(schedule, model.config),
        steps=new_tokens - 1,
        beams=beams,
        step_bytes=peak(longest[-1:], min(3, new_tokens)),
        width=len(longest),
        prompt_bytes=peak(longest, 1),
    )


@torch.no_grad()
def measure_layer_kv(model: PreTrainedModel, skips: bool = True) -> list[LayerKV]:
    """What each layer of a model keeps for a row, measured over one row of two lengths.

    Args:
        model: as loaded.
        skips: whether it decodes with a ``SkipCache``, whose layers have room ahead.
    """
    held, layers = [], []
    for length in PROBES:
        full = Schedule.full(layer_count(model.config))
        cache = SkipCache(attach(model), full) if skips else DynamicCache(config=model.config)
        ids = torch.full((1, length), 2, device=model.device)
        model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True)
        held.append([layer_kv_bytes(layer) for layer in cache.layers])
        layers = list(cache.layers)
    found = []
    for layer, less, more in zip(layers, *held, strict=True):
        window, room = getattr(layer, "sliding_window", None), ROOM * isinstance(layer, GrowingLayer)
        short, long = (positions_stored(length, length, window, room) for length in PROBES)
        slope = (more - less) / (long - short) if long > short else 0.0
        found.append(LayerKV(less - slope * short, slope, window, room))
    return found
