"""Gates: each runs its decoder layer on all positions, on a prefix of them, or passes the hidden states on.

A gate patches the layer *instance*: no model subclass, no copied modelling code, the same state-dict keys. It acts
only if a pass carries a :class:`~skipdecode.model.cache.SkipCache` or runs inside ``teacher_forced``.
"""

from __future__ import annotations

import threading
import weakref
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from ..errors import CacheError, UnsupportedModel
from ..schedule import Schedule
from .adapter import Adapter
from .cache import SkipCache
from .patch import Patch
from .prefix import Prefix, packed


class Gate(Patch):
    """Replacement of one layer's ``forward``."""

    gates: Gates

    def __init__(self, layer: nn.Module, name: str, gates: Gates, index: int) -> None:
        super().__init__(layer, name, gates)
        self.index = index

    # Depths change from step to step: torch.compile breaks the graph here and compiles the layer by itself.
    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on the positions that need it; return its output, other positions' hidden states unchanged."""
        gates = self.gates
        cache = find_cache(args, kwargs)
        guide = gates.forced_pass() if cache is None else cache  # tells how many positions each layer runs
        if guide is None:
            return self.original(*args, **kwargs)
        if cache is None and any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            raise CacheError(
                "a teacher-forced pass can fill no cache: call model.generate outside of teacher_forced, and leave "
                "use_cache and caches out of passes inside"
            )
        if cache is not None and cache.gates is not gates:
            raise CacheError("this SkipCache was made for another model: make one with SkipCache(model, schedule)")
        last = gates.handed_on  # read once: other threads set it
        before = last and last()
        if before is not None and any(each is before for each in (*args, *kwargs.values())):
            raise UnsupportedModel("a layer hands the next one more than hidden states: none can be skipped")
        hidden = args[0] if args else kwargs["hidden_states"]
        axis = gates.axis(hidden, guide.shape)
        width = hidden.shape[axis]
        count = guide.begin_layer(self.index, width)
        if self.index == 0 and width > 1:  # once a pass, since reading ids waits for the device
            refuse_packed(kwargs)
        if width != guide.width:
            # The model has dropped all but the last ``width`` positions: count which of them this layer runs.
            if self.index not in gates.kv_shared_layers:
                raise CacheError(f"layer {self.index} is given {width} of {guide.width} positions: it cannot skip")
            count = max(count - (guide.width - width), 0)
        if gates.adapter is not None:
            counts = guide.counts
            if width != guide.width:
                counts = [max(each - (guide.width - width), 0) for each in counts]
            hidden = gates.adapter.apply_before(self.index, hidden, axis, counts)
            if args:
                args = (hidden, *args[1:])
            else:
                kwargs = kwargs | {"hidden_states": hidden}
        if count == 0:
            if not gates.output_is_known:
                self._learn_output(Prefix(width, 1, guide.keys(self.index), axis), args, kwargs)
            return gates.like_output(hidden)
        if count < width:
            args, kwargs = Prefix(width, count, guide.keys(self.index), axis).of_call(self.original, args, kwargs)
        output = self.original(*args, **kwargs)
        if cache is not None:
            cache.end_layer(self.index)
        may_lend = not gates.output_is_known and not gates.kv_shared_layers
        if may_lend and any(isinstance(value, UserDict) and value for value in kwargs.values()):
            raise UnsupportedModel(
                "layers lend each other states of which the config says nothing: none can be skipped"
            )
        gates.learn_output(output)
        beside = output[1:] if isinstance(output, tuple) else ()
        states = (each for each in beside if isinstance(each, Tensor) and each.is_floating_point())
        gates.handed_on = next(map(weakref.ref, states), None)
        if count == width:
            return output
        ran = output[0] if isinstance(output, tuple) else output
        rest = hidden.narrow(axis, count, width - count)
        return gates.like_output(torch.cat([ran, rest.to(ran.device)], dim=axis))

    def _learn_output(self, one: Prefix, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the layer on ``one``, a prefix of one position, only to learn what it returns besides hidden states."""
        args, kwargs = one.of_call(self.original, args, kwargs)
        args = tuple(None if isinstance(v, SkipCache) else v for v in args)
        kwargs = {k: None if isinstance(v, SkipCache) else v for k, v in kwargs.items()}
        with torch.no_grad(), torch.random.fork_rng():
            self.gates.learn_output(self.original(*args, **kwargs))


class Gates:
    """State that the gates of one model share."""

    def __init__(self, kv_shared_layers: Mapping[int, int]) -> None:
        #: By layer that attends to another layer's keys and values: that layer.
        self.kv_shared_layers = dict(kv_shared_layers)
        #: The current teacher-forced pass of each thread.
        self.forced: dict[int, TeacherForcedPass] = {}
        #: By thread: the cache that its next forward pass must carry, and the ids or embeddings of that pass.
        self.expected: dict[int, tuple[Callable[[], SkipCache | None], Any]] = {}
        #: Stand-ins for skipped layers; None: hidden states pass a skipped layer unchanged.
        self.adapter: Adapter | None = None
        self.output_is_known = False
        #: A state that the layer that ran last returned beside hidden states: the next one must not need it. (Indices
        #: that it may reuse are known from the config.)
        self.handed_on: weakref.ref[Tensor] | None = None
        self._axis: int | None = None  # of the positions in hidden states that also have an axis of streams
        self._extras: int | None = None  # number of values returned after hidden states; None: no tuple is returned

    def __getstate__(self) -> dict[str, Any]:
        """Return the state that a copy of the model gets: all but the passes that threads are running."""
        return vars(self) | {"forced": {}, "expected": {}, "handed_on": None}

    def forced_pass(self) -> TeacherForcedPass | None:
        """Return the pass that this thread runs inside ``teacher_forced``; None outside."""
        forced = self.forced.get(threading.get_ident())
        # Autograd recomputes checkpointed layers in its own threads, which are not in ``forced``.
        if forced is None and self.forced and torch._C._current_graph_task_id() != -1:
            if len(self.forced) > 1:
                raise CacheError("several threads train one model with gradient checkpointing: train in one")
            forced = next(iter(self.forced.values()))
        return forced

    def learn_output(self, output: Any) -> None:
        """Remember, from one layer's output, whether layers return a tensor or a tuple, and of what length."""
        self._extras = len(output) - 1 if isinstance(output, tuple) else None
        self.output_is_known = True

    def like_output(self, hidden: Tensor) -> Any:
        """Return ``hidden`` as layers of this model do: alone, or as a tuple filled up with None."""
        return hidden if self._extras is None else (hidden, *[None] * self._extras)

    def axis(self, hidden: Tensor, shape: tuple[int, ...] | None) -> int:
        """Return the positions' axis of hidden states; ``shape`` is (batch, positions) of the pass's ids, if known.

        Most are (batch, positions, size); Gemma 3n's have streams before batch, DeepSeek-V4's after positions.
        """
        if hidden.ndim == 3:
            return 1
        fits = [axis for axis in range(1, hidden.ndim - 1) if hidden.shape[axis - 1 : axis + 1] == shape]
        if len(fits) == 1:
            self._axis = fits[0]
        if self._axis is None:
            raise CacheError(
                f"hidden states of shape {tuple(hidden.shape)} do not show where their positions are: call the model "
                "itself, not its decoder; or first with another number of rows"
            )
        return self._axis


class TeacherForcedPass:
    """A teacher-forced pass, which tells gates how many positions to run, as a SkipCache does for a cached pass."""

    def __init__(self, schedule: Schedule, prompt_length: int) -> None:
        self.schedule = schedule
        self.prompt_length = prompt_length
        self.width = 0
        self.shape: tuple[int, ...] | None = None  # (batch, positions) of the pass's ids
        self._positions: dict[int, list[int]] = {}  # by width, since recomputation calls again

    def begin_layer(self, index: int, width: int) -> int:
        """Return how many of the pass's ``width`` positions layer ``index`` runs: the first ones; 0: it is skipped."""
        if index == 0 or self.width < width:
            self.width = width
        if self.width not in self._positions:
            self._positions[self.width] = self.schedule.positions_per_layer(self.prompt_length, self.width)
        return self.counts[index]

    @property
    def counts(self) -> list[int]:
        """Return how many positions of the pass each layer runs, from the first on."""
        return self._positions[self.width]

    def keys(self, index: int) -> int:
        """Return how many positions a mask covers: those of the pass."""
        return self.width


def refuse_packed(kwargs: dict[str, Any]) -> None:
    """Raise CacheError if a pass with these arguments packs several sequences into one row."""
    if packed(kwargs):
        raise CacheError("packed (padding-free) batches cannot skip layers: give one sequence per row, left-padded")


def find_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SkipCache | None:
    """Return the SkipCache among a pass's arguments; None if there is none."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, SkipCache)), None)
