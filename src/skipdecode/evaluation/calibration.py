"""Fit a schedule to a model and its data, from Python as ``skipdecode calibrate`` does it.

The horizon follows the lengths that the model really writes, and the layer order may follow from the loss:

    calibration = calibrate(CalibrationPlan("demo", Path("prompts.txt"), speedup=3))
    calibration.schedule, calibration.after.step_layer_ratio
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.checkpoint_config import layer_count, save_calibrated, schedule_for
from ..core.schedule import Schedule
from ..data.metrics import Agreement
from ..data.tasks import Example, subsample
from ..data.tokenization import encode_prompts
from ..errors import UsageError
from ..methods import get_method
from ..planning.fitting import Measure, fit, refit
from ..planning.planner import Predictor
from ..planning.planner import plan as plan_depths
from ..weights.loading import load, load_tokenizer, read_config, resolve
from .achieve import TOLERANCE, Written, achieve
from .calibration_plan import CalibrationPlan, check, trained_form
from .examples import read_examples
from .layer_order import LayerRanking, rank_layers, trials
from .loss import batches_of
from .quality import Quality, fallen, quality_of

__all__ = ["Calibration", "CalibrationPlan", "calibrate"]

OnProgress = Callable[[str, int, int], object]


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
        if abs(self.after.ratio / self.plan.speedup - 1) > TOLERANCE:
            lines.append(f"{self.plan.method} comes no nearer to {target} with {new.num_layers} layers")
        return lines

    def summary(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        losses = {"losses": [round(loss, 4) for loss in self.ranking.losses]} if self.ranking else {}
        old = {"schedule": self.before.schedule.to_dict(), **self.before.ratios()}
        return losses | {
            "schedule": self.schedule.to_dict(),
            "speedup": self.plan.speedup,
            "clock": self.plan.clock,
            "ratio": round(self.after.ratio, 3),
            **self.after.ratios(),
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
                f"{falls} (a step's layer ratio is {self.before.step_layer_ratio:.2f}x before, "
                f"{self.after.step_layer_ratio:.2f}x after): "
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

    What was trained stays: order, decay, warm-up, the prompt's layers, and the depths if a horizon fits them.

    Args:
        plan: what to fit to.
        say: called with a line about each bad row.
        on_progress: called with what is under way, how much of it is done, and of how much.

    Raises:
        SkipDecodeError: data, model or options that cannot be used; said before the model is loaded.
    """
    config = read_config(plan.model)
    check(plan, config)
    before = schedule_for(config, plan.speedup)
    trained, style = trained_form(plan, config)
    examples = read_examples(plan.task, plan.data, "validation", say)
    if not examples and not plan.data.is_file():
        examples = plan.task.read(plan.data, "train")
    if not examples:
        raise UsageError(f"{plan.data} holds no rows")
    examples = subsample(examples, plan.limit)
    if plan.order == "search" and not all(example.references for example in examples):
        raise UsageError("order search computes its losses on responses: every row needs one")
    Agreement().score(["a text"], [["a text"]])  # a library that is missing shows before a model is loaded
    prompts = [example.prompt for example in examples]
    measure = plan.measure([len(ids) for ids in encode_prompts(load_tokenizer(plan.model), prompts)])
    model, tokenizer = load(plan.model, device=plan.device)
    ranking = None
    if plan.order == "search":
        ranking = _search(plan, model, tokenizer, examples, on_progress)
        style["order"] = ranking.order
        trained = trained and trained.replace(order=ranking.order)
    texts = achieve(
        model,
        tokenizer,
        prompts,
        _rule(plan, before.num_layers, trained, style, measure),
        plan.speedup,
        before,
        measure,
        keep=trained == before,
        batch_size=plan.batch_size,
        on_rows=lambda done, total: on_progress("texts (rows)", done, total),
        max_new_tokens=plan.max_new_tokens or plan.task.max_new_tokens,
        do_sample=False,
    )
    if plan.output is not None:
        texts[1].schedule.save(plan.output)
    return Calibration(plan, *texts, quality_of(*texts, examples), trained, ranking)


def _rule(
    plan: CalibrationPlan,
    num_layers: int,
    trained: Schedule | None,
    style: Mapping[str, Any],
    measure: Callable[[Sequence[int]], Measure],
) -> Callable[[Sequence[int]], Schedule]:
    """Decode steps of batches -> schedule: the trained depths over another horizon if that will do, else new ones."""
    method = get_method(plan.method)

    def with_lenders_first(lengths: Sequence[int]) -> Schedule:
        if method.order is None:
            return method.schedule(num_layers, plan.speedup, lengths)
        measured = measure(lengths)
        kept = trained and refit(trained, plan.speedup, measured)
        if kept is None and isinstance(measured, Predictor):
            return plan_depths(measured, plan.speedup, **style)  # says what cannot be had
        return kept or fit(num_layers, plan.speedup, measured, **style)

    return with_lenders_first


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
