"""CALM (Schuster et al., 2022), the paper's baseline in which each sequence exits on its own.

It runs on a checkpoint that ``skipdecode train --method multi_exit`` trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from skipdecode.errors import UnsupportedModel
from skipdecode.evaluation.evaluate import Variant
from skipdecode.generation.generate import end_token_ids
from skipdecode.generation.stats import GenerationOutput
from skipdecode.model.inspect import decoder_layers
from skipdecode.training.read_out import ReadOut, read_out

#: Temperature of the decay of CALM's threshold, as in the SkipDecode paper.
TAU = 4


class CalmVariant(Variant):
    """A row of an evaluation's table that :func:`calm` decodes; it has no schedule."""

    depths_fixed = False

    @contextmanager
    def decoding(
        self, model: PreTrainedModel, horizon: int, generate: Callable[[Any], GenerationOutput]
    ) -> Iterator[tuple[Callable[[PreTrainedModel], DynamicCache], dict[str, Any]]]:
        """Context in which sequences exit on their own, at the threshold that was found for the target."""
        with exits(model):
            yield calm(model, self.speedup, horizon, generate)


def calm(
    model: PreTrainedModel, speedup: float, horizon: int, generate: Callable[[Any], GenerationOutput]
) -> tuple[Callable[[PreTrainedModel], DynamicCache], dict[str, Any]]:
    """Cache factory for CALM (Schuster et al., 2022) at the threshold that gives a speed-up in layers, and notes on it.

    A sequence exits at the first layer that is confident of its next token. Layers above store keys and values of the
    exit's hidden state, so that later tokens can attend to it. A batch's step lasts until the last sequence exits.
    The threshold is ``1 - 10**-x`` with ``x`` bisected, because a trained model's margins are mostly near 1.

    Args:
        model: must be inside :func:`exits` during generation.
        speedup: the full model's layers divided by those that one sequence runs.
        horizon: decode steps over which the threshold falls, at least 1.
        generate: generates some texts with a cache factory.
    """
    caches = confidence_caches(model, 1, horizon)
    low, high = 0.0, 6.0
    trials = []
    for _ in range(9):
        nines = (low + high) / 2
        stats = generate(partial(caches, threshold=1 - 10**-nines)).stats
        ratio = stats.num_layers / stats.row_depth
        trials.append((abs(ratio / speedup - 1), nines, ratio))
        if ratio < speedup:
            high = nines
        else:
            low = nines
    _, nines, ratio = min(trials)
    threshold = 1 - 10**-nines
    notes = {"threshold": threshold, "threshold_horizon": horizon, "held_out_token_ratio": round(ratio, 3)}
    return partial(caches, threshold=threshold), notes


def confidence_caches(model: PreTrainedModel, threshold: float, horizon: int) -> partial[ConfidenceCache]:
    """Function that makes a :class:`ConfidenceCache` for each batch.

    Raises UnsupportedModel if layers are recurrent, or :func:`read_out` fails.
    """
    if not all(hasattr(layer, "keys") for layer in DynamicCache(config=model.config).layers):
        raise UnsupportedModel(f"{type(model).__name__} has recurrent layers, which keep no state of skipped tokens")
    stops = sorted(end_token_ids({}, model.generation_config))
    return partial(ConfidenceCache, reader=read_out(model), threshold=threshold, horizon=horizon, stops=stops)


class ConfidenceCache(DynamicCache):
    """Cache of one batch, which also records which sequences have exited in the current step.

    Attributes:
        step_depths: layers that the batch ran in each decode step, without those run for keys and values alone.
        row_steps: decode steps summed over the sequences, without steps after a sequence's end.
        row_layers: layers that unfinished sequences ran, summed over sequences and steps.
        exited: (batch,) bool: sequences that have exited in this step, or ended.
        ended: (batch,) bool: sequences that have ended.
    """

    def __init__(self, model: PreTrainedModel, reader: ReadOut, threshold: float, horizon: int, stops: list[int]):
        super().__init__(config=model.config)
        self.reader = reader
        self.threshold = threshold
        self.horizon = horizon
        self.stops = stops
        self.step_depths: list[int] = []
        self.row_steps = 0
        self.row_layers = 0
        self.ended = self.exited = torch.tensor(False)
        self.only_storing = False  # the running layer is needed for its keys and values alone

    def confident(self, hidden: Tensor) -> Tensor:
        """Whether the top two probabilities at ``hidden`` differ by more than the threshold, (batch,) bool.

        The threshold falls with the step (CALM, equation 5).
        """
        top = self.reader(hidden[:, -1]).float().softmax(-1).topk(2).values
        decay = math.exp(-TAU * len(self.step_depths) / self.horizon)
        return top[:, 0] - top[:, 1] > min(max(0.9 * self.threshold + 0.1 * decay, 0), 1)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store keys and values; then leave the layer if its output is not needed."""
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.only_storing:
            raise _StoredError
        return states


class _StoredError(Exception):
    """Raised once keys and values are stored, to leave a layer whose output is not needed."""


@contextmanager
def exits(model: PreTrainedModel) -> Iterator[None]:
    """Context in which passes with a :class:`ConfidenceCache` exit early; others run as before."""
    with ExitStack() as changes:
        changes.enter_context(model.register_forward_pre_hook(_begin_step, with_kwargs=True))
        for index, layer in enumerate(decoder_layers(model)):
            forward = wraps(layer.forward)(partial(_run_layer, index, layer.forward))  # signatures are read
            changes.enter_context(patch.object(layer, "forward", forward))
        yield


def _cache_of(args: Any, kwargs: Any) -> ConfidenceCache | None:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, ConfidenceCache)), None)


def _begin_step(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Record the sequences whose last token, the step's input, ended them."""
    cache = _cache_of(args, kwargs)
    if cache is not None and cache.get_seq_length() > 0:
        last = kwargs["input_ids"][:, -1]
        cache.exited = cache.ended = cache.ended | torch.isin(last, torch.tensor(cache.stops, device=last.device))
        cache.step_depths.append(0)
        cache.row_steps += int((~cache.ended).sum())


def _run_layer(index: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    cache = _cache_of(args, kwargs)
    if cache is None or not cache.step_depths:  # the prompt runs all layers
        return forward(*args, **kwargs)
    hidden = args[0] if args else kwargs["hidden_states"]
    running = int((~cache.exited).sum())
    if not running:
        cache.only_storing = True
        with suppress(_StoredError):
            forward(*args, **kwargs)
        cache.only_storing = False
        return hidden
    output = forward(*args, **kwargs)
    if not isinstance(output, Tensor):
        raise UnsupportedModel("a layer returns more than hidden states: CALM cannot exit there")
    output = torch.where(cache.exited[:, None, None], hidden, output)
    cache.step_depths[-1] += 1
    cache.row_layers += running
    if index < len(cache.layers) - 1:
        cache.exited = cache.exited | cache.confident(output)
    return output
