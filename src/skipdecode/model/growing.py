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

    ``keys`` and ``values`` (batch, heads, positions, size) are the filled part of two larger tensors, the room. Whoever
    replaces them (beam search, cropping) frees it; the next update makes a new one. With gradients, which forbid
    writing in place, each update concatenates instead.
    """

    keys: Tensor
    values: Tensor
    _room: tuple[Tensor, Tensor] | None = None  # for keys and values

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; when ``keys`` are replaced, free the spare room."""
        if name == "keys":
            self._room = None
        super().__setattr__(name, value)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new positions, and return those of all positions."""
        if key_states.requires_grad or value_states.requires_grad or key_states.dtype != value_states.dtype:
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        room = self._room
        if room is None or not self._fits(room[0], key_states, end):
            room = self._with_room(self.keys, key_states, end), self._with_room(self.values, value_states, end)
        for whole, states in zip(room, (key_states, value_states), strict=True):
            whole.narrow(-2, start, end - start).copy_(states)
        self.keys, self.values = room[0].narrow(-2, 0, end), room[1].narrow(-2, 0, end)
        self._room = room
        return self.keys, self.values

    def _fits(self, room: Tensor, states: Tensor, end: int) -> bool:
        """Tell whether ``room`` can take ``states`` up to position ``end``: large enough, of their dtype, writable."""
        writable = not room.is_inference() or torch.is_inference_mode_enabled()
        return room.shape[-2] >= end and room.dtype == states.dtype and writable

    def _with_room(self, held: Tensor, states: Tensor, end: int) -> Tensor:
        room = states.new_empty((*states.shape[:-2], end + ROOM, states.shape[-1]))
        if start := self.get_seq_length():
            room.narrow(-2, 0, start).copy_(held)
        return room

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory that keys and values take, including spare room."""
        held = self._room or (self.keys, self.values)
        return sum(x.numel() * x.element_size() for x in held if x is not None)
