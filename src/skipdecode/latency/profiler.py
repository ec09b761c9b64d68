"""Measure the seconds of prompts and decode steps on this machine: :class:`~skipdecode.latency.profile.Profile`.

Hooks time each pass, each layer and the head in calls of ``generate`` on random tokens. Decode steps run no prompt but
start from a cache filled beforehand (:class:`FilledCache`). A pass that would take too long runs only some layers of
each kind, and the profile assumes that the other layers of a kind take as long.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from ..errors import ModelError, UsageError
from ..generation.batch import Decoding, Passes, generate_batch
from ..generation.generate import max_positions
from ..loading.device import machine, synchronize
from ..model.cache import SkipCache
from ..model.cache_name import CACHE
from ..model.config import bind
from ..model.inspect import decoder_layers, text_config
from ..schedule import Schedule
from .profile import Pass, Profile, shape_of

#: Decode steps per call; the first one is not counted.
STEPS = 6
#: A call whose passes would take longer runs fewer layers.
SECONDS = 2.0


class Profiler:
    """Measures a model: :meth:`profile` makes all calls, :meth:`prompt` and :meth:`steps` make one each.

    Args:
        model, tokenizer: from :func:`skipdecode.load`.
        rounds: calls of each measurement; the fastest counts.
        on_call: called after each call of ``generate`` with the number of calls so far, and of calls in all.
        options: options that the model was loaded with, except dtype and device: attention, quantization, prepack.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        rounds: int = 3,
        on_call: Callable[[int, int], object] = lambda done, total: None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.rounds, self.on_call = model, tokenizer, rounds, on_call
        self.options = dict(options or {})
        self.kinds, self.layers = layer_kinds(model)
        running = self._ranking(self._schedule(len(self.layers)))
        #: Smallest depth at which a layer of each kind runs.
        self.least = 1 + max(
            min(running.index(i) for i, k in enumerate(self.layers) if k == kind) for kind in self.layers
        )

    def profile(self, batch_sizes: Sequence[int], lengths: Sequence[int], name: str = "") -> Profile:
        """Measure each batch size at each prompt length. Raises UsageError if the model has too few positions."""
        sizes, lengths = sorted(set(batch_sizes)), sorted(set(lengths))
        check_positions(self.model.config, lengths[-1] + STEPS + 1)
        self.steps(1, lengths[0], len(self.layers))  # warms up
        measures = (self.prompt, self.steps)
        cells = [(measure, size, length) for size in sizes for length in lengths for measure in measures]
        found: dict[Any, list[Pass]] = {cell: [] for cell in cells}
        # Rounds are the outer loop so that a passing load on the machine slows all cells alike.
        for round_ in range(self.rounds):
            for done, cell in enumerate(cells, 1):
                measure, size, length = cell
                earlier = [passes[0] for (other, _, _), passes in found.items() if other == measure and passes]
                depth = self._affordable(size, length, 1 if measure == self.prompt else STEPS, earlier)
                found[cell].append(measure(size, length, depth))
                self.on_call(round_ * len(cells) + done, self.rounds * len(cells))
        return Profile(
            model=name or str(self.model.config.name_or_path),
            shape=shape_of(self.model.config),
            machine=machine(str(self.model.device)),
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=self.model.device.type,
            kinds=self.kinds,
            layers=self.layers,
            prompts=tuple(_fastest(passes) for (measure, _, _), passes in found.items() if measure == self.prompt),
            steps=tuple(_fastest(passes) for (measure, _, _), passes in found.items() if measure == self.steps),
            options=self.options,
            noise=statistics.mean(map(_noise, found.values())),
        )

    def prompt(self, size: int, length: int, depth: int) -> Pass:
        """Time a prompt in ``depth`` layers: generate one token after ``length`` tokens in each of ``size`` rows."""
        schedule = self._schedule(depth)
        return self._call(size, length, schedule, schedule, 1)

    def steps(self, size: int, length: int, depth: int) -> Pass:
        """Time decode steps in ``depth`` layers: generate in ``size`` rows, from a cache of ``length`` positions."""
        schedule = self._schedule(depth)
        first = torch.full((size, 1), self._ids(1, 1)[0][0], device=self.model.device)
        cache = FilledCache(self.model, schedule, first, length)
        return self._call(size, length + 1, schedule, lambda model: cache, STEPS)

    def _call(self, size: int, length: int, schedule: Schedule, decoding: Decoding, passes: int) -> Pass:
        """Time a ``generate`` call of ``passes`` passes; return their median, without the first if there are others."""
        exactly: dict[str, Any] = {"min_new_tokens": passes, "max_new_tokens": passes, "do_sample": False}
        ends = Passes(every=True)
        with timed_parts(self.model) as (by_layer, by_head):
            start = time.perf_counter()
            generate_batch(self.model, self.tokenizer, self._ids(size, length), decoding, passes=ends, **exactly)
        if ends.count < passes:
            raise ModelError(f"{ends.count} passes were made, not {passes}: this model ends texts early")
        ran, begins = self._ranking(schedule)[: schedule.max_depth], [start, *ends.times]
        counted = range(min(1, passes - 1), passes)
        whole = [ends.times[i] - begins[i] - sum(by_layer[layer][i] for layer in ran) for i in counted]
        head = [by_head[i] if by_head else 0.0 for i in counted]
        of_kind = [[layer for layer in ran if self.layers[layer] == kind] for kind in range(len(self.kinds))]
        return Pass(
            size,
            length + sum(counted) // len(counted),
            tuple(statistics.median(by_layer[layer][i] for layer in same for i in counted) for same in of_kind),
            statistics.median(max(outside - inside, 0.0) for outside, inside in zip(whole, head, strict=True)),
            statistics.median(head),
        )

    def _ids(self, size: int, length: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(length)
        vocabulary = text_config(self.model.config).vocab_size
        ids: list[list[int]] = torch.randint(vocabulary // 8, vocabulary, (size, length), generator=generator).tolist()
        return ids

    def _schedule(self, depth: int) -> Schedule:
        """Return a schedule of ``depth`` layers in prompt and steps, which takes layers of all kinds in turn."""
        order = sorted(range(len(self.layers)), key=lambda layer: self.layers[:layer].count(self.layers[layer]))
        return Schedule(len(self.layers), depth, depth, 1, order=tuple(order), prompt_layers=depth)

    def _ranking(self, schedule: Schedule) -> tuple[int, ...]:
        return bind(schedule, self.model.config).ranking

    def _affordable(self, size: int, length: int, passes: int, measured: Sequence[Pass]) -> int:
        """Return how many layers ``passes`` can run within :data:`SECONDS`, estimated from earlier measurements."""
        costs = [
            statistics.mean(one.layers) * (size / one.batch_size) * (length / one.length)
            for one in measured
            if one.length <= length + STEPS
        ]
        deepest = SECONDS / passes / max(min(costs), 1e-9) if costs else len(self.layers)
        return min(max(int(deepest), self.least), len(self.layers))


@contextmanager
def timed_parts(model: PreTrainedModel) -> Iterator[tuple[list[list[float]], list[float]]]:
    """Yield lists that collect the seconds of each layer, and of the head if there is one, in each pass."""
    layers, head = decoder_layers(model), model.get_output_embeddings()
    by_layer: list[list[float]] = [[] for _ in layers]
    by_head: list[float] = []

    def now() -> float:
        synchronize(model.device)
        return time.perf_counter()

    def timed(module: nn.Module, took: list[float]) -> list[Any]:
        def before(*_: Any) -> None:
            took.append(-now())

        def after(*_: Any) -> None:
            took[-1] += now()

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    modules = [*zip(layers, by_layer, strict=True), *([(head, by_head)] if head is not None else [])]
    hooks = [hook for module, took in modules for hook in timed(module, took)]
    try:
        yield by_layer, by_head
    finally:
        for hook in hooks:
            hook.remove()


class FilledCache(SkipCache):
    """A cache that looks as after a prompt, made without running one, so that ``generate`` continues with step 0.

    It repeats the keys and values of one position: their values do not change the time of a step.

    Args:
        model: the causal LM, with gates attached.
        schedule: schedule of the decode steps.
        ids: one token id for each row (rows, 1).
        length: number of positions, at least 1.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, schedule: Schedule, ids: Tensor, length: int) -> None:
        super().__init__(model, schedule)
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **{CACHE: self}, use_cache=True)
        for index, layer in enumerate(self.layers):
            if length > 1 and self._attends(index) and layer.is_initialized:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()  # their buffer fits one position
                layer.update(*(x.expand(-1, -1, length - 1, -1) for x in (layer.keys, layer.values)))
            assert not isinstance(layer, DynamicLayer) or layer.get_seq_length() in (0, length)
        self._length = length

    def begin_prompt(self) -> None:
        """Do nothing: the cache holds the prompt, so that the first pass, elsewhere the prompt's, is step 0."""


def layer_kinds(model: PreTrainedModel) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the names of the kinds of decoder layers, and the index of each layer's kind.

    Layers are of one kind if their classes, attention types and weight shapes are equal.
    """
    layers = decoder_layers(model)
    types = getattr(text_config(model.config), "layer_types", None) or [""] * len(layers)
    facts = [
        (type(layer).__name__, types[index], *sorted(str(p.shape) for p in (*layer.parameters(), *layer.buffers())))
        for index, layer in enumerate(layers)
    ]
    kinds = list(dict.fromkeys(facts))
    return tuple(" ".join(filter(None, kind[:2])) for kind in kinds), tuple(kinds.index(each) for each in facts)


def check_positions(config: Any, tokens: int) -> None:
    """Raise UsageError if a model of this config has fewer positions than ``tokens``."""
    room = max_positions(config)
    if room is not None and tokens > room:
        raise UsageError(f"prompt and new tokens are {tokens} together: the model has {room} positions")


def _fastest(calls: Sequence[Pass]) -> Pass:
    """Return the minimum over equal calls of each part, because other load on the machine only slows them."""
    layers = tuple(map(min, zip(*(call.layers for call in calls), strict=True)))
    rest, head = min(call.rest for call in calls), min(call.head for call in calls)
    return Pass(calls[0].batch_size, calls[0].length, layers, rest, head)


def _noise(calls: Sequence[Pass]) -> float:
    """Return by what share of the fastest call's seconds the median call is slower."""
    seconds = [sum(call.layers) + call.outside_layers for call in calls]
    return statistics.median_low(seconds) / min(seconds) - 1
