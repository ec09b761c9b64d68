"""Keys and values of one layer in spare room: a step writes its position instead of copying all earlier ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

#: Spare positions that a full layer allocates. It copies earlier positions once in so many steps.
ROOM = 32


class GrowingLayer(DynamicLayer):
    """A DynamicLayer that stores the same keys and values in larger tensors.

    ``keys`` and ``values`` (batch, heads, positions, size) are the filled part of two larger tensors, the room. Beam
    search and cropping replace them; the next update makes a new room. With gradients, which forbid writing in place,
    each update concatenates instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self._room: tuple[Tensor, Tensor, Tensor] | None = None  # for keys and values; ``keys`` as last set

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new positions, and return those of all positions."""
        if key_states.requires_grad or value_states.requires_grad or key_states.dtype != value_states.dtype:
            self._room = None
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if not self._fits(key_states, end):
            self._make_room(key_states, value_states, start, end)
        assert self._room is not None
        keys, values, _ = self._room
        keys.narrow(-2, start, end - start).copy_(key_states)
        values.narrow(-2, start, end - start).copy_(value_states)
        self.keys, self.values = keys.narrow(-2, 0, end), values.narrow(-2, 0, end)
        self._room = keys, values, self.keys
        return self.keys, self.values

    def _fits(self, states: Tensor, end: int) -> bool:
        """Tell whether there is room up to position ``end``, and ``keys`` still lie in it."""
        if self._room is None or self._room[2] is not self.keys:
            return False
        room = self._room[0]
        writable = not room.is_inference() or torch.is_inference_mode_enabled()
        return room.shape[-2] >= end and room.dtype == states.dtype and writable

    def _make_room(self, key_states: Tensor, value_states: Tensor, start: int, end: int) -> None:
        old = (self.keys, self.values)
        new = []
        for held, states in zip(old, (key_states, value_states), strict=True):
            room = states.new_empty((*states.shape[:-2], end + ROOM, states.shape[-1]))
            if start:
                room.narrow(-2, 0, start).copy_(held)
            new.append(room)
        self._room = new[0], new[1], new[0]

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory held, including spare room."""
        held = (self.keys, self.values) if self._room is None else self._room[:2]
        return sum(x.numel() * x.element_size() for x in held if x is not None)

    # --- methods that replace keys and values: each frees the old room

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last positions."""
        super().crop(tokens_to_remove)
        self._leave()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replace each sequence of the batch by the beam that it continues."""
        super().reorder_cache(beam_idx)
        self._leave()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these sequences of the batch."""
        super().batch_select_indices(indices)
        self._leave()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch so many times."""
        super().batch_repeat_interleave(repeats)
        self._leave()

    def reset(self) -> None:
        """Drop all keys and values."""
        super().reset()
        self._leave()

    def _leave(self) -> None:
        if self._room is not None and self._room[2] is not self.keys:
            self._room = None
