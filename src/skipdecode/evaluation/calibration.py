"""Fit a schedule to a model and its data, as ``skipdecode calibrate`` does it.

The horizon is fitted to the lengths of the texts that the model generates; the schedule's form can be searched:

    calibration = calibrate(CalibrationPlan("demo", Path("prompts.txt"), speedup=3))
    calibration.schedule, calibration.after.step_layer_ratio
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..data.collator import batches_of
from ..data.inputs import read_examples
from ..data.metrics import DEFAULT, Agreement, paired_scores
from ..data.tasks import Example, Task, get_task, subsample
from ..data.tokenize import encode_prompts
from ..decays import ORDERS
from ..errors import FileError, UsageError
from ..files import check_target, is_stream
from ..generation.generate import generate_ids, max_positions
from ..generation.stats import Cost
from ..latency.check_profile import check_profile
from ..latency.fitting import Lengths, Measure, fit, refit
from ..latency.planner import CLOCKS, Predictor, workloads
from ..latency.planner import plan as plan_depths
from ..latency.profile import Profile
from ..loading.load import DEMO, identity_of, load, load_tokenizer, read_config, refuse_adapter, resolve
from ..model.config import (
    DEFAULT_METHOD,
    is_trained,
    layer_count,
    save_calibrated,
    schedule_for,
    schedules_of,
    trained_method,
)
from ..provenance import fingerprint
from ..schedule import Schedule, is_schedule, parse_prompt_layers
from .methods import Method, get_method
from .search import Trial, Trials, is_search, search

#: Largest accepted relative error of the achieved ratio.
TOLERANCE = 0.03
#: Largest number of fitted schedules to generate with.
ROUNDS = 3
#: A schedule that lowers a score by more points than this is saved only with ``force``.
POINTS = 1.0
#: Number of texts that a search measures schedules on, and of those in a batch.
SEARCH_ROWS, SEARCH_BATCH = 64, 8
#: With fewer inputs than this, the interval of a score's difference is unreliable.
FEW_ROWS = 10


@dataclass(frozen=True)
class CalibrationPlan:
    """Settings of a calibration. It fits schedules of the method that trained the model, else SkipDecode's.

    Args:
        model: directory, hub name or ``demo``.
        data: inputs like those of later use: a file (prompts are enough), or the task's folder or hub name.
        speedup: target ratio of full depth to the schedule, in the unit of ``clock``.
        task: how inputs are prompted and scored.
        limit: largest number of inputs, evenly drawn from the data.
        batch_size: use that of later runs, because a batch decodes until its longest text ends.
        max_new_tokens: None: the task's.
        decay: None: as trained, else linear.
        order: ``top``, ``bottom`` or ``even``. None: as trained, else ``top``; in a search, all of its own.
        search: try orders and shapes of the fall (:mod:`skipdecode.evaluation.search`), not only the trained one.
        prompt_layers: number of layers that the prompt runs; ``max``: as many as step 0. None: as trained, else all.
        clock: unit of ``speedup``: ``layers`` per decode step, or with a profile seconds per ``step`` or ``job``.
        profile: from ``skipdecode profile`` on this machine, measured with the options of later runs.
        output: JSON file for the schedule; a search keeps what it measured in the same folder, in ``search_file``.
        save: whether :meth:`Calibration.save` will be called; then its preconditions are checked first.
        device: as :func:`skipdecode.load` takes it.

    Raises:
        UsageError: values contradict each other or are out of range.
        ScheduleError: ``prompt_layers`` is invalid.
    """

    model: str
    data: Path
    speedup: float = 2.0
    task: Task = field(default_factory=lambda: get_task("jsonl"))
    limit: int = 256
    batch_size: int = 32
    max_new_tokens: int | None = None
    decay: str | None = None
    order: str | None = None
    search: bool = False
    prompt_layers: int | str | None = None
    clock: str = "layers"
    profile: Profile | None = None
    output: Path | None = None
    save: bool = False
    device: str | None = None

    def __post_init__(self) -> None:
        for name in ("data", "output"):  # strings are paths too
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, Path(getattr(self, name)))
        object.__setattr__(self, "prompt_layers", parse_prompt_layers(self.prompt_layers))
        if self.clock not in CLOCKS or (self.clock == "layers") != (self.profile is None):
            raise UsageError(
                "clock is layers, or step or job with a profile (--profile FILE, which skipdecode profile measures), "
                f"not {self.clock!r}"
            )
        if self.clock != "layers" and self.save:
            raise UsageError(
                "a config has schedules for speed-ups of layers: a clock's schedule stays in its file, for --schedule"
            )
        if self.order not in (None, *ORDERS):
            raise UsageError(f"order is {', '.join(ORDERS)}, not {self.order!r}")
        if self.search and self.prompt_layers is not None:
            raise UsageError("a search leaves the prompt to all layers: no --prompt-layers beside --search")
        for name in ("limit", "batch_size", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is at least 1, not {value}")

    @property
    def search_file(self) -> Path | None:
        """Return the file that keeps what a search measured; None if the output is a stream or not written."""
        return None if self.output is None or is_stream(self.output) else self.output.with_suffix(".search.json")


@dataclass(frozen=True)
class Written:
    """The texts that a model generated with a schedule.

    Attributes:
        schedule: the schedule that ran.
        ratio: achieved ratio of full depth to the schedule in the plan's clock, over ``lengths``.
        step_layer_ratio: layers of the full model divided by the average layers per decode step.
        job_layer_ratio: the same over all positions: those of the prompt and the decode steps.
        lengths: decode steps of each batch.
        texts: generated texts in the order of the prompts.
    """

    schedule: Schedule
    ratio: float
    step_layer_ratio: float
    job_layer_ratio: float
    lengths: tuple[int, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Quality:
    """A score (0 to 100) of three schedules on ``rows`` inputs, and the 95% interval of ``after - before``."""

    full: float
    before: float
    after: float
    interval: tuple[float, float]
    rows: int

    @property
    def change(self) -> str:
        """Format the difference ``after - before`` and its interval."""
        return f"{self.after - self.before:+.2f} ({self.interval[0]:+.2f} to {self.interval[1]:+.2f})"

    def __str__(self) -> str:
        chance = self.rows < FEW_ROWS or self.interval[0] <= 0 <= self.interval[1]
        return (
            f"from {self.before:.2f} to {self.after:.2f} on {self.rows} rows, 95% interval {self.interval[0]:+.2f} to "
            f"{self.interval[1]:+.2f}" + ", which may be chance: more rows would tell" * chance
        )


@dataclass(frozen=True)
class Calibration:
    """A fitted schedule, with texts and scores before and after.

    Attributes:
        plan: the settings.
        method: name of the method whose schedule was fitted.
        before, after, full: texts with the model's previous schedule, with the fitted one, and at full depth.
        quality: scores by label; agreement with full depth comes last.
        trained: the schedule trained for this speed-up, changed as the plan says; None if there is none that can be.
        trials: the schedules of a search that were nearest to full depth; empty without a search.
    """

    plan: CalibrationPlan
    method: str
    before: Written
    after: Written
    full: Written
    quality: Mapping[str, Quality]
    trained: Schedule | None = None
    trials: Sequence[Trial] = ()

    @property
    def schedule(self) -> Schedule:
        """Return the fitted schedule."""
        return self.after.schedule

    def remarks(self) -> list[str]:
        """Return warnings for the user: depths that differ from training, a missed target, lower scores."""
        new, old, target = self.schedule, self.trained, f"{self.plan.speedup:g}x"
        lines = []
        if old and not self.trials and (new.max_depth, new.min_depth) != (old.max_depth, old.min_depth):
            lines.append(
                f"no horizon gives {target} over these lengths with the {old.max_depth} to {old.min_depth} layers "
                f"that were trained: the depths moved to {new.max_depth} to {new.min_depth}"
            )
        if abs(self.after.ratio / self.plan.speedup - 1) > TOLERANCE:
            lines.append(f"{self.method} comes no nearer to {target} with {new.num_layers} layers")
        return lines + [f"{label} falls {quality}" for label, quality in self.worse().items()]

    def worse(self) -> dict[str, Quality]:
        """Return by label the scores that fall by more than :data:`POINTS`; agreement counts only if it is alone."""
        judged = list(self.quality)[: max(len(self.quality) - 1, 1)]
        return {k: each for k, each in self.quality.items() if k in judged and each.before - each.after > POINTS}

    def summary(self) -> dict[str, Any]:
        """Return the results as plain values for JSON."""
        old, new = (
            {
                "schedule": each.schedule.to_dict(),
                "step_layer_ratio": each.step_layer_ratio,
                "job_layer_ratio": each.job_layer_ratio,
            }
            for each in (self.before, self.after)
        )
        return new | {
            "speedup": self.plan.speedup,
            "clock": self.plan.clock,
            "ratio": self.after.ratio,
            "lengths": self.after.lengths,
            "before": old,
            "quality": {name: asdict(each) for name, each in self.quality.items()},
            "trials": [trial.to_dict() for trial in self.trials],
        }

    def save(self, force: bool = False) -> Path:
        """Save the schedule in the model's config, where every command looks up ``speedup``; return the config's path.

        Raises:
            UsageError: a score falls by more than :data:`POINTS`, and ``force`` is not set; nothing is saved.
        """
        if (worse := self.worse()) and not force:
            train = (
                f"train with --schedule {self.plan.output} --speedup {self.plan.speedup:g}, or "
                if self.plan.output
                else ""
            )
            raise UsageError(
                f"{'; '.join(f'{label} falls {quality}' for label, quality in worse.items())} (a step's layer ratio is "
                f"{self.before.step_layer_ratio:.2f}x before, {self.after.step_layer_ratio:.2f}x after): "
                f"{self.plan.model} stays as it was; {train}give --force to save it all the same"
            )
        folder = Path(resolve(self.plan.model))
        save_calibrated(folder, self.plan.speedup, self.schedule, self.method)
        return folder / "config.json"


def calibrate(
    plan: CalibrationPlan,
    *,
    say: Callable[[str], object] = warnings.warn,
    on_progress: Callable[[str, int, int], object] = lambda what, done, total: None,
) -> Calibration:
    """Generate texts and fit the schedule to their lengths, repeatedly, until the texts achieve the speed-up.

    Order, decay, warm-up and prompt layers stay as trained unless the plan sets them. The depths stay as trained if
    some horizon achieves the speed-up with them.

    Args:
        plan: the settings.
        say: called with a message about each bad line of the data.
        on_progress: called with the name of the current work, the units done, and the units in all.

    Raises:
        SkipDecodeError: data, model or options are unusable; raised before the weights are loaded.
    """
    refuse_adapter(plan.model, "calibrate, which fits other depths,")
    config = read_config(plan.model)
    method = _check(plan, config)
    before = schedule_for(config, plan.speedup)
    trained, style = _schedule_fields(plan, config, method)
    examples = read_examples(plan.task, plan.data, "validation", say)
    if not examples and not plan.data.is_file():
        examples = plan.task.read(plan.data, "train")
    if not examples:
        raise UsageError(f"{plan.data} holds no rows")
    examples = subsample(examples, plan.limit)
    Agreement().score(["a text"], [["a text"]])  # raises before the weights are loaded if a library is missing
    prompts = [example.prompt for example in examples]
    measure = _measure(plan, [len(ids) for ids in encode_prompts(load_tokenizer(plan.model), prompts)])
    model, tokenizer = load(plan.model, device=plan.device)

    def fit_to(lengths: Sequence[int]) -> Schedule:
        if method.order is None:
            return method.schedule(before.num_layers, plan.speedup, lengths)
        measured = measure(lengths)
        schedule = start and refit(start, plan.speedup, measured)
        if schedule is None and isinstance(measured, Predictor):
            schedule = plan_depths(measured, plan.speedup, **style)  # its error says what is possible
        return schedule or fit(before.num_layers, plan.speedup, measured, **style)

    ids = encode_prompts(tokenizer, prompts)
    texts_of: dict[Schedule, Written] = {}
    own_texts: list[Example] = []  # of full depth, which is generated first
    done = 0

    def count(cost: Cost) -> None:
        nonlocal done
        done += cost.rows
        on_progress("texts (rows)", done, max(3 * len(prompts), done))

    def generate(schedule: Schedule) -> Written:
        if schedule not in texts_of:
            most = plan.max_new_tokens or plan.task.max_new_tokens
            options = {"max_new_tokens": most, "do_sample": False}
            result = generate_ids(model, tokenizer, ids, schedule, plan.batch_size, count, strip=False, **options)
            texts = tuple(" ".join(completion.text.split()) for completion in result.completions)
            if schedule.is_full:
                own_texts.extend(
                    Example(prompt, (each.text,), each.finish_reason == "length")
                    for prompt, each in zip(prompts, result.completions, strict=True)
                )
            ratio = measure(result.lengths).ratio(schedule) if sum(result.lengths) else 1.0
            layers = result.cost.layer_ratio, result.cost.num_layers / result.cost.job_depth
            texts_of[schedule] = Written(schedule, ratio, *layers, tuple(result.lengths), texts)
        return texts_of[schedule]

    def off(written: Written) -> float:
        return abs(written.ratio / plan.speedup - 1)

    full, old = generate(Schedule.full(before.num_layers)), generate(before)
    start, found = trained, list[Trial]()
    if plan.search:
        rows = subsample([each for each in own_texts if each.references[0].strip()], SEARCH_ROWS)
        limit = max_positions(model.config)
        batches = batches_of(rows, tokenizer, SEARCH_BATCH, limit, model.device, as_written=True)
        if not batches:
            raise UsageError(f"{plan.model} writes nothing after these prompts: there is nothing to search by")
        weights = [part for part in identity_of(plan.model) if part[0] != "config.json"]  # --save changes it
        trials = Trials(
            model,
            batches,
            file=plan.search_file,
            job=fingerprint(weights, [asdict(row) for row in rows]),
            on_pass=on_progress,
        )
        lengths = measure(full.lengths)
        found = search(trials, before.num_layers, plan.speedup, lengths, plan.order, plan.decay, trained)
        start = max((each.schedule for each in found), key=lambda each: _score(generate(each), full, examples))
        style = start.style
    near = not plan.search and trained == before and off(old) <= TOLERANCE
    tried = [old if near else generate(fit_to(full.lengths))]
    while len(tried) < ROUNDS and off(tried[-1]) > TOLERANCE:
        again = generate(fit_to(tried[-1].lengths))
        if again in tried:
            break
        tried.append(again)
    new = min(tried, key=off)
    if plan.output is not None:
        new.schedule.save(plan.output)
    return Calibration(plan, method.name, old, new, full, _quality(old, new, full, examples), trained, found)


def _measure(plan: CalibrationPlan, prompt_tokens: Sequence[int]) -> Callable[[Sequence[int]], Measure]:
    """Return a function that makes a ``Measure`` of batches' decode steps: of layers, or with a profile of seconds."""
    profile = plan.profile
    if profile is None:
        return Lengths
    works = workloads(prompt_tokens, plan.batch_size, plan.max_new_tokens or plan.task.max_new_tokens)
    Predictor(profile, works, plan.clock)  # raises before generation starts if the profile is too small

    def predicted(lengths: Sequence[int]) -> Measure:
        batches = [replace(work, new_tokens=max(n, 1) + 1) for work, n in zip(works, lengths, strict=False)]
        return Predictor(profile, batches, plan.clock)

    return predicted


def _check(plan: CalibrationPlan, config: Any) -> Method:
    """Return the method whose schedule is fitted. Raises UsageError, FileError if the plan does not fit the model."""
    layers = layer_count(config)
    method = get_method(trained_method(config) if is_trained(config) else DEFAULT_METHOD)
    if not method.fits_depths:
        raise UsageError(f"{plan.model} was trained by {method.name}, which has no depths to fit")
    if not method.takes_style and (plan.order or plan.decay or plan.prompt_layers or plan.search):
        raise UsageError(f"order, decay and prompt_layers cannot be set or searched for {method.name}: it has its own")
    if plan.profile is not None:
        if method.order is None:
            raise UsageError(f"{method.name} has its own rule for depths: it fits layers only")
        # Calibration times nothing, so it has no dtype or options of its own to compare with the profile's.
        check_profile(plan.profile, config, plan.profile.dtype, plan.device, **plan.profile.options)
    if not 1 < plan.speedup <= layers:
        raise UsageError(f"a speed-up is above 1 and at most the number of layers ({layers}), not {plan.speedup:g}")
    if plan.save and (resolve(plan.model) == str(DEMO) or not Path(resolve(plan.model)).is_dir()):
        raise UsageError(f"the schedule can only be saved into a local model directory, which {plan.model} is not")
    if plan.save and (Path(resolve(plan.model)) / "config.json").is_symlink():
        raise FileError(f"{plan.model} has a config.json that others share, by a link: copy the model before --save")
    if plan.output is not None:
        check_target(plan.output, may_replace=is_schedule)
    if plan.search and plan.search_file is not None:
        check_target(plan.search_file, may_replace=is_search)
    return method


def _schedule_fields(plan: CalibrationPlan, config: Any, method: Method) -> tuple[Schedule | None, dict[str, Any]]:
    """Return the trained schedule to start from, with the plan's order and prompt layers, and fields of schedules.

    The schedule is None if the plan's speed-up was not trained, or if the plan's prompt layers or decay need other
    depths. Every schedule that calibration makes has the fields. Raises UsageError, ScheduleError if none can.
    """
    layers = layer_count(config)
    known = {k: s for k, s in schedules_of(config, method.name).items() if not s.is_full}
    trained = known.get(plan.speedup)
    if method.order is None:
        return trained, {}
    source = trained or (known[max(known)] if known else None)
    if source and source.decay == "list" and plan.decay is None:
        raise UsageError(f"{plan.model} was trained with a list of depths, which has no form to fit: give a --decay")
    given: dict[str, Any] = {"decay": plan.decay, "order": plan.order, "prompt_layers": plan.prompt_layers}
    asked = {name: value for name, value in given.items() if value is not None}
    style: dict[str, Any] = {"order": method.order, "decay": "linear", **(source.style if source else {}), **asked}
    in_prompt = style.get("prompt_layers")
    if plan.search and (in_prompt is not None or style.get("prompt_decay")):
        raise UsageError(f"{plan.model} was trained to leave out layers of the prompt, where --search keeps them all")
    deepest = in_prompt if isinstance(in_prompt, int) else layers
    Schedule(layers, deepest, deepest, 1, **style)  # raises before the weights are loaded if fields contradict
    if plan.clock == "layers" and deepest * plan.speedup < layers:
        raise UsageError(f"{plan.speedup:g}x runs more than {deepest} layers at a step: depths never rise")
    if trained is None or trained.max_depth > deepest:
        return None, style
    if "list" in (trained.decay, style["decay"]) or "constant" in {trained.decay} ^ {style["decay"]}:
        return None, style  # its depths do not fit the decay of the new schedule
    return trained.replace(**asked), style


def _score(written: Written, full: Written, examples: Sequence[Example]) -> float:
    """Return the sum of the scores of texts whose inputs have references; of none: their agreement with full depth."""
    judged = [each.after for label, each in _quality(full, written, full, examples).items()]
    return sum(judged[:-1]) if len(judged) > 1 else judged[0]


def _quality(before: Written, after: Written, full: Written, examples: Sequence[Example]) -> dict[str, Quality]:
    """Return by label the scores of inputs that have references, then all inputs' agreement with full depth."""
    scored = [i for i, example in enumerate(examples) if example.references]
    found = {}
    for metric in (*(DEFAULT if scored else ()), Agreement()):
        against_full = isinstance(metric, Agreement)
        rows = range(len(examples)) if against_full else scored
        references = [[full.texts[i]] if against_full else examples[i].references for i in rows]
        (base, old, new), interval = paired_scores(
            metric, [[each.texts[i] for i in rows] for each in (full, before, after)], references
        )
        label = "agreement with full depth" if against_full else metric.label
        found[label] = Quality(base, old, new, interval, len(rows))
    return found
