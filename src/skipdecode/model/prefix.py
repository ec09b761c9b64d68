"""Cut a decoder layer's arguments (hidden states, masks, position ids, embeddings) to the first positions."""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import CacheError


@dataclass(frozen=True)
class Prefix:
    """The first ``queries`` of the ``width`` positions that a layer is given, which are the last of a mask's ``keys``.

    ``width`` is less than ``keys`` if a cache holds earlier positions, or if the model drops positions that its upper
    layers need not compute.
    """

    width: int
    queries: int
    keys: int
    hidden_axis: int = 1

    @property
    def seen(self) -> int:
        """Return the number of key positions that the queries can attend to."""
        return self.keys - self.width + self.queries

    def of_call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return (args, kwargs) of a call of ``forward`` with every tensor of positions cut to the prefix."""
        names = list(inspect.signature(forward).parameters)[: len(args)]
        names += [""] * (len(args) - len(names))
        cut = tuple(self._cut(name, value) for name, value in zip(names, args, strict=True))
        return cut, {name: self._cut(name, value) for name, value in kwargs.items()}

    def _cut(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._cut_tensor(name, value)
        if isinstance(value, UserDict):
            return _SharedPrefix(value, self.seen)
        if isinstance(value, dict):
            return {key: self._cut(name, item) for key, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._cut(name, item) for item in value)
        return value

    def _cut_tensor(self, name: str, value: Tensor) -> Tensor:
        shape = value.shape
        if value.ndim >= 3 and any(word in name for word in ("mask", "bias", "alibi")):
            # (batch, heads, queries, keys), or (batch * heads, 1, keys) with one mask for all queries.
            if shape[-1] != self.keys or shape[-2] not in (1, self.width):
                if "mask" not in name:  # a bias for the longest possible input, which the layer cuts itself
                    return value
                raise CacheError(f"{name} of shape {tuple(shape)} does not show its {self.keys} positions")
            return value[..., : self.seen] if shape[-2] == 1 else value[..., : self.queries, : self.seen]
        if value.ndim <= 2 and (
            "mask" in name or not (value.is_floating_point() or value.is_complex())
        ):  # (batch, positions): ids and padding
            if shape[-1:] == (self.keys,):
                return value[..., : self.seen]
            return value[..., : self.queries] if shape[-1:] == (self.width,) else value
        if not (value.is_floating_point() or value.is_complex()):  # (sections, batch, positions)
            return value[..., : self.queries] if shape[-1] == self.width else value
        # Hidden states, and embeddings of any kind (…, positions, size).
        axes = (self.hidden_axis, value.ndim - 2) if value.ndim > 3 else (value.ndim - 2, 1)
        axis = next((axis for axis in axes if 0 <= axis < value.ndim and shape[axis] == self.width), None)
        return value if axis is None else value.narrow(axis, 0, self.queries)


class _SharedPrefix(UserDict[Any, Any]):
    """A dict of keys and values that layers share: lenders write to the original, borrowers read a prefix of it."""

    def __init__(self, shared: UserDict[Any, Any], seen: int) -> None:
        super().__init__()
        self.data = shared.data
        self._seen = seen

    def __getitem__(self, key: Any) -> tuple[Tensor, ...]:
        """Return the tensors (batch, heads, positions, size) of an entry, cut to the prefix."""
        return tuple(states[..., : self._seen, :] for states in self.data[key])

    def to(self, *args: Any, **kwargs: Any) -> _SharedPrefix:
        """Move all tensors, as transformers' own container does: accelerate moves a layer's arguments."""
        for key, states in list(self.data.items()):
            self.data[key] = tuple(x.to(*args, **kwargs) for x in states)
        return self


def packed(kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a pass with these arguments packs several sequences, with several prompt ends, into one row."""
    positions = kwargs.get("position_ids")
    if any(key.startswith("cu_seq_lens") and value is not None for key, value in kwargs.items()):
        return True
    if not isinstance(positions, Tensor) or positions.ndim != 2:
        return False
    restarts = (positions[:, :-1] == 0) & (positions[:, 1:] == 1)
    return bool((restarts.sum(1) > 1).any())
