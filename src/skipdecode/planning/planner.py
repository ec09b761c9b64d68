"""Depths that give a speed-up on the clock: of a decode step, or of a whole job. Pure Python."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..core.schedule import Schedule, check_whole
from ..errors import ScheduleError, UsageError
from .fitting import fall, fit
from .kv_bytes import peak_kv_bytes
from .profile import Profile

#: What a speed-up may be of: layers that run, seconds of a decode step, seconds of a job with its prompt.
CLOCKS = ("layers", "step", "job")
#: What is aimed at lies so far above what is asked for: a whole layer or the machine's noise may take it back.
AIM = 1.01
#: A speed-up that comes out below the one asked for by less than this counts as had.
SHORT = 0.98


@dataclass(frozen=True)
class Workload:
    """What a batch does: ``batch_size`` rows of ``prompt_tokens`` each (padding included) write ``new_tokens`` each."""

    batch_size: int = 1
    prompt_tokens: int = 64
    new_tokens: int = 128

    def __post_init__(self) -> None:
        for name in ("batch_size", "prompt_tokens", "new_tokens"):
            check_whole(name, getattr(self, name))
        if self.new_tokens < 2:
            raise UsageError("new_tokens is at least 2: the first token is the prompt's, steps come after it")

    @property
    def steps(self) -> int:
        """Decode steps: the first token is the prompt's."""
        return self.new_tokens - 1


def workloads(prompt_tokens: Sequence[int], batch_size: int, new_tokens: int) -> list[Workload]:
    """The whole batches that rows of these prompts make: of like lengths, the longest first; one, if they are few."""
    ordered = sorted(prompt_tokens, reverse=True)
    batches = (ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size))
    works = [Workload(len(batch), batch[0], new_tokens) for batch in batches]
    return [work for work in works if work.batch_size == batch_size] or works


@dataclass(frozen=True)
class Seconds:
    """Where the time of a job goes: the prompt, and what decode steps take beyond layers and in them."""

    prompt: float
    beyond: float
    layers: float

    @property
    def steps(self) -> float:
        """Seconds of all decode steps."""
        return self.beyond + self.layers

    @property
    def job(self) -> float:
        """Seconds of prompt and decode steps."""
        return self.prompt + self.steps


class Predictor:
    """What schedules take on a machine, for batches of known sizes and lengths.

    Args:
        profile: of this model on this machine.
        workloads: one or several batches.
        clock: what :meth:`ratio` is of: ``step`` or ``job``.

    Raises:
        UsageError: a workload outside what the profile measured, or another clock.
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
        # What all batches together take up to each step: beyond layers, and in one layer of each kind.
        self._beyond, *self._layers = (
            list(map(sum, zip(*columns, strict=True))) for columns in zip(*steps, strict=True)
        )
        self._prompts: dict[Any, float] = {}
        self.full = self.seconds(Schedule.full(self.num_layers))

    def _steps(self, work: Workload) -> list[list[float]]:
        # Costs are straight lines in the context: a few hundred points of them are as good as all.
        stride = max(work.steps // 256, 1)
        rows: list[tuple[float, ...]] = []
        for step in range(work.steps):
            if step % stride == 0:
                one = self.profile.step(work.batch_size, work.prompt_tokens + step + 1)
            rows.append((one.beyond, *one.layers))
        rows += [(0.0,) * len(rows[0])] * (self.longest - work.steps)
        return [[0.0, *accumulate(column)] for column in zip(*rows, strict=True)]

    def seconds(self, schedule: Schedule) -> Seconds:
        """What the schedule takes for all workloads together."""
        kinds, layers = self.profile.layers, 0.0
        for rank, layer in enumerate(schedule.ranking[: schedule.max_depth]):
            runs = self.longest if rank < schedule.min_depth else min(fall(schedule, rank + 1), self.longest)
            layers += self._layers[kinds[layer]][runs]
        return Seconds(sum(self._prompt(schedule, work) for work in self.workloads), self._beyond[-1], layers)

    def _prompt(self, schedule: Schedule, work: Workload) -> float:
        s = schedule
        key = (
            work.batch_size,
            work.prompt_tokens,
            s.deepest,
            s.prompt_decay,
            s.prompt_decay and s.max_depth,
            s.ranking,
        )
        if key not in self._prompts:
            size, length = work.batch_size, work.prompt_tokens
            total = self.profile.prompt(size, length).beyond
            for layer, positions in enumerate(schedule.positions_per_layer(length, length)):
                if positions:
                    total += self.profile.prompt(size, positions).layers[self.profile.layers[layer]]
            self._prompts[key] = total
        return self._prompts[key]

    def ratio(self, schedule: Schedule) -> float:
        """Full depth's seconds over the schedule's: of the decode steps, or of the job."""
        return float(getattr(self.full, self._part) / getattr(self.seconds(schedule), self._part))

    @property
    def _part(self) -> str:
        return "job" if self.clock == "job" else "steps"

    def flat_depth(self, num_layers: int, speedup: float, **options: Any) -> float:
        """The constant depth, between whole ones, that gives ``speedup``."""
        in_prompt = options.get("prompt_layers")
        depths = range(1, (in_prompt if isinstance(in_prompt, int) else num_layers) + 1)
        ratios = [self.ratio(Schedule(num_layers, d, d, 1, **options | {"warmup": 0})) for d in depths]
        at = bisect_left(depths, -speedup, key=lambda depth: -ratios[depth - 1])  # ratios fall as depth grows
        if at == 0 or at == len(depths):
            return float(min(at + 1, len(depths)))
        above, below = 1 / ratios[at - 1], 1 / ratios[at]  # seconds are a straight line in the depth
        return at + (1 / speedup - above) / (below - above) if below > above else float(at)

    def kv_bytes(self, schedule: Schedule) -> float:
        """The most bytes of keys, values and states that a workload holds at once; 0 where the profile says none."""
        if not self.profile.kv_bytes:
            return 0.0
        return max(
            work.batch_size * peak_kv_bytes(self.profile.kv_bytes, schedule, work.prompt_tokens, work.steps)
            for work in set(self.workloads)
        )


@dataclass(frozen=True)
class Prediction:
    """A schedule and what it gives: times fewer layers, times faster steps and jobs than full depth's.

    Attributes:
        asked: the speed-up asked for.
        schedule: the one planned.
        layers, step, job: predicted ratios, over all decode steps, over one, over the job.
        seconds: predicted, of the schedule.
        kv_bytes: most bytes of keys and values held at once.
    """

    asked: float
    schedule: Schedule
    layers: float
    step: float
    job: float
    seconds: Seconds
    kv_bytes: float


def plan(predictor: Predictor, speedup: float, **style: Any) -> Schedule:
    """The schedule of the paper's form that gives ``speedup`` on the predictor's clock.

    Args:
        predictor: of the machine, for the workloads to come.
        speedup: against full depth, at least 1.
        style: further fields of the schedule: ``order``, ``decay``, ``prompt_layers`` and others.

    Raises:
        ScheduleError: a speed-up that this machine cannot give; the message says the highest one that it can, and what
            the time goes to.
    """
    num_layers = predictor.num_layers
    if not speedup >= 1:
        raise ScheduleError(f"a speed-up is at least 1, not {speedup}")
    if speedup == 1:
        return Schedule.full(num_layers)
    fastest = fastest_schedule(num_layers, **style)
    most = predictor.ratio(fastest)
    if most < speedup * SHORT:
        raise ScheduleError(
            f"{speedup:g}x of a {predictor.clock} cannot be had: at most {_limit(predictor, fastest, style)}"
        )
    schedule = fit(num_layers, min(speedup * AIM, most), predictor, **style)
    if predictor.ratio(schedule) < speedup * SHORT:  # whole layers lie too far apart
        in_prompt = style.get("prompt_layers")
        deepest = in_prompt if isinstance(in_prompt, int) else num_layers
        deeper = [Schedule(num_layers, d, d, 1, **style) for d in range(fastest.min_depth, deepest + 1)]
        schedule = max((each for each in deeper if predictor.ratio(each) >= speedup * SHORT), key=lambda s: s.max_depth)
    return schedule


def fastest_schedule(num_layers: int, **style: Any) -> Schedule:
    """The fewest layers that a schedule of this form can run."""
    least = max(style.get("warmup", 1), 1) if style.get("order", "top") == "top" else 1
    return Schedule(num_layers, least, least, 1, **style)


def predict(predictor: Predictor, asked: float, schedule: Schedule) -> Prediction:
    """What a schedule gives on this machine."""
    seconds, full = predictor.seconds(schedule), predictor.full
    return Prediction(
        asked,
        schedule,
        schedule.layer_ratio(predictor.typical),
        full.steps / seconds.steps,
        full.job / seconds.job,
        seconds,
        predictor.kv_bytes(schedule),
    )


def _limit(predictor: Predictor, fastest: Schedule, style: dict[str, Any]) -> str:
    """The highest speed-up in words, and what the time of the fastest schedule goes to."""
    seconds = predictor.seconds(fastest)
    work = max(predictor.workloads, key=lambda w: w.batch_size)
    near = predictor.profile.head
    head = near[min(near, key=lambda size: abs(size - work.batch_size))] if near else 0.0
    parts = {"the head": head * seconds.beyond, "the rest of a step beyond its layers": (1 - head) * seconds.beyond}
    if not near:
        parts = {"a step beyond its layers (head, embedding, sampling)": seconds.beyond}
    if predictor.clock == "job":
        parts["the prompt"] = seconds.prompt
    parts |= _attention(predictor, seconds)
    whole = sum(parts.values())
    shares = ", ".join(f"{name} {part / whole:.0%}" for name, part in sorted(parts.items(), key=lambda x: -x[1]))
    layers = f"{fastest.max_depth} of {fastest.num_layers} layers"
    words = f"{predictor.ratio(fastest):.2f}x, at {layers}, where the time goes to: {shares}"
    if predictor.clock == "job" and style.get("prompt_layers") is None:
        flat = fastest_schedule(predictor.num_layers, **style | {"prompt_layers": "max"})
        words += f"; with prompt_layers='max' at most {predictor.ratio(flat):.2f}x"
    return words


def _attention(predictor: Predictor, seconds: Seconds) -> dict[str, float]:
    """What layers take, split into what grows with the context and what does not."""
    work = max(predictor.workloads, key=lambda w: w.prompt_tokens + w.new_tokens)
    here = predictor.profile.step(work.batch_size, work.prompt_tokens + work.steps // 2 + 1).layers
    short = predictor.profile.step(work.batch_size, 1).layers
    grows = max(1 - sum(short) / sum(here), 0.0) if sum(here) else 0.0
    return {"attention to the context": grows * seconds.layers, "the layers' weights": (1 - grows) * seconds.layers}
