"""What skipping would do to an untrained model: its distance from full depth, bare and with closed-form stand-ins."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..data.collator import batches_of
from ..data.tasks import get_task
from ..errors import UsageError
from ..evaluation.divergence import Divergence, divergence
from ..files import check_target, has_key, write
from ..generation.generate import max_positions
from ..generation.job import GenerationJob
from ..latency.old_planner import Predictor, Workload
from ..latency.old_profile import Profile, check_profile
from ..loading.load import load, read_config, refuse_adapter
from ..model.adapter import Adapter
from ..model.attach import attach, put_adapter
from ..model.config import DEFAULT_METHOD, bind, num_layers, schedules_of
from ..model.inspect import text_config
from ..model.teacher_forcing import PrefilledBatch
from ..schedule import Schedule, flat_depth
from .adapter_init import fit_stand_ins
from .form import EPOCHS, RANK, ROWS, warmup_layers
from .learner import AdapterLearner
from .self_generated import SAMPLED, own_texts
from .self_prompts import prompts_for

#: A speed-up is worth training for if closed-form stand-ins keep this share of full depth's most likely tokens: where
#: they kept 44% of SmolLM2's (2x), trained adapters kept 59 to 72% (docs/adapter_results.md).
WORTH = 0.35
#: Tokens of the longest text.
TOKENS = 96
#: Own texts of the command that is advised.
OWN_TEXTS = 4000
#: Tells whether a file's bytes are a :class:`Probe`, which may be replaced.
is_probe = has_key("tried")
#: Tokens of the prompts, in steps whose seconds a profile tells.
PROMPT = 32


@dataclass(frozen=True)
class Tried:
    """One choice of layers at one speed-up.

    Attributes:
        speedup: the one asked for; full depth over depth is the nearest to it.
        schedule: the layers, the same at every step.
        bare: distance without anything in the place of skipped layers.
        stand_ins: distance with stand-ins fitted in closed form to other texts.
        tokens_per_second: that training takes here, measured over one batch.
        step_clock: seconds of full depth's decode step over those of this one, by a profile of the bare model.
    """

    speedup: float
    schedule: Schedule
    bare: Divergence
    stand_ins: Divergence
    tokens_per_second: float
    step_clock: float | None = None


@dataclass(frozen=True)
class Probe:
    """What :func:`probe_model` found.

    Attributes:
        model: its name.
        tried: all choices of layers, from the slowest speed-up on.
        tokens: of texts, that the advised training learns from in all.
        full_per_second: tokens for which training has full depth's pass in a second.
        batch_size: of the steps of ``step_clock``.
        options: those that training needs too.
        trained: the model has schedules, whose order and decay training would keep.
    """

    model: str
    tried: Sequence[Tried]
    tokens: int
    full_per_second: float
    batch_size: int | None = None
    options: Sequence[str] = ()
    trained: bool = False

    @property
    def best(self) -> list[Tried]:
        """Return, for each speed-up, the choice of layers whose stand-ins come nearest to full depth."""
        speedups = dict.fromkeys(each.speedup for each in self.tried)
        return [
            min((each for each in self.tried if each.speedup == speedup), key=lambda each: each.stand_ins.kl)
            for speedup in speedups
        ]

    def hours(self, each: Tried) -> float:
        """Return how long the advised training would take for this one alone."""
        return self.tokens / each.tokens_per_second / 3600 if each.tokens_per_second else 0.0

    @property
    def advice(self) -> str:
        """Return which speed-ups are worth training for, how, and how long it takes."""
        best = [each for each in self.best if not each.schedule.is_full]
        if not best:
            return "full depth needs no training"
        kept = ", ".join(f"{each.speedup:g}x {each.stand_ins.top1:.0%}" for each in best)
        worth = [each for each in best if each.stand_ins.top1 >= WORTH] or best[:1]
        # Full depth's pass teaches all of them: it is in each one's hours, and is paid once.
        hours = sum(map(self.hours, worth)) - (len(worth) - 1) * self.tokens / self.full_per_second / 3600
        told = f"Before training, linear maps keep of full depth's likeliest tokens: {kept}. Training adds to that."
        if worth[0].stand_ins.top1 < WORTH:
            told += f" None is worth it: below {WORTH:.0%} expect little. The command is for the slowest."
        else:
            told += f" Worth it: {', '.join(f'{each.speedup:g}x' for each in worth)} ({WORTH:.0%} and above)."
        learnt = f"Learning from {self.tokens / 1e6:.1f} million tokens takes about {hours:.1f} hours here"
        return f"{told} {learnt}, after the writing of the texts:\n{self.command(worth)}"

    def command(self, worth: Sequence[Tried]) -> str:
        """Return the command that learns some of the speed-ups."""
        speedups = ",".join(f"{each.speedup:g}" for each in worth)
        schedule, layers = worth[-1].schedule, worth[-1].schedule.num_layers
        words = ["skipdecode", "train", self.model, "--own-texts", str(OWN_TEXTS), *self.options]
        words += ["--speedups", speedups]
        if schedule.order != "top" or self.trained:
            words += ["--order", str(schedule.order)]
        if schedule.order == "top" and (self.trained or schedule.warmup != warmup_layers(layers, worth[-1].speedup)):
            words += ["--warmup-layers", str(schedule.warmup)]
        words += ["--decay", "constant"] if self.trained else []
        return shlex.join([*words, "--output", "fast"])

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as values for JSON."""
        tried = [asdict(each) | {"training_hours": self.hours(each)} for each in self.tried]
        about = {"model": self.model, "advice": self.advice, "tokens": self.tokens, "batch_size": self.batch_size}
        return about | {"tried": tried}


def candidates(num_layers: int, speedup: float) -> Iterator[Schedule]:
    """Yield choices of layers: ``even``, and ``top`` with 1 warm-up layer, the default's, a third or half of depth."""
    depth = flat_depth(speedup, num_layers)
    for warmup in sorted({1, warmup_layers(num_layers, speedup), max(depth // 3, 1), max(depth // 2, 1)}):
        yield Schedule.full(num_layers).replace(order="top", warmup=warmup).flat(depth)
    yield Schedule.full(num_layers).replace(order="even").flat(depth)


def probe_model(
    name: str,
    speedups: Sequence[float] = (1.1, 1.25, 1.5, 2.0, 3.0),
    *,
    prompts: Path | None = None,
    count: int = 64,
    max_new_tokens: int = TOKENS,
    rank: int = RANK,
    folder: Path | None = None,
    batch_size: int = ROWS,
    seed: int = 0,
    profile: Path | None = None,
    where: Mapping[str, Any] | None = None,
    on_progress: Callable[[str, int, int], object] = lambda what, done, total: None,
    say: Callable[[str], object] = lambda message: None,
) -> Probe:
    """Let a model write texts, and measure :func:`candidates` on half of them; stand-ins are fitted to the others.

    Args:
        name: directory, hub name, or ``demo``.
        speedups: of layers; each is rounded to whole layers.
        prompts: file with the texts' prompts; None: as :func:`prompts_for` finds them.
        count: number of texts.
        max_new_tokens: longest text.
        rank: of the stand-ins.
        folder: keeps ``texts.jsonl``, a chat model's own prompts in ``prompts.jsonl``, and ``probe.json``.
        batch_size, seed: of the texts; batches of the same size are measured.
        profile: file of :mod:`skipdecode.latency.profile`, measured with this model here; its largest batch is told.
        where: ``dtype``, ``device`` and ``revision``, as :func:`skipdecode.load` takes them.
        on_progress: called with what is being done, and how much of it is done and in all.
        say: called with messages for the user.

    Raises:
        UsageError: fewer than four texts are left, ``name`` is an adapter, or the profile is for something else.
        FileError, UsageError: one of the files in ``folder`` is there, and was not written by a probe like this one.
        SkipDecodeError: the model, or the prompts, cannot be read.
    """
    refuse_adapter(name, "probe")
    task, where = get_task("jsonl"), dict(where or {})
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        check_target(folder / "probe.json", may_replace=is_probe)
    config = read_config(name, where.get("revision"))
    speedups, layers = sorted({*speedups}), num_layers(config)
    if not 1 <= speedups[0] <= speedups[-1] <= layers:
        raise UsageError(f"speed-ups are 1 to {layers}, the model's number of layers, not {speedups}")
    predictor, rows = None, None
    if profile is not None:
        measured_here = Profile.load(profile)
        options = measured_here.options  # of the jobs to come
        check_profile(measured_here, config, where.get("dtype", "auto"), where.get("device"), **options)
        rows = max(one.batch_size for one in measured_here.steps)
        predictor = Predictor(measured_here, [Workload(rows, PROMPT, max_new_tokens)])
    options = SAMPLED | {"max_new_tokens": max_new_tokens}
    job = GenerationJob(name, task=task, batch_size=max(batch_size, 32), seed=seed, options=options, **where)
    done = 0

    def wrote(cost: Any) -> None:
        nonlocal done
        done += cost.rows
        on_progress("texts", done, count)

    file = folder and folder / "texts.jsonl"
    asked = prompts_for(job, prompts, count, folder and folder / "prompts.jsonl", say=say)
    texts = own_texts(job, asked, count, file, on_batch=wrote, say=say)
    if len(texts) < 4:
        raise UsageError(f"probing needs at least four texts; {len(texts)} of {count} can be used")
    model, tokenizer = load(name, **where)
    config, limit = model.config, max_positions(model.config)
    half = len(texts) // 2
    attach(model).requires_grad_(False)
    with torch.no_grad():
        fitted_to, measured = (
            [
                PrefilledBatch(model, batch)
                for batch in batches_of(part, tokenizer, batch_size, limit, model.device, as_written=True)
            ]
            for part in (texts[:half], texts[half:])
        )
    if not fitted_to or not measured:
        raise UsageError(f"too many texts are longer than the model's {limit} positions: give --max-new-tokens")
    chosen = [(speedup, schedule) for speedup in speedups for schedule in candidates(layers, speedup)]
    tried, full_per_second = [], math.inf
    start = time.perf_counter()
    for done, (speedup, schedule) in enumerate(chosen):
        on_progress("choices of layers", done, len(chosen))
        if done == 1:
            left = (time.perf_counter() - start) * (len(chosen) - 1)
            say(f"{len(chosen)} choices of layers are tried: about {left / 60:.0f} minutes more")
        (bare,) = divergence(measured, [schedule])
        adapter = Adapter(text_config(config).hidden_size, rank, {speedup: bind(schedule, config)})
        put_adapter(model, adapter)
        fit_stand_ins(adapter, fitted_to)
        (mapped,) = divergence(measured, [schedule])
        learner, speed = AdapterLearner(model, adapter), 0.0
        if not schedule.is_full:
            count, batch = int(measured[0].counted.sum()), measured[0].batch
            speed, full_per_second = (count / learner.seconds(each, batch) for each in ([schedule], []))
        step_clock = predictor.ratios(schedule)["step"] if predictor else None
        tried.append(Tried(speedup, schedule, bare, mapped, speed, step_clock))
        put_adapter(model, None)
    on_progress("choices of layers", len(chosen), len(chosen))
    told = [] if prompts is None else ["--prompts", str(prompts)]
    told += [] if rank == RANK else ["--adapter-rank", str(rank)]
    told += ["--max-new-tokens", str(max_new_tokens)]
    told += [] if batch_size == ROWS else ["--batch-size", str(batch_size)]
    told += ["--bf16"] if model.dtype == torch.bfloat16 else []  # so that it takes as long as it was measured to
    tokens = sum(int(each.counted.sum()) for each in measured) * OWN_TEXTS * EPOCHS // (len(texts) - half)
    found = Probe(name, tried, tokens, full_per_second, rows, told, bool(schedules_of(config, DEFAULT_METHOD)))
    if folder is not None:
        write(folder / "probe.json", json.dumps(found.to_dict(), indent=1) + "\n")
    return found
