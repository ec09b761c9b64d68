"""Plan schedules that give a speed-up in seconds, of decode steps or of a whole job. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..errors import ScheduleError, UsageError
from ..schedule import Schedule
from .fitting import constant_schedules, fall, fit
from .old_profile import Profile

#: What a speed-up may count: layers that run, seconds of decode steps, seconds of a job with its prompt.
CLOCKS = ("layers", "step", "job")
#: A plan aims at this multiple of the target, as whole layers or the machine's noise may cost the surplus.
AIM = 1.01
#: A plan reaches its target if it is predicted to give at least this share of it.
SHORT = 0.98


@dataclass(frozen=True)
class Workload:
    """One batch: ``batch_size`` prompts of ``prompt_tokens`` each (with padding), each generating ``new_tokens``."""

    batch_size: int
    prompt_tokens: int
    new_tokens: int

    @property
    def steps(self) -> int:
        """Return the number of decode steps; the pass over the prompt yields the first token."""
        return self.new_tokens - 1


def workloads(prompt_tokens: Sequence[int], batch_size: int, new_tokens: int) -> list[Workload]:
    """Return the batches of prompts of these lengths, longest first, without a smaller last one unless it is alone."""
    ordered = sorted(prompt_tokens, reverse=True)
    batches = (ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size))
    works = [Workload(len(batch), batch[0], new_tokens) for batch in batches]
    return [work for work in works if work.batch_size == batch_size] or works


@dataclass(frozen=True)
class Seconds:
    """Seconds that jobs spend on prompts, and in all decode steps on the head, the layers and the rest."""

    prompt: float
    head: float
    layers: float
    rest: float

    @property
    def steps(self) -> float:
        """Return the seconds of all decode steps."""
        return self.head + self.layers + self.rest

    @property
    def job(self) -> float:
        """Return the seconds of prompts and decode steps."""
        return self.prompt + self.steps


class Predictor:
    """A predictor of the seconds that schedules take on a machine, for batches of known sizes and lengths.

    Args:
        profile: measured with this model on this machine.
        workloads: one or several batches.
        clock: seconds that :meth:`ratio` compares: ``step`` or ``job``.

    Raises:
        UsageError: the profile does not reach a workload, there is none, or the clock is another.
    """

    def __init__(self, profile: Profile, workloads: Sequence[Workload], clock: str = "step") -> None:
        if clock not in CLOCKS[1:]:
            raise UsageError(f"a profile predicts {' and '.join(CLOCKS[1:])}, not {clock!r}")
        if not workloads:
            raise UsageError("no workload was given")
        self.profile, self.workloads, self.clock = profile, tuple(workloads), clock
        self.num_layers = profile.num_layers
        lengths = sorted(work.steps for work in workloads)
        self.longest, self.typical = lengths[-1], lengths[9 * len(lengths) // 10]
        steps = [self._steps(work) for work in workloads]
        # Seconds of all batches together up to each step: in the head, in the rest, and in one layer of each kind.
        self._head, self._rest, *self._layers = (
            list(map(sum, zip(*columns, strict=True))) for columns in zip(*steps, strict=True)
        )
        self._prompts: dict[Any, float] = {}
        self.full = self.seconds(Schedule.full(self.num_layers))

    def _steps(self, work: Workload) -> list[list[float]]:
        # Seconds are piecewise linear in the context length, so a few hundred points are enough.
        stride = max(work.steps // 256, 1)
        rows: list[tuple[float, ...]] = []
        for step in range(work.steps):
            if step % stride == 0:
                one = self.profile.step(work.batch_size, work.prompt_tokens + step + 1)
            rows.append((one.head, one.rest, *one.layers))
        rows += [(0.0,) * len(rows[0])] * (self.longest - work.steps)
        return [[0.0, *accumulate(column)] for column in zip(*rows, strict=True)]

    def seconds(self, schedule: Schedule) -> Seconds:
        """Return the seconds that the schedule takes for all workloads together."""
        kinds, layers = self.profile.layers, 0.0
        for rank, layer in enumerate(schedule.ranking[: schedule.max_depth]):
            runs = self.longest if rank < schedule.min_depth else min(fall(schedule, rank + 1), self.longest)
            layers += self._layers[kinds[layer]][runs]
        prompts = sum(self._prompt(schedule, work) for work in self.workloads)
        return Seconds(prompts, self._head[-1], layers, self._rest[-1])

    def _prompt(self, schedule: Schedule, work: Workload) -> float:
        size, length, s = work.batch_size, work.prompt_tokens, schedule
        key = (size, length, s.deepest, s.prompt_decay, s.prompt_decay and s.max_depth, s.ranking)
        if key not in self._prompts:
            total = self.profile.prompt(size, length).outside_layers
            for layer, positions in enumerate(schedule.positions_per_layer(length, length)):
                if positions:
                    total += self.profile.prompt(size, positions).layers[self.profile.layers[layer]]
            self._prompts[key] = total
        return self._prompts[key]

    def ratio(self, schedule: Schedule) -> float:
        """Return full depth's seconds over the schedule's: of steps, and with clock ``job`` of the prompt too."""
        full, skipping = self.full, self.seconds(schedule)
        return full.job / skipping.job if self.clock == "job" else full.steps / skipping.steps

    def ratios(self, schedule: Schedule) -> dict[str, float]:
        """Return speed-ups by what they count: ``layers`` of decode steps, seconds of each ``step``, of the ``job``."""
        full, skipping = self.full, self.seconds(schedule)
        layers = schedule.layer_ratio(self.typical)
        return {"layers": layers, "step": full.steps / skipping.steps, "job": full.job / skipping.job}


def plan(predictor: Predictor, speedup: float, **style: Any) -> Schedule:
    """Return the schedule of the paper's form that gives ``speedup`` on the predictor's clock.

    Args:
        predictor: for the machine and the workloads to come.
        speedup: full depth's seconds over the schedule's, at least 1.
        style: further fields of the schedule: ``order``, ``decay``, ``prompt_layers`` and others.

    Raises:
        ScheduleError: this machine cannot give the speed-up; the message says the highest one and where time goes.
    """
    num_layers = predictor.num_layers
    if not speedup >= 1:
        raise ScheduleError(f"a speed-up is at least 1, not {speedup}")
    if speedup == 1:
        return Schedule.full(num_layers)
    flats = constant_schedules(num_layers, **style)
    most = predictor.ratio(flats[0])
    if most < speedup * SHORT:
        raise ScheduleError(f"{speedup:g}x of a {predictor.clock} cannot be had: at most {_limit(predictor, style)}")
    schedule = fit(num_layers, min(speedup * AIM, most), predictor, **style)
    if predictor.ratio(schedule) >= speedup * SHORT:
        return schedule
    # The nearest schedule is too slow: take the deepest constant one that is fast enough.
    return next(flat for flat in reversed(flats) if predictor.ratio(flat) >= speedup * SHORT)


def _limit(predictor: Predictor, style: dict[str, Any]) -> str:
    """Return a text: the highest speed-up that schedules with the fields in ``style`` give, and where its time goes."""
    fastest = constant_schedules(predictor.num_layers, **style)[0]
    seconds = predictor.seconds(fastest)
    parts = {"the head": seconds.head, "these layers": seconds.layers, "embedding, sampling and the loop": seconds.rest}
    parts |= {"the prompt": seconds.prompt} if predictor.clock == "job" else {}
    whole = sum(parts.values())
    shares = ", ".join(f"{name} {part / whole:.0%}" for name, part in sorted(parts.items(), key=lambda x: -x[1]))
    layers = f"{fastest.max_depth} of {fastest.num_layers} layers"
    words = f"{predictor.ratio(fastest):.2f}x, at {layers}, where the time goes to: {shares}"
    if predictor.clock == "job" and style.get("prompt_layers") is None:
        flat = constant_schedules(predictor.num_layers, **style | {"prompt_layers": "max"})[0]
        words += f"; with prompt_layers='max' at most {predictor.ratio(flat):.2f}x"
    return words
