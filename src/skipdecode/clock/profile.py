"""Measure what prompts and decode steps take here, and fit a :class:`~skipdecode.core.cost.Profile` to it.

One call of ``generate`` is one measurement: its prompt runs as many layers as its first step, and its depth then falls
in stairs, so that one prompt gives the time of a step at several depths. Least squares split the times into what a pass
takes beyond its layers and what a layer of each kind takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.cost import Profile, shape_of
from ..core.schedule import Schedule
from ..core.stack import decoder_layers, fitted, text_config
from ..errors import ModelError, UsageError
from ..generation.batch import generate_batch
from ..generation.batch_size import layer_bytes
from ..generation.machine import machine
from .hooks import Ticks, timed_head
from .least_squares import left_out, off_the_line, split

#: Decode steps measured at each depth. The first of them does not count: it frees what the layers before it held.
STEPS = 8
#: Depths of the stairs, as shares of the greatest.
STAIRS = (1.0, 0.6, 0.3)
#: A prompt that would take longer than this runs fewer layers; the rest of them are taken to cost the same.
PATIENCE = 8.0
#: Positions of a batch whose time tells how long others will take.
MANY = 512
#: The fewest layers that a long prompt is measured with.
FEW = 3


@dataclass
class Timed:
    """The times of one call.

    Attributes:
        batch_size, length: rows, and positions of the prompt.
        prompt: seconds from the call to the prompt's logits.
        prompt_layers: layers of each kind that the prompt ran.
        steps: for each stair: layers of each kind that ran, positions attended, seconds of a step.
        head: seconds of the head in a step.
    """

    batch_size: int
    length: int
    prompt: float
    prompt_layers: tuple[int, ...]
    steps: list[tuple[tuple[int, ...], int, float]] = field(default_factory=list)
    head: float = 0.0


def layer_kinds(model: PreTrainedModel) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names of the kinds of decoder layers that a model has, and the kind of each layer.

    Layers are of a kind if their class, their attention's type and the shapes of their weights are the same.
    """
    layers = decoder_layers(model)
    types = getattr(text_config(model.config), "layer_types", None) or [""] * len(layers)
    forms = [
        (type(layer).__name__, types[index], tuple(sorted(map(str, (p.shape for p in layer.parameters())))))
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


class Profiler:
    """Measures a model; ``measure`` is called for each batch size and length.

    Args:
        model, tokenizer: as loaded.
        rounds: calls of each kind, two where prompts are long; the fastest counts.
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
        self._speed = 0.0  # seconds of one layer over one position of one row, in the slowest prompt so far
        self._calls = self._total = 0

    def profile(self, batch_sizes: Sequence[int], lengths: Sequence[int], name: str = "") -> Profile:
        """Measure every batch size with every length of prompt, and fit.

        Raises:
            UsageError: a length that the model has no positions for.
        """
        sizes, lengths = sorted(set(batch_sizes)), sorted(set(lengths))
        check_lengths(self.model.config, lengths)
        self._total = len(sizes) * len(lengths) * (1 + len(self.kinds)) * self.rounds + 1
        self.measure(1, lengths[0], Schedule.full(len(self.layers)))  # warms up
        # Rounds outermost: what else the machine does comes and goes, and should meet all cells alike.
        calls: dict[tuple[int, int, Schedule], list[Timed]] = {}
        for size in sizes:
            for length in lengths:
                for schedule in self._schedules(size, length):
                    calls[size, length, schedule] = [self.measure(size, length, schedule)]
        short = [cell for cell, timed in calls.items() if timed[0].prompt < PATIENCE / 2]
        again = [[*calls], *[short] * (self.rounds - 2)][: self.rounds - 1]  # long prompts are averages in themselves
        self._total = self._calls + sum(map(len, again))
        for cells in again:
            for cell in cells:
                calls[cell].append(self.measure(*cell))
        return self._fit([_fastest(each) for each in calls.values()], name)

    # --- one measurement

    def _schedules(self, size: int, length: int) -> Iterator[Schedule]:
        """Falls in stairs: of all kinds in turn, from as many layers as patience allows; of each kind, from a third."""
        num_layers, several = len(self.layers), len(self.kinds)
        deepest = num_layers
        if self._speed:
            affordable = int(PATIENCE / (self._speed * size * length))
            deepest = min(max(affordable, FEW * several), num_layers)
        for first in (None, *range(several)):
            most = deepest if first is None else max(deepest // 3, several)
            stairs = sorted({max(round(share * most), 1) for share in STAIRS}, reverse=True)
            depths = [depth for depth in stairs for _ in range(STEPS)]
            yield Schedule.from_depths(num_layers, depths, order=self._order(first), prompt_layers=most)

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

    def measure(self, size: int, length: int, schedule: Schedule) -> Timed:
        """One call of ``generate``: ``size`` rows of ``length`` prompt tokens, and the schedule's horizon in steps."""
        ticks, new = Ticks(), schedule.horizon + 1 if schedule.horizon > 1 else STEPS
        generator = torch.Generator().manual_seed(length)
        vocabulary = text_config(self.model.config).vocab_size
        ids = torch.randint(vocabulary // 8, vocabulary, (size, length), generator=generator).tolist()
        options = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False} | self.options
        with timed_head(self.model) as head:
            start = time.perf_counter()
            generate_batch(self.model, self.tokenizer, ids, schedule, logits_processor=[ticks], **options)
        if len(ticks.times) != new:
            raise ModelError(
                f"{len(ticks.times)} passes were made where {new} were asked for: this model ends texts early"
            )
        ran = fitted(schedule, self.model.config)
        timed = Timed(
            size, length, ticks.times[0] - start, self._counts(ran, ran.deepest), head=statistics.median(head[1:])
        )
        took = [after - before for before, after in zip(ticks.times, ticks.times[1:], strict=False)]
        for depth in ran.distinct_depths:
            steps = [g for g in range(len(took)) if ran.depth(g) == depth][1:]
            if steps:
                middle = statistics.median(took[g] for g in steps)
                timed.steps.append((self._counts(ran, depth), length + 1 + sum(steps) // len(steps), middle))
        if size * length > MANY:
            self._speed = max(self._speed, timed.prompt / (size * length * ran.deepest))
        self._calls += 1
        self.on_call(self._calls, self._total)
        return timed

    def _counts(self, schedule: Schedule, depth: int) -> tuple[int, ...]:
        running = schedule.layers(depth)
        return tuple(sum(self.layers[layer] == kind for layer in running) for kind in range(len(self.kinds)))

    # --- the fit

    def _fit(self, timed: Sequence[Timed], name: str) -> Profile:
        prompts, steps, head = [], [], {}
        off: list[float] = []
        for size, length in dict.fromkeys((each.batch_size, each.length) for each in timed):
            calls = [each for each in timed if (each.batch_size, each.length) == (size, length)]
            prompts.append(split(size, length, [(each.prompt_layers, each.prompt) for each in calls]))
            stairs = [stair for each in calls for stair in each.steps]
            middle = round(statistics.mean(context for _, context, _ in stairs))
            rows = [(counts, took) for counts, _, took in stairs]
            steps.append(split(size, middle, rows))
            off += left_out(rows)
            if steps[-1].beyond:
                head[size] = min(statistics.median(each.head for each in calls) / steps[-1].beyond, 1.0)
        profile = Profile(
            model=name or str(self.model.config.name_or_path),
            shape=shape_of(self.model.config),
            machine=machine(str(self.model.device)),
            dtype=dtype_of(self.model),
            device=self.model.device.type,
            kinds=self.kinds,
            layers=self.layers,
            prompts=tuple(prompts),
            steps=tuple(steps),
            head=head,
            kv_bytes=tuple(layer_bytes(self.model)),
        )
        error = {
            "step": statistics.mean(off) if off else None,
            "step_line": off_the_line(profile, "steps"),
            "prompt_line": off_the_line(profile, "prompts"),
        }
        return replace(profile, error={name: value for name, value in error.items() if value is not None})


def _fastest(calls: Sequence[Timed]) -> Timed:
    """The least of calls that did the same: what else a machine does only ever slows."""
    one = calls[0]
    steps = [
        (stair[0][0], stair[0][1], min(took for _, _, took in stair))
        for stair in zip(*(call.steps for call in calls), strict=True)
    ]
    prompt, head = (min(getattr(call, name) for call in calls) for name in ("prompt", "head"))
    return Timed(one.batch_size, one.length, prompt, one.prompt_layers, steps, head)
