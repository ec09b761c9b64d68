"""Baselines that exit before the last layer (multi-layer exit, CALM), and logits from any layer's hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ..errors import ModelError
from ..generation.options import end_tokens
from ..model.attach import attach
from ..model.cache_name import CACHE
from ..model.gate import Patch, put
from ..model.inspect import decoder_layers
from .methods_base import Method

#: The paper's temperature for the decay of CALM's threshold.
TAU = 4

#: Maps hidden states (..., hidden size) to logits (..., vocabulary).
ReadOut = Callable[[Tensor], Tensor]


class MultiExit(Method):
    """The SkipDecode paper's first baseline: each step runs the lowest layers, and every layer's exit is trained."""

    name = "multi_exit"
    label = "multi-layer exit"
    order = "bottom"
    trains_exits = True

    def is_trained_by(self, name: str) -> bool:
        """Tell whether the method called ``name`` has the same loss: multi-layer exit and CALM."""
        return name in ("multi_exit", "calm")


class Calm(MultiExit):
    """CALM-DEC (Schuster et al., 2022): a token exits at the first layer that is confident of it.

    It is trained like multi-layer exit. A confidence threshold, not a schedule, sets the speed-up. Layers above an exit
    compute keys and values from the exit's hidden state, so that later tokens can attend to it. In a batch each
    sequence exits alone, but a step lasts until the last exit: the cache counts layers per sequence and per batch.
    """

    name = "calm"
    label = "CALM-DEC"
    fits_depths = False

    def decoding(
        self,
        model: PreTrainedModel,
        speedup: float,
        lengths: Callable[[], Sequence[int]],
        decode: Callable[[Any], Any],
    ) -> tuple[Callable[[PreTrainedModel], DynamicCache], dict[str, Any]]:
        """Return the :meth:`decoder` at which held-out tokens run ``speedup`` times fewer layers, and notes on it.

        The threshold is ``1 - 10**-x`` with ``x`` bisected, because a trained model's margins are mostly near 1.
        """
        horizon = max(1, *lengths())
        low, high, trials = 0.0, 6.0, []
        for _ in range(9):
            nines = (low + high) / 2
            threshold = 1 - 10**-nines
            cost = decode(self.decoder(model, threshold, horizon))
            ratio = cost.num_layers / cost.row_depth
            trials.append((abs(ratio / speedup - 1), threshold, ratio))
            low, high = (low, nines) if ratio < speedup else (nines, high)
        _, threshold, ratio = min(trials)
        notes = {"threshold": threshold, "threshold_horizon": horizon, "held_out_token_ratio": round(ratio, 3)}
        return self.decoder(model, threshold, horizon), notes

    def decoder(
        self, model: PreTrainedModel, threshold: float, horizon: int
    ) -> Callable[[PreTrainedModel], DynamicCache]:
        """Return a function that makes a ConfidenceCache for each batch.

        Args:
            model: is patched to exit early when it gets such a cache.
            threshold: the paper's lambda, 0 to 1. The margin of step t must exceed 0.9 lambda + 0.1 exp(-4 t / horizon)
                (equation 5).
            horizon: in tokens, at least 1.

        Raises:
            ModelError: a layer is recurrent, or :func:`read_out` fails.
        """
        if not all(hasattr(layer, "keys") for layer in DynamicCache(config=model.config).layers):
            raise ModelError(
                f"{type(model).__name__} has recurrent layers: one that a token leaves out keeps no state for the next"
            )
        install_exits(model)
        stops = [*end_tokens({}, model.generation_config)]
        return partial(ConfidenceCache, reader=read_out(model), threshold=threshold, horizon=horizon, stops=stops)


class ConfidenceCache(DynamicCache):
    """The cache of one batch, which also records which sequences (rows) have exited in the current step.

    Attributes:
        step_depths: layers that the batch ran in each decode step (not those run for keys and values alone).
        row_steps: decode steps summed over the sequences, without steps after a sequence's end.
        row_layers: layers that unfinished sequences ran, summed over sequences and steps.
    """

    def __init__(
        self, model: PreTrainedModel, reader: ReadOut, threshold: float, horizon: int, stops: list[int]
    ) -> None:
        super().__init__(config=model.config)
        self.reader = reader
        self.threshold = threshold
        self.horizon = horizon
        self.stops = stops  # token ids that end a sequence
        self.step_depths: list[int] = []
        self.row_steps = self.row_layers = 0
        self.finished: Tensor | None = None  # (batch,): sequences that have ended
        self.left = torch.zeros(0, dtype=torch.bool)  # (batch,): sequences that have exited in this step, or ended
        self.writing = False  # the layer that runs is needed for its keys and values alone

    def confident(self, hidden: Tensor) -> Tensor:
        """Return (batch,): whether the top two probabilities at ``hidden`` differ by more than the step's threshold."""
        top = self.reader(hidden[:, -1]).float().softmax(-1).topk(2).values
        decay = math.exp(-TAU * len(self.step_depths) / self.horizon)
        return top[:, 0] - top[:, 1] > min(max(0.9 * self.threshold + 0.1 * decay, 0), 1)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store keys and values, and return those of all positions; raise ``_Written`` if the output is not needed."""
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.writing:
            raise _Written
        return states


class _Written(Exception):
    """Raised when keys and values are stored, to leave a layer whose output is not needed."""


class _Exit(Patch):
    """Patch of a layer: with a ConfidenceCache, sequences that have exited keep their hidden state."""

    def __init__(self, layer: nn.Module, name: str, index: int) -> None:
        super().__init__(layer, name)
        self.index = index
        self.extras: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = next((v for v in (*args, *kwargs.values()) if isinstance(v, ConfidenceCache)), None)
        if cache is None or cache.get_seq_length(self.index) == 0:  # the prompt runs all layers
            output = self.original(*args, **kwargs)
            self.extras = len(output) - 1 if isinstance(output, tuple) else None
            return output
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.index == 0:
            rows = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
            cache.left = rows if cache.finished is None else cache.finished.clone()
            cache.step_depths.append(0)
            cache.row_steps += int((~cache.left).sum())
        running = int((~cache.left).sum())
        if not running:
            cache.writing = True
            with suppress(_Written):
                self.original(*args, **kwargs)
            cache.writing = False  # after another error no one goes on with the cache
            return hidden if self.extras is None else (hidden, *[None] * self.extras)
        output = self.original(*args, **kwargs)
        ran = output[0] if isinstance(output, tuple) else output
        ran = torch.where(cache.left[:, None, None], hidden, ran)
        cache.step_depths[-1] += 1
        cache.row_layers += running
        if self.index < len(cache.layers) - 1:
            cache.left = cache.left | cache.confident(ran)
        return (ran, *output[1:]) if isinstance(output, tuple) else ran


class _Ends(Patch):
    """Patch of the model's ``forward``: records in a ConfidenceCache which sequences have ended."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache, ids = kwargs.get(CACHE), kwargs.get("input_ids")
        if isinstance(cache, ConfidenceCache) and ids is not None and cache.get_seq_length() > 0:
            ended = torch.isin(ids[:, -1], torch.tensor(cache.stops, device=ids.device))
            cache.finished = ended if cache.finished is None else cache.finished | ended
        return self.original(*args, **kwargs)


def install_exits(model: nn.Module) -> None:
    """Patch the model to exit early when it gets a ConfidenceCache, until ``detach``; else it runs as before."""
    for index, layer in enumerate(decoder_layers(attach(model))):
        put(_Exit, layer, "forward", index)
    put(_Ends, model, "forward")


def read_out(model: nn.Module) -> ReadOut:
    """Return the function that maps hidden states to logits: final norm, projection, LM head.

    A trial pass records the modules that run after the last decoder layer. Raises ModelError if they do not yield its
    logits, because the model does more than they (soft-capping, for example).
    """
    last = decoder_layers(model)[-1]
    tail: list[nn.Module] = []
    seen: list[Tensor] = []

    def called(module: nn.Module, args: Any, output: Any) -> None:
        if module is last:
            seen.append(output[0] if isinstance(output, tuple) else output)
        elif seen and not any(module.children()):
            tail.append(module)

    hooks = [module.register_forward_hook(called) for module in model.modules()]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            ids = torch.arange(2, device=next(model.parameters()).device)[None]
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)
    with torch.no_grad():
        recomputed = _through(tail, seen[0])
    if recomputed.shape != logits.shape or not torch.allclose(recomputed, logits, rtol=1e-4, atol=1e-4):
        raise ModelError(
            f"{type(model).__name__} does more than norm and LM head after its last layer: early exits cannot read it"
        )
    return lambda hidden: _through(tail, hidden)


def _through(tail: list[nn.Module], hidden: Tensor) -> Tensor:
    for module in tail:
        hidden = module(hidden)
    return hidden
