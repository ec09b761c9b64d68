"""Baselines that leave before the last layer: multi-layer exit and CALM, and how any layer's states are read out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ..core.attach import attach
from ..core.patch import Patch, put
from ..core.schedule import Schedule
from ..core.stack import decoder_layers
from ..errors import ModelError, UsageError
from ..methods.base import Method
from ..methods.objectives import Objective, token_loss

#: Temperature of the decay of CALM's threshold, the paper's.
TAU = 4

#: Hidden states (..., hidden size) to logits (..., vocabulary).
ReadOut = Callable[[Tensor], Tensor]


class MultiExit(Method):
    """SkipDecode's depths counted from the bottom, with every layer's exit trained: the paper's first baseline."""

    name = "multi_exit"
    label = "multi-layer exit"
    order = "bottom"
    trains_exits = True

    def is_trained_by(self, name: str) -> bool:
        """CALM is trained by the same loss."""
        return name in ("multi_exit", "calm")

    def objective(self, model: PreTrainedModel, schedules: Mapping[float, Schedule]) -> Objective | None:
        """Mean cross-entropy over all exits: no budget is favoured, and CALM may leave anywhere."""
        return ExitLoss(model)


class ExitLoss(Objective):
    """All layers run on all columns, whatever was drawn: an exit at depth d only ever sees layers below d."""

    hidden_states = True

    def __init__(self, model: PreTrainedModel) -> None:
        self.count = len(decoder_layers(model))
        self.schedule = Schedule.full(self.count)
        self.reader = read_out(model)

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """The mean of the exits' losses, a scalar."""
        width = labels.shape[1] - 1
        early = [states[:, -width:] for states in outputs.hidden_states[1 : self.count]]
        logits = [*map(self.reader, early), outputs.logits]
        return torch.stack([token_loss(exit, labels, num_items_in_batch) for exit in logits]).mean()


class Calm(MultiExit):
    """CALM-DEC (Schuster et al., 2022): a token leaves at the first layer that is confident of it.

    Trained as multi-layer exit is. Its depths are not known before it runs: a threshold stands for a budget. The layers
    above an exit write their keys and values from the state it left with, so that later tokens can attend to it. In a
    batch each row leaves on its own, but the pass ends only when its last row has left: both counts are kept.
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
        **options: Any,
    ) -> tuple[Callable[[PreTrainedModel], DynamicCache], dict[str, Any]]:
        """Exit at the threshold at which single tokens of held-out texts run ``speedup`` times fewer layers.

        The number of nines in it is bisected: a trained model's margins crowd near 1.
        """
        horizon = max(lengths())
        low, high, trials = 0.0, 6.0, []
        for _ in range(9):
            nines = (low + high) / 2
            threshold = 1 - 10**-nines
            cost = decode(self.decoder(model, threshold, horizon, **options))
            ratio = cost.num_layers / cost.row_depth
            trials.append((abs(ratio / speedup - 1), threshold, ratio))
            low, high = (low, nines) if ratio < speedup else (nines, high)
        _, threshold, ratio = min(trials)
        notes = {"threshold": threshold, "threshold_horizon": horizon, "held_out_token_ratio": round(ratio, 3)}
        return self.decoder(model, threshold, horizon, **options), notes

    def decoder(
        self, model: PreTrainedModel, threshold: float, horizon: int, **options: Any
    ) -> Callable[[PreTrainedModel], DynamicCache]:
        """Makes a cache per batch that exits by confidence.

        Args:
            model: gets gates that such a cache acts in, and that are inert without one.
            threshold: the paper's lambda, 0 to 1; nine tenths of it and a tenth that decays over ``horizon`` tokens is
                what the margin must exceed (its equation 5).
            horizon: tokens.
            options: as ``model.generate`` will get them: an ``eos_token_id`` here goes before the model's own.

        Raises:
            ModelError: a layer of the model keeps a state in place of keys and values, or its layers cannot be read.
            UsageError: a horizon below 1.
        """
        if not horizon >= 1:
            raise UsageError(f"the threshold decays over a horizon of at least 1 token, not {horizon}")
        if not all(hasattr(layer, "keys") for layer in DynamicCache(config=model.config).layers):
            raise ModelError(
                f"{type(model).__name__} has recurrent layers: one that a token leaves out keeps no state for the next"
            )
        install_exits(model)
        ends = options.get("eos_token_id", model.generation_config.eos_token_id)
        stops = ends if isinstance(ends, list) else [] if ends is None else [ends]
        return partial(ConfidenceCache, reader=read_out(model), threshold=threshold, horizon=horizon, stops=stops)


class ConfidenceCache(DynamicCache):
    """The cache of one batch, and what is known of its rows in the step under way.

    Attributes:
        step_depths: layers that the batch ran in each decode step (keys and values alone do not count).
        row_steps: decode steps of its rows, those after their end left out.
        peak_kv_bytes: most bytes of keys and values held at once.
    """

    def __init__(
        self, model: PreTrainedModel, reader: ReadOut, threshold: float, horizon: int, stops: list[int]
    ) -> None:
        super().__init__(config=model.config)
        self.reader = reader
        self.threshold = threshold
        self.horizon = horizon
        self.stops = stops  # token ids that end a row
        self.step_depths: list[int] = []
        self.row_steps = 0
        self.peak_kv_bytes = 0
        self.finished: Tensor | None = None  # (batch,): rows that are past their end: they hold no batch up
        self._row_layers: Tensor | int = 0  # read once, at the end: a look at it waits for the device
        self.left = torch.zeros(0, dtype=torch.bool)  # (batch,): rows that have left in this step
        self.writing = False  # a layer is run for its keys and values alone

    @property
    def row_layers(self) -> int:
        """Layers that its unfinished rows ran, each counted alone."""
        return int(self._row_layers)

    def confident(self, hidden: Tensor) -> Tensor:
        """Rows of ``hidden`` (batch, 1, width) whose two likeliest tokens differ by more than the threshold."""
        top = self.reader(hidden[:, -1]).float().softmax(-1).topk(2).values
        decay = math.exp(-TAU * len(self.step_depths) / self.horizon)
        return top[:, 0] - top[:, 1] > min(max(0.9 * self.threshold + 0.1 * decay, 0), 1)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store; with every row gone, the rest of the layer is not run."""
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == len(self.layers) - 1:
            kept = (x for layer in self.layers for x in (layer.keys, layer.values) if x is not None)
            self.peak_kv_bytes = max(self.peak_kv_bytes, sum(x.nbytes for x in kept))
        if self.writing:
            raise _Written
        return states


class _Written(Exception):
    """Keys and values are stored: nothing else of this layer is wanted."""


class _Exit(Patch):
    """Stands in for one layer's gate while a ConfidenceCache comes through."""

    def __init__(self, layer: nn.Module, name: str, index: int) -> None:
        super().__init__(layer, name)
        self.index = index
        self.extras: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = next((v for v in (*args, *kwargs.values()) if isinstance(v, ConfidenceCache)), None)
        if cache is None or cache.get_seq_length(self.index) == 0:  # the prompt runs whole
            output = self.original(*args, **kwargs)
            self.extras = len(output) - 1 if isinstance(output, tuple) else None
            return output
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.index == 0:
            rows = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
            cache.left = rows if cache.finished is None else cache.finished.clone()
            cache.step_depths.append(0)
            cache.row_steps += int((~cache.left).sum())
        if bool(cache.left.all()):
            cache.writing = True
            try:
                self.original(*args, **kwargs)
            except _Written:
                pass
            finally:
                cache.writing = False
            return hidden if self.extras is None else (hidden, *[None] * self.extras)
        output = self.original(*args, **kwargs)
        ran = output[0] if isinstance(output, tuple) else output
        ran = torch.where(cache.left[:, None, None], hidden, ran)
        cache.step_depths[-1] += 1
        cache._row_layers = cache._row_layers + (~cache.left).sum()
        if self.index < len(cache.layers) - 1:
            cache.left = cache.left | cache.confident(ran)
        return (ran, *output[1:]) if isinstance(output, tuple) else ran


class _Ends(Patch):
    """Stands in for the model's ``forward``: notes the rows of a ConfidenceCache that are past their end."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache, ids = kwargs.get("past_key_values"), kwargs.get("input_ids")
        if isinstance(cache, ConfidenceCache) and ids is not None and cache.get_seq_length() > 0:
            ended = torch.isin(ids[:, -1], torch.tensor(cache.stops, device=ids.device))
            cache.finished = ended if cache.finished is None else cache.finished | ended
        return self.original(*args, **kwargs)


def install_exits(model: nn.Module) -> None:
    """Let ConfidenceCaches act on this model until ``detach``; without one it runs as before."""
    for index, layer in enumerate(decoder_layers(attach(model))):
        put(_Exit, layer, "forward", index)
    put(_Ends, model, "forward")


def read_out(model: nn.Module) -> ReadOut:
    """A function from hidden states (..., hidden size) to logits (..., vocabulary): final norm, projection, LM head.

    The modules are those that a pass calls after its last decoder layer; a trial pass checks that they make its logits.

    Raises:
        ModelError: the model does more than that between its last layer and its logits (soft-capping, say).
    """
    last = decoder_layers(model)[-1]
    tail: list[nn.Module] = []
    seen: list[Tensor] = []

    def layer_done(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    def called(module: nn.Module, args: Any, output: Any) -> None:
        if seen:
            tail.append(module)

    inner = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    leaves = [m for m in model.modules() if id(m) not in inner and not any(m.children())]
    hooks = [leaf.register_forward_hook(called) for leaf in leaves] + [last.register_forward_hook(layer_done)]
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
