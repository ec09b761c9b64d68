"""Measure what prompts and decode steps take here, and fit a :class:`~skipdecode.planning.profile.Profile` to it.

One call of ``generate`` is one measurement. A prompt is measured with few layers. Steps are measured on a cache that is
filled beforehand (:mod:`.filled`), so that no prompt is computed for them; the depth falls in stairs, so that one call
gives the time of a step at several depths. Least squares split the times into what a pass takes beyond its layers and
what a layer of each kind takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.schedule import Schedule
from ..core.stack import decoder_layers, text_config, with_lenders_first
from ..errors import ModelError, UsageError
from ..generation.batch import Decoding, Passes, generate_batch
from ..planning.profile import Profile, shape_of
from ..weights.device import machine, measure_peaks
from .filled import FilledCache
from .hooks import timed_head
from .layer_kv import measure_layer_kv
from .least_squares import Timed, fastest, fit_passes, off_the_line

#: Decode steps measured at each depth. The first of them does not count: it frees what the layers before it held.
STEPS = 6
#: Depths of the stairs, as shares of the greatest.
STAIRS = (1.0, 0.5, 0.25, 0.1)
#: A prompt that would take more seconds than this runs fewer layers; the rest of them are taken to cost the same.
PROMPT_SECONDS = 2.0
#: So do steps that would take more than this in all; but they run so many layers of each kind at least.
STEP_SECONDS, FEW = 6.0, 4


def layer_kinds(model: PreTrainedModel) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names of the kinds of decoder layers that a model has, and the kind of each layer.

    Layers are of a kind if their class, their attention's type and the shapes of their weights are the same.
    """
    layers = decoder_layers(model)
    types = getattr(text_config(model.config), "layer_types", None) or [""] * len(layers)
    forms = [
        (
            type(layer).__name__,
            types[index],
            tuple(sorted(str(p.shape) for p in (*layer.parameters(), *layer.buffers()))),
        )
        for index, layer in enumerate(layers)
    ]
    kinds = list(dict.fromkeys(forms))
    names = tuple(" ".join(filter(None, form[:2])) for form in kinds)
    return names, tuple(kinds.index(form) for form in forms)


def check_lengths(config: Any, lengths: Sequence[int]) -> None:
    """Whether a model of this config has the positions for such prompts and the steps after them. Raises UsageError."""
    room, steps = getattr(text_config(config), "max_position_embeddings", None), len(STAIRS) * STEPS + 1
    if room is not None and max(lengths) + steps > room:
        raise UsageError(f"the model has {room} positions: a context of {max(lengths)} and {steps} more do not fit")


def dtype_of(model: PreTrainedModel) -> str:
    """The type of a model's weights, as the command line calls it."""
    return str(next(p.dtype for p in model.parameters() if p.is_floating_point())).removeprefix("torch.")


#: Calls by batch size, length and schedule.
Calls = dict[tuple[int, int, Schedule], list[Timed]]


class Profiler:
    """Measures a model: ``profile`` all that is asked for, ``prompt`` and ``steps`` one call each.

    Args:
        model, tokenizer: as loaded.
        rounds: calls of each kind, two of prompts and one of long prompts; the fastest counts.
        on_call: called after each call of ``generate`` with the number of calls so far, and of calls in all.
        options: further ones of ``generate``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        rounds: int = 3,
        on_call: Callable[[int, int], object] = lambda done, total: None,
        **options: Any,
    ) -> None:
        self.model, self.tokenizer, self.rounds, self.options = model, tokenizer, rounds, options
        self.on_call = on_call
        self.kinds, self.layers = layer_kinds(model)
        #: Layers times positions times rows that were computed: of prompts, and of steps.
        self.work = {"prompt": 0, "steps": 0}
        self._calls = self._total = 0

    def profile(self, batch_sizes: Sequence[int], lengths: Sequence[int], name: str = "") -> Profile:
        """Measure every batch size with every length of prompt, and fit.

        Raises:
            UsageError: a length that the model has no positions for.
        """
        sizes, lengths = sorted(set(batch_sizes)), sorted(set(lengths))
        check_lengths(self.model.config, lengths)
        kinds = len(self.kinds)
        # First: they need memory of their own, and without it all that is measured would be lost.
        peaks = asdict(measure_peaks(self.model.device, getattr(torch, dtype_of(self.model)), rounds=2))
        self._total = 1 + len(sizes) * (1 + len(lengths) * (kinds + (1 if kinds == 1 else 1 + kinds)))
        self.steps(1, lengths[0], next(self.stairs(len(self.layers))))  # warms up
        prompts: Calls = {}
        steps: Calls = {}
        for size in sizes:
            for length in lengths:
                deepest = self._affordable(STEP_SECONDS / (STEPS * sum(STAIRS)), size, length, steps)
                for schedule in self.stairs(max(deepest, FEW * kinds)):
                    steps[size, length, schedule] = [self.steps(size, length, schedule)]
                deepest = self._affordable(PROMPT_SECONDS, size, length, prompts)
                for schedule in self._few(deepest, two_depths=length == lengths[0]):
                    prompts[size, length, schedule] = [self.prompt(size, length, schedule)]
        # Rounds outermost: what else the machine does comes and goes, and should meet all cells alike.
        short = [cell for cell, timed in prompts.items() if timed[0].passes[0][-1] < 2 * PROMPT_SECONDS]
        self._total = self._calls + (self.rounds - 1) * len(steps) + min(self.rounds - 1, 1) * len(short)
        for round_ in range(1, self.rounds):
            for cell in steps:
                steps[cell].append(self.steps(*cell))
            for cell in short if round_ == 1 else []:  # a long prompt is an average in itself
                prompts[cell].append(self.prompt(*cell))
        of_prompts, of_steps = ([fastest(each) for each in calls.values()] for calls in (prompts, steps))
        return self._fit(of_prompts, of_steps, peaks, name)

    # --- one measurement

    def prompt(self, size: int, length: int, schedule: Schedule) -> Timed:
        """One call of ``generate`` for one token: the pass over ``length`` tokens in each of ``size`` rows."""
        start, times, _ = self._call(self._ids(size, length), schedule, 1)
        ran = with_lenders_first(schedule, self.model.config)
        self._count("prompt", size * length * ran.deepest)
        return Timed(size, length, ((self._counts(ran, ran.deepest), length, times[0] - start),))

    def steps(self, size: int, length: int, schedule: Schedule) -> Timed:
        """One call of ``generate`` that goes on after ``length`` positions, which cost nothing: ``horizon`` steps."""
        ids = self._ids(size, length + 1)
        first = torch.tensor([row[:1] for row in ids], device=self.model.device)
        _, times, head = self._call(
            ids, lambda model: FilledCache(model, schedule, first, length), max(schedule.horizon, STEPS)
        )
        ran, passes = with_lenders_first(schedule, self.model.config), []
        for depth in ran.distinct_depths:
            steps = [step for step in range(len(times)) if ran.depth(step) == depth][1:]
            if steps:
                middle = statistics.median(times[step] - times[step - 1] for step in steps)
                passes.append((self._counts(ran, depth), length + 1 + sum(steps) // len(steps), middle))
        self._count("steps", size * sum(ran.depth(step) for step in range(len(times))))
        return Timed(size, length, tuple(passes), statistics.median(head[2:] or [0.0]))

    def _call(self, ids: list[list[int]], decoding: Decoding, new: int) -> tuple[float, list[float], list[float]]:
        """When the call began, when each pass had given its logits, and what each product with the head took."""
        passes = Passes(every=True)
        options = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False} | self.options
        with timed_head(self.model) as head:
            start = time.perf_counter()
            generate_batch(self.model, self.tokenizer, ids, decoding, passes=passes, **options)
        if len(passes.times) != new:
            raise ModelError(
                f"{len(passes.times)} passes were made where {new} were asked for: this model ends texts early"
            )
        return start, passes.times, head

    def _ids(self, size: int, length: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(length)
        vocabulary = text_config(self.model.config).vocab_size
        ids: list[list[int]] = torch.randint(vocabulary // 8, vocabulary, (size, length), generator=generator).tolist()
        return ids

    def _count(self, what: str, work: int) -> None:
        self.work[what] += work
        self._calls += 1
        self.on_call(self._calls, self._total)

    # --- what runs

    def stairs(self, deepest: int) -> Iterator[Schedule]:
        """Falls in stairs: of all kinds in turn from ``deepest`` layers; of each of several kinds from a third."""
        kinds = len(self.kinds)
        for first in (None, *(range(kinds) if kinds > 1 else ())):
            most = min(deepest if first is None else max(deepest // 3, kinds), len(self.layers))
            stairs = sorted({max(round(share * most), 1) for share in STAIRS}, reverse=True)
            depths = [depth for depth in stairs for _ in range(STEPS)]
            yield Schedule.from_depths(len(self.layers), depths, order=self._order(first), prompt_layers=most)

    def _few(self, deepest: int, two_depths: bool) -> Iterator[Schedule]:
        """Prompts of layers of one kind only; with ``two_depths`` also of fewer layers of the most frequent kind."""
        num_layers = len(self.layers)
        counts = [self.layers.count(kind) for kind in range(len(self.kinds))]
        most = counts.index(max(counts))
        for kind, count in enumerate(counts):
            depths = {min(max(deepest, 1 + two_depths), count)}
            if two_depths and kind == most:
                depths.add(max(max(depths) // 3, 1))
            for depth in sorted(depths):
                yield Schedule(num_layers, depth, depth, 1, order=self._order(kind), prompt_layers=depth)

    def _affordable(self, seconds: float, size: int, length: int, calls: Calls) -> int:
        """Layers that a pass can run in so many seconds: a layer's time grows at most as rows and positions do."""
        costs = [
            timed[0].passes[0][-1] / sum(timed[0].passes[0][0]) * (size / rows) * (length / positions)
            for (rows, positions, _), timed in calls.items()
            if positions <= length
        ]
        return int(min(seconds / min(costs), len(self.layers))) if costs else len(self.layers)

    def _order(self, first: int | None) -> tuple[int, ...]:
        """The layers of one kind before all others; or all kinds in turn, in runs of 1, 1, 2, 2, 4, 4, … of each."""
        groups = [[i for i, kind in enumerate(self.layers) if kind == k] for k in range(len(self.kinds))]
        if first is not None:
            return (*groups[first], *(i for k, group in enumerate(groups) if k != first for i in group))
        order: list[int] = []
        for turn in range(len(self.layers)):
            for group in groups:
                order += group[: 2**turn]
                del group[: 2**turn]
        return tuple(order)

    def _counts(self, schedule: Schedule, depth: int) -> tuple[int, ...]:
        running = schedule.layers(depth)
        return tuple(sum(self.layers[layer] == kind for layer in running) for kind in range(len(self.kinds)))

    # --- the fit

    def _fit(self, prompts: Sequence[Timed], steps: Sequence[Timed], peaks: Mapping[str, float], name: str) -> Profile:
        profile = Profile(
            model=name or str(self.model.config.name_or_path),
            shape=shape_of(self.model.config),
            machine=machine(str(self.model.device)),
            dtype=dtype_of(self.model),
            device=self.model.device.type,
            kinds=self.kinds,
            layers=self.layers,
            prompts=fit_passes(prompts)[0],
            steps=fit_passes(steps)[0],
            kv_bytes=tuple(measure_layer_kv(self.model)),
            peaks=peaks,
        )
        beyond = {one.batch_size: one.beyond for one in profile.steps if one.beyond}
        head = {
            size: min(statistics.median(each.head for each in steps if each.batch_size == size) / whole, 1.0)
            for size, whole in beyond.items()
        }
        error = {
            "step": fit_passes(steps)[1],
            "step_line": off_the_line(profile, "steps"),
            "prompt_line": off_the_line(profile, "prompts"),
        }
        return replace(profile, head=head, error={name: value for name, value in error.items() if value is not None})
