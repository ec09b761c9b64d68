"""Measure what the layers of a model keep per position of a row."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..core.attach import attach
from ..core.cache import SkipCache, layer_kv_bytes
from ..core.checkpoint_config import layer_count
from ..core.growing import ROOM, GrowingLayer
from ..core.schedule import Schedule
from ..planning.kv_bytes import LayerKV, positions_stored

#: Lengths at which the bytes of a layer's positions are measured: shorter than any window.
LENGTHS = (2, 3)


@torch.no_grad()
def measure_layer_kv(model: PreTrainedModel) -> list[LayerKV]:
    """Measure the bytes that each layer keeps for a row decoded with a ``SkipCache``, over one row of two lengths."""
    held, layers = [], []
    for length in LENGTHS:
        cache = SkipCache(attach(model), Schedule.full(layer_count(model.config)))
        ids = torch.full((1, length), 2, device=model.device)
        model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True)
        held.append([layer_kv_bytes(layer) for layer in cache.layers])
        layers = list(cache.layers)
    found = []
    for layer, less, more in zip(layers, *held, strict=True):
        window, room = getattr(layer, "sliding_window", None), ROOM * isinstance(layer, GrowingLayer)
        short, long = (positions_stored(length, length, window, room) for length in LENGTHS)
        slope = (more - less) / (long - short) if long > short else 0.0
        found.append(LayerKV(less - slope * short, slope, window, room))
    return found
