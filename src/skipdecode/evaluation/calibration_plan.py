"""What is fitted to what, and what the model's config rules out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.checkpoint_config import is_trained, layer_count, schedules_of, trained_method
from ..core.decays import ORDERS
from ..core.schedule import Schedule, is_schedule, parse_prompt_layers
from ..data.tasks import Task, get_task
from ..errors import UsageError
from ..files import check_target
from ..methods import METHODS, get_method
from ..planning.clock import check_profile
from ..planning.fitting import Lengths, Measure
from ..planning.planner import CLOCKS, Predictor, workloads
from ..planning.profile import Profile
from ..weights.loading import DEMO, resolve


@dataclass(frozen=True)
class CalibrationPlan:
    """What to fit a schedule to, and how.

    Args:
        model: directory, hub name or ``demo``.
        data: rows like those to come: a file, in which prompts are enough, or the task's folder or hub name.
        speedup: the ratio of ``clock`` that decode steps, or jobs, are to achieve.
        task: how rows are prompted and scored.
        method: whose depths are fitted.
        limit: use so many inputs, evenly drawn.
        batch_size: as it will be used: a batch runs until its longest row ends.
        max_new_tokens: None: the task's.
        decay: None: as trained, else linear.
        prompt_layers: layers that the prompt runs: a number, or ``max`` for as many as the first step runs. None: as
            trained, else all.
        order: ``top``, ``bottom``, ``even``, or ``search``: from the loss on the data's responses. None: as trained,
            else ``top``.
        search_rows: rows that the search computes its losses on.
        clock: ``layers`` that decode steps run; or with a profile the seconds of a ``step`` or of the whole ``job``.
        profile: what ``skipdecode profile`` measured on this machine, with the options of the jobs to come.
        output: gets the schedule as JSON.
        save: whether :meth:`Calibration.save` will be called: that it can be is then checked first.
        device: as :func:`skipdecode.load` takes it.

    Raises:
        UsageError: values that contradict each other or are out of range.
        ScheduleError: prompt_layers that say nothing.
    """

    model: str
    data: Path
    speedup: float = 2.0
    task: Task = field(default_factory=lambda: get_task("jsonl"))
    method: str = "skipdecode"
    limit: int = 256
    batch_size: int = 32
    max_new_tokens: int | None = None
    decay: str | None = None
    order: str | None = None
    search_rows: int = 64
    prompt_layers: int | str | None = None
    clock: str = "layers"
    profile: Profile | None = None
    output: Path | None = None
    save: bool = False
    device: str | None = None

    def measure(self, prompt_tokens: Sequence[int]) -> Callable[[Sequence[int]], Measure]:
        """Decode steps of batches -> what ``speedup`` is a ratio of: layers, or seconds as the profile predicts them.

        ``prompt_tokens``: of each row, in any order; batches are made of like ones, the longest first.
        """
        profile = self.profile
        if profile is None or self.clock == "layers":
            return Lengths
        works = workloads(prompt_tokens, self.batch_size, self.max_new_tokens or self.task.max_new_tokens)
        Predictor(profile, works, self.clock)  # what it does not reach shows before anything is written

        def predicted(lengths: Sequence[int]) -> Measure:
            batches = [replace(work, new_tokens=max(n, 1) + 1) for work, n in zip(works, lengths, strict=False)]
            return Predictor(profile, batches, self.clock)

        return predicted

    def __post_init__(self) -> None:
        for name in ("data", "output"):  # strings are paths too
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, Path(getattr(self, name)))
        object.__setattr__(self, "prompt_layers", parse_prompt_layers(self.prompt_layers))
        if self.clock not in CLOCKS or (self.clock != "layers" and self.profile is None):
            raise UsageError(f"clock is layers, or step or job with a profile, not {self.clock!r}")
        if self.clock == "layers" and self.profile is not None:
            raise UsageError("a profile goes with the clocks step and job")
        if self.clock != "layers" and self.save:
            raise UsageError(
                "a config has schedules for speed-ups of layers: a clock's schedule stays in its file, for --schedule"
            )
        method = get_method(self.method)
        if self.clock != "layers" and method.order is None:
            raise UsageError(f"{self.method} has its own rule for depths: it fits layers only")
        if not method.fits_depths:
            others = ", ".join(name for name in METHODS if get_method(name).fits_depths)
            raise UsageError(f"{self.method} has no depths to fit; methods that have are {others}")
        if not method.takes_style and (self.order or self.decay or self.prompt_layers):
            raise UsageError(f"order, decay and prompt_layers cannot be set for {self.method}: it has its own")
        if self.order is not None and self.order not in (*ORDERS, "search"):
            raise UsageError(f"order is {', '.join(ORDERS)} or search, not {self.order!r}")
        for name in ("limit", "batch_size", "max_new_tokens", "search_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is at least 1, not {value}")


def check(plan: CalibrationPlan, config: Any) -> None:
    """What the model's config and the disk rule out. Raises UsageError, FileError."""
    layers = layer_count(config)
    if plan.profile is not None:
        # Its options are those of the jobs to come: here nothing is timed.
        check_profile(plan.profile, config, device=plan.device, **plan.profile.options)
    if not 1 < plan.speedup <= layers:
        raise UsageError(f"a speed-up is above 1 and at most the number of layers ({layers}), not {plan.speedup:g}")
    if plan.save and (resolve(plan.model) == str(DEMO) or not Path(resolve(plan.model)).is_dir()):
        raise UsageError(f"the schedule can only be saved into a local model directory, which {plan.model} is not")
    if plan.save and is_trained(config) and trained_method(config) != plan.method:
        raise UsageError(
            f"{plan.model} was trained by {trained_method(config)}: its schedules are not {plan.method}'s to change"
        )
    if plan.output is not None:
        check_target(plan.output, may_replace=is_schedule)


def trained_form(plan: CalibrationPlan, config: Any) -> tuple[Schedule | None, dict[str, Any]]:
    """The schedule whose depths are kept if they can be, and the form of a new one.

    Raises UsageError, ScheduleError: no schedule can have this form.
    """
    method, layers = get_method(plan.method), layer_count(config)
    known = {k: s for k, s in schedules_of(config, plan.method).items() if not s.is_full}
    trained = known.get(plan.speedup)
    if method.order is None:
        return trained, {}
    source = trained or (known[max(known)] if known else None)
    if source and source.decay == "list" and plan.decay is None:
        raise UsageError(f"{plan.model} was trained with a list of depths, which has no form to fit: give a --decay")
    order = None if plan.order == "search" else plan.order
    given: dict[str, Any] = {"decay": plan.decay, "order": order, "prompt_layers": plan.prompt_layers}
    asked = {name: value for name, value in given.items() if value is not None}
    style: dict[str, Any] = {"order": method.order, "decay": "linear", **(source.style if source else {}), **asked}
    in_prompt = style.get("prompt_layers")
    deepest = in_prompt if isinstance(in_prompt, int) else layers
    Schedule(layers, deepest, deepest, 1, **style)  # contradictions show before the weights are loaded
    if plan.clock == "layers" and deepest * plan.speedup < layers:
        raise UsageError(f"{plan.speedup:g}x runs more than {deepest} layers at a step: depths never rise")
    if trained and ("list" in (trained.decay, style["decay"]) or "constant" in {trained.decay} ^ {style["decay"]}):
        trained = None  # such depths are no use in the form asked for
    if trained and trained.max_depth > deepest:
        trained = None
    return trained and trained.replace(**asked), style
