"""Fit a schedule to a model and its data, from Python as ``skipdecode calibrate`` does it.

The horizon follows the lengths that the model really writes, and the layer order may follow from the loss:

    calibration = calibrate(CalibrationPlan("demo", Path("prompts.txt"), speedup=3))
    calibration.schedule, calibration.after.layer_ratio
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.checkpoint_config import (
    is_trained,
    layer_count,
    resolve_schedule,
    save_calibrated,
    schedules_of,
    trained_method,
)
from ..core.fitting import fit, refit
from ..core.schedule import Schedule, is_schedule
from ..core.shapes import ORDERS
from ..data.metrics import Agreement
from ..data.tasks import Example, Task, get_task, subsample
from ..errors import UsageError
from ..files import check_target
from ..generation.loading import DEMO, load, read_config, resolve
from ..methods import METHODS, get_method
from .achieve import TOLERANCE, Written, achieve
from .examples import read_examples
from .layer_order import LayerRanking, rank_layers, trials
from .loss import batches_of
from .quality import Quality, fallen, quality_of

OnProgress = Callable[[str, int, int], object]


@dataclass(frozen=True)
class CalibrationPlan:
    """What to fit a schedule to, and how.

    Args:
        model: directory, hub name or ``demo``.
        data: rows like those to come: a file, in which prompts are enough, or the task's folder or hub name.
        speedup: the layer ratio that decode steps are to achieve.
        task: how rows are prompted and scored.
        method: whose depths are fitted.
        limit: use so many inputs, evenly drawn.
        batch_size: as it will be used: a batch runs until its longest row ends.
        max_new_tokens: None: the task's.
        decay: None: as trained, else linear.
        order: ``top``, ``bottom``, ``even``, or ``search``: from the loss on the data's responses. None: as trained,
            else ``top``.
        search_rows: rows that the search computes its losses on.
        output: gets the schedule as JSON.
        save: whether :meth:`Calibration.save` will be called: that it can be is then checked first.
        device: as :func:`skipdecode.load` takes it.

    Raises:
        UsageError: values that contradict each other or are out of range.
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
    output: Path | None = None
    save: bool = False
    device: str | None = None

    def __post_init__(self) -> None:
        for name in ("data", "output"):  # strings are paths too
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, Path(getattr(self, name)))
        method = get_method(self.method)
        if not method.fits_depths:
            others = ", ".join(name for name in METHODS if get_method(name).fits_depths)
            raise UsageError(f"{self.method} has no depths to fit; methods that have are {others}")
        if not method.takes_form and (self.order or self.decay):
            raise UsageError(f"order and decay cannot be set for {self.method}: it has its own")
        if self.order is not None and self.order not in (*ORDERS, "search"):
            raise UsageError(f"order is {', '.join(ORDERS)} or search, not {self.order!r}")
        for name in ("limit", "batch_size", "max_new_tokens", "search_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is at least 1, not {value}")


@dataclass(frozen=True)
class Calibration:
    """A fitted schedule, and what it changes.

    Attributes:
        plan: what was asked for.
        before, after, full: texts of the schedule there was, of the fitted one, and of the full model.
        quality: each score by its label; agreement with full depth comes last.
        trained: the schedule that was trained for this speed-up, in the form asked for; None if there is none.
        ranking: the layer order that was searched for, if it was.
    """

    plan: CalibrationPlan
    before: Written
    after: Written
    full: Written
    quality: Mapping[str, Quality]
    trained: Schedule | None = None
    ranking: LayerRanking | None = None

    @property
    def schedule(self) -> Schedule:
        """The fitted one."""
        return self.after.schedule

    def remarks(self) -> list[str]:
        """What the user should know: depths other than the trained ones, a ratio that is not achieved."""
        new, old, target = self.schedule, self.trained, f"{self.plan.speedup:g}x"
        lines = []
        if old and (new.max_depth, new.min_depth) != (old.max_depth, old.min_depth):
            lines.append(
                f"no horizon gives {target} over these lengths with the {old.max_depth} to {old.min_depth} layers "
                f"that were trained: the depths moved to {new.max_depth} to {new.min_depth}"
            )
        if abs(self.after.layer_ratio / self.plan.speedup - 1) > TOLERANCE:
            lines.append(f"{self.plan.method} comes no nearer to {target} with {new.num_layers} layers")
        return lines

    def summary(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        losses = {"losses": [round(loss, 4) for loss in self.ranking.losses]} if self.ranking else {}
        old = {"schedule": self.before.schedule.to_dict(), "layer_ratio": round(self.before.layer_ratio, 3)}
        return losses | {
            "schedule": self.schedule.to_dict(),
            "speedup": self.plan.speedup,
            "layer_ratio": round(self.after.layer_ratio, 3),
            "lengths": list(self.after.lengths),
            "before": old,
            "quality": {name: {k: round(v, 2) for k, v in vars(each).items()} for name, each in self.quality.items()},
        }

    def save(self, force: bool = False) -> Path:
        """Put the schedule into the model's config, where ``speedup`` of every verb finds it. Returns the config.

        Raises:
            UsageError: a score falls by more than POINTS, and ``force`` is not set; nothing is written.
        """
        if (worse := fallen(self.quality)) and not force:
            falls = ", ".join(f"{name} falls from {q.before:.2f} to {q.after:.2f}" for name, q in worse.items())
            raise UsageError(
                f"{falls} (layer ratio {self.before.layer_ratio:.2f}x before, {self.after.layer_ratio:.2f}x after): "
                f"{self.plan.model} stays as it was. Train with --schedule {self.plan.output}, or give --force to save "
                "it all the same"
            )
        folder = Path(resolve(self.plan.model))
        save_calibrated(folder, self.plan.speedup, self.schedule, self.plan.method)
        return folder / "config.json"


def calibrate(
    plan: CalibrationPlan,
    *,
    say: Callable[[str], object] = warnings.warn,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Calibration:
    """Let the model write, fit the schedule to the lengths, write again: until the texts achieve the speed-up.

    What the model was trained with stays: order, decay, warm-up, and the depths if a horizon can be found for them.

    Args:
        plan: what to fit to.
        say: called with a line about each bad row.
        on_progress: called with what is under way, how much of it is done, and of how much.

    Raises:
        SkipDecodeError: data, model or options that cannot be used; said before the model is loaded.
    """
    config = read_config(plan.model)
    _check(plan, config)
    before = resolve_schedule(config, plan.speedup)
    trained, form = _trained_form(plan, config)
    examples = read_examples(plan.task, plan.data, "validation", say)
    if not examples and not plan.data.is_file():
        examples = plan.task.read(plan.data, "train")
    if not examples:
        raise UsageError(f"{plan.data} holds no rows")
    examples = subsample(examples, plan.limit)
    if plan.order == "search" and not all(example.references for example in examples):
        raise UsageError("order search computes its losses on responses: every row needs one")
    Agreement().score(["a text"], [["a text"]])  # a library that is missing shows before a model is loaded
    model, tokenizer = load(plan.model, device=plan.device)
    ranking = None
    if plan.order == "search":
        ranking = _search(plan, model, tokenizer, examples, on_progress)
        form["order"] = ranking.order
        trained = trained and trained.replace(order=ranking.order)
    texts = achieve(
        model,
        tokenizer,
        [example.prompt for example in examples],
        _rule(plan, before.num_layers, trained, form),
        plan.speedup,
        before,
        keep=trained == before,
        batch_size=plan.batch_size,
        on_rows=lambda done, total: on_progress("texts (rows)", done, total),
        max_new_tokens=plan.max_new_tokens or plan.task.max_new_tokens,
        do_sample=False,
    )
    if plan.output is not None:
        texts[1].schedule.save(plan.output)
    return Calibration(plan, *texts, quality_of(*texts, examples), trained, ranking)


def _check(plan: CalibrationPlan, config: Any) -> None:
    """What the model's config and the disk rule out."""
    layers = layer_count(config)
    if not 1 < plan.speedup <= layers:
        raise UsageError(f"a speed-up is above 1 and at most the number of layers ({layers}), not {plan.speedup:g}")
    if plan.save and (resolve(plan.model) == str(DEMO) or not Path(resolve(plan.model)).is_dir()):
        raise UsageError(f"the schedule can only be saved into a local model directory, which {plan.model} is not")
    if plan.save and is_trained(config) and trained_method(config) != plan.method:
        raise UsageError(
            f"{plan.model} was trained by {trained_method(config)}: its schedules are not {plan.method}'s to change"
        )
    if plan.output is not None:
        check_target(plan.output, ours=is_schedule)


def _trained_form(plan: CalibrationPlan, config: Any) -> tuple[Schedule | None, dict[str, Any]]:
    """The schedule whose depths are kept if they can be, and the form of a new one."""
    method, layers = get_method(plan.method), layer_count(config)
    known = {k: s for k, s in schedules_of(config, plan.method).items() if not s.is_full}
    trained = known.get(plan.speedup)
    if method.order is None:
        return trained, {}
    source = trained or (known[max(known)] if known else None)
    if source and source.decay == "list" and plan.decay is None:
        raise UsageError(f"{plan.model} was trained with a list of depths, which has no form to fit: give a --decay")
    asked = {"decay": plan.decay, "order": None if plan.order == "search" else plan.order}
    form: dict[str, Any] = {"order": method.order, "decay": "linear", **(source.form if source else {})}
    form |= {name: value for name, value in asked.items() if value is not None}
    Schedule(layers, layers, layers, 1, **form)  # contradictions show before the weights are loaded
    if trained and ("list" in (trained.decay, form["decay"]) or "constant" in {trained.decay} ^ {form["decay"]}):
        trained = None  # such depths are no use in the form asked for
    return trained and trained.replace(**form), form


def _rule(
    plan: CalibrationPlan, num_layers: int, trained: Schedule | None, form: Mapping[str, Any]
) -> Callable[[Sequence[int]], Schedule]:
    """Lengths -> schedule: the trained depths over another horizon if that is enough, else new depths."""
    method = get_method(plan.method)

    def fitted(lengths: Sequence[int]) -> Schedule:
        if method.order is None:
            return method.schedule(num_layers, plan.speedup, lengths)
        return (trained and refit(trained, plan.speedup, lengths)) or fit(num_layers, plan.speedup, lengths, **form)

    return fitted


def _search(
    plan: CalibrationPlan,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    on_progress: OnProgress,
) -> LayerRanking:
    """The layer order found from the loss on the examples' responses."""
    batches = batches_of(subsample(examples, plan.search_rows), tokenizer, model, plan.batch_size)
    passes = iter(range(1, trials(layer_count(model.config)) + 1))
    total = trials(layer_count(model.config))
    return rank_layers(model, batches, on_trial=lambda: on_progress("layer order (passes)", next(passes), total))
