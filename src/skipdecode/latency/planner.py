"""What schedules give in seconds on a measured machine, and which of them reach a speed-up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ScheduleError
from ..schedule import Schedule
from .profile import STEPS, Profile, predict_seconds, prompt_depth

#: Share of the speed-up asked for that a plan gives at least.
CLOSE = 0.98


@dataclass(frozen=True)
class Workload:
    """One batch: ``batch_size`` prompts of ``prompt_tokens`` with padding, each continued by ``new_tokens``."""

    batch_size: int
    prompt_tokens: int
    new_tokens: int

    @property
    def steps(self) -> int:
        """Number of decode steps; the pass over the prompt yields the first token."""
        return max(self.new_tokens - 1, 1)

    @property
    def lengths(self) -> list[int]:
        """Prompt lengths to measure at: the prompt's, and one that makes the last steps' context."""
        return sorted({self.prompt_tokens, max(self.prompt_tokens, self.prompt_tokens + self.new_tokens - STEPS - 1)})


@dataclass(frozen=True)
class Prediction:
    """What a schedule takes on a workload, and the full model's figures divided by its own."""

    schedule: Schedule
    layers: float  #: Mean of a decode step.
    step_seconds: float  #: Mean of a decode step.
    seconds: float  #: Of the batch, prompt included.
    speedups: Mapping[str, float]  #: In ``layers`` and seconds of decode steps (``decoding``), and ``end-to-end``.


def predict(profile: Profile, schedule: Schedule, work: Workload) -> Prediction:
    """Prediction for a schedule. Raises UsageError if the profile lacks the workload's batch size."""
    prompt, decoding, layers = _seconds(profile, schedule, work)
    full_prompt, full_decoding, full_layers = _seconds(profile, Schedule.full(schedule.num_layers), work)
    speedups = {
        "layers": full_layers / layers,
        "decoding": full_decoding / decoding,
        "end-to-end": (full_prompt + full_decoding) / (prompt + decoding),
    }
    return Prediction(schedule, layers / work.steps, decoding / work.steps, prompt + decoding, speedups)


def plan(
    profile: Profile, work: Workload, speedup: float, candidates: Sequence[Schedule], count: str = "end-to-end"
) -> Prediction:
    """Prediction of the deepest candidate that is faster than the full model by ``speedup``.

    Args:
        profile: measured on the machine to come.
        work: the batches to come.
        speedup: at least 1.
        candidates: schedules that the model may run: an adapter's trained ones, or all constant depths.
        count: what ``speedup`` counts, a key of :attr:`Prediction.speedups`.

    Raises:
        ScheduleError: no candidate is fast enough; the message names the highest speed-up.
    """
    predictions = [predict(profile, candidate, work) for candidate in candidates]
    fast_enough = [each for each in predictions if each.speedups[count] >= CLOSE * speedup]
    if not fast_enough:
        most = max(each.speedups[count] for each in predictions)
        raise ScheduleError(f"{speedup:g}x {count} is out of reach: at most {most:.2f}x")
    return max(fast_enough, key=lambda each: each.layers)


def constant_depths(style: Schedule) -> list[Schedule]:
    """Schedules of every constant depth, with the layer order and the prompt's rule of ``style``, deepest first."""
    least = max(style.warmup, 1) if style.order == "top" else 1
    return [at_depth(style, depth) for depth in range(style.num_layers, least - 1, -1)]


def to_measure(schedules: Sequence[Schedule]) -> list[Schedule]:
    """Constant schedules from which those of ``schedules`` can be predicted: full, shallowest, middle, deepest."""
    by_depth = {depth: at_depth(each, depth) for each in schedules for depth in each.distinct_depths}
    skipping = sorted(depth for depth, each in by_depth.items() if not each.is_full)
    full = Schedule.full(schedules[0].num_layers)
    if not skipping:
        return [full]
    chosen = sorted({skipping[0], skipping[len(skipping) // 2], skipping[-1]})
    return [full, *(by_depth[depth] for depth in chosen)]


def at_depth(schedule: Schedule, depth: int) -> Schedule:
    """Schedule of constant ``depth`` with the layer order and the prompt's rule of another."""
    in_prompt = depth if schedule.prompt_layers == schedule.max_depth else schedule.prompt_layers
    return schedule.flat(depth).replace(prompt_layers=in_prompt)


def _seconds(profile: Profile, schedule: Schedule, work: Workload) -> tuple[float, float, float]:
    """Seconds of the prompt, seconds of all decode steps, and the layers that all decode steps run together."""
    size, length = work.batch_size, work.prompt_tokens
    prompt = predict_seconds(profile.prompts, size, length, prompt_depth(schedule, length))
    decoding = 0.0
    layers = 0
    stride = max(work.steps // 128, 1)  # seconds change so slowly that every step need not be interpolated
    for step in range(0, work.steps, stride):
        depth = schedule.depth(step)
        here = min(stride, work.steps - step)
        decoding += here * predict_seconds(profile.steps, size, length + step + 1, depth)
        layers += here * depth
    return prompt, decoding, layers
