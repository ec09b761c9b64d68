"""Search for a schedule's form: which layers each depth keeps, and how steeply the depth falls.

All candidates achieve the same speed-up, within 1%. They are judged by the distance from full depth on texts that the
model wrote itself at full depth: all on a few texts, the better half on twice as many, and so on (successive halving,
Jamieson and Talwalkar, 2016). Loss on people's texts does not count: it can rank schedules in another order than what
they write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..decays import mix, ranking
from ..errors import ScheduleError
from ..files import has_key, read_json, write
from ..latency.fitting import TOLERANCE, Measure, fit, refit
from ..model.attach import attach
from ..model.teacher_forcing import TextPasses
from ..schedule import Schedule
from ..training.probe import candidates
from .divergence import Damage, damage

#: Shares of the greatest depth in the sum of greatest and least: from a gentle fall to a steep one; the paper's is 2/3.
SHARES = (0.55, 0.61, 2 / 3, 0.75, 0.85)
#: Number of schedules that are left at the end.
FINALISTS = 3

#: Tells whether a file's bytes are :class:`Trials`, which may be replaced.
is_search = has_key("trials")


@dataclass(frozen=True)
class Trial:
    """A schedule, its achieved ratio, and its distance from full depth on so many texts."""

    schedule: Schedule
    ratio: float
    texts: int
    damage: Damage

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"schedule": self.schedule.to_dict()}


class Trials:
    """Measures schedules on the first batches of a model's own texts, each at most once.

    Args:
        model: a causal LM.
        batches: of its texts, from :func:`skipdecode.data.collator.batches_of`.
        file: keeps what was measured, so that an interrupted search goes on; :func:`is_search` if it exists.
        job: identifies model and texts; what ``file`` has of another job is replaced.
        on_pass: called with what is measured, the passes done, and the passes in all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batches: Sequence[Mapping[str, Any]],
        *,
        file: Path | None = None,
        job: str = "",
        on_pass: Callable[[str, int, int], object] = lambda what, done, total: None,
    ) -> None:
        self.model, self.batches = attach(model), batches
        self._file, self._job, self._on_pass = file, job, on_pass
        saved = read_json(file) if file is not None and file.exists() else {}
        self._known: dict[str, list[float]] = saved["trials"] if saved.get("job") == job else {}

    def measure(self, schedules: Sequence[Schedule], batches: int, what: str) -> list[Damage]:
        """Return the distance of each schedule from full depth over the first ``batches``."""
        keys = [json.dumps([batches, schedule.to_dict()]) for schedule in schedules]
        new = {key: each for key, each in zip(keys, schedules, strict=True) if key not in self._known}
        used = self.batches[:batches]
        done = 0

        def passed() -> None:
            nonlocal done
            done += 1
            self._on_pass(what, done, len(new) * len(used))

        if new:
            found = damage((TextPasses(self.model, batch) for batch in used), [*new.values()], on_pass=passed)
            self._known |= {key: [each.kl, each.agreement] for key, each in zip(new, found, strict=True)}
            if self._file is not None:
                write(self._file, json.dumps({"job": self._job, "trials": self._known}) + "\n")
        return [Damage(kl, agreement) for kl, agreement in map(self._known.__getitem__, keys)]


def search(
    trials: Trials,
    num_layers: int,
    speedup: float,
    lengths: Measure,
    order: Any = None,
    decay: str | None = None,
    trained: Schedule | None = None,
) -> list[Trial]:
    """Return the best schedules that achieve a speed-up, nearest to full depth first; at most :data:`FINALISTS`.

    Tried are the orders of :func:`orders`, each with falls of several shares, and at constant depth if one of whole
    layers achieves the speed-up. If nothing does, what comes nearest is returned.

    Args:
        trials: measures them.
        num_layers: of the model.
        speedup: over ``lengths``.
        lengths: decode steps of batches, or their seconds.
        order: this order alone; None: all.
        decay: this decay alone; None: linear and constant.
        trained: one more, at the horizon that fits, if there is one.

    Raises:
        ScheduleError: no schedule achieves the speed-up.
    """
    known = trained and refit(trained, speedup, lengths)
    forms = all_candidates(trials, num_layers, speedup, lengths, order, decay)
    chosen = dict.fromkeys([*([known] if known else []), *forms])
    if not chosen:
        raise ScheduleError(
            f"no schedule with decay {decay} achieves {speedup:g}x on texts as long as these: leave it out"
        )
    ratios = {each: lengths.ratio(each) for each in chosen}
    near = [each for each, ratio in ratios.items() if abs(ratio / speedup - 1) <= TOLERANCE]
    left = near or [min(ratios, key=lambda each: abs(ratios[each] / speedup - 1))]
    batches = 1
    while True:
        batches = min(batches, len(trials.batches))
        texts = sum(len(batch["input_ids"]) for batch in trials.batches[:batches])
        found = zip(left, trials.measure(left, batches, f"{len(left)} schedules on {texts} texts"), strict=True)
        ranked = [Trial(each, ratios[each], texts, far) for each, far in sorted(found, key=lambda pair: pair[1].kl)]
        if batches == len(trials.batches):
            return ranked[:FINALISTS]
        left = [each.schedule for each in ranked[: max(-(-len(ranked) // 2), FINALISTS)]]
        batches *= 2


def all_candidates(
    trials: Trials, num_layers: int, speedup: float, lengths: Measure, order: Any, decay: str | None
) -> Iterator[Schedule]:
    """Yield schedules of a speed-up: each order at constant depth, and with each share that some horizon fits."""
    flat = fit(num_layers, speedup, lengths, decay="constant", **({"order": order} if order else {}))
    depth = flat.max_depth
    falls = [(mix(share, 2 * depth, 0), mix(1 - share, 2 * depth, 0)) for share in SHARES]
    pairs = [(most, least) for most, least in falls if depth < most <= num_layers and least >= 1]
    if decay not in (None, "constant") and not pairs:
        decay = "constant"
    pairs = [] if decay == "constant" else pairs
    least = min((low for _, low in pairs), default=depth)
    for style in [{"order": order}] if order else orders(trials, num_layers, depth, least):
        if decay in (None, "constant"):
            yield flat.replace(**_fitting(style, depth))
        for most, low in pairs:
            made = Schedule(num_layers, most, low, max(lengths.typical, 2), decay or "linear", **_fitting(style, low))
            if moved := refit(made, speedup, lengths):
                yield moved


def orders(trials: Trials, num_layers: int, depth: int, least: int) -> Iterator[dict[str, Any]]:
    """Yield order and warm-up of schedules: those of probing, evenly spaced ones, and what the model can spare."""
    for each in candidates(num_layers, num_layers / depth):
        yield {"order": each.order, "warmup": each.warmup}
    for shallow in {depth, least}:
        yield {"order": spaced(num_layers, shallow)}

    def error(schedules: Sequence[Schedule]) -> list[float]:
        return [each.kl for each in trials.measure(schedules, 1, f"layers to spare, {schedules[0].max_depth} left")]

    yield {"order": spare(num_layers, least, error)}


def _fitting(style: Mapping[str, Any], least: int) -> dict[str, Any]:
    return {**style, "warmup": min(style["warmup"], least)} if "warmup" in style else dict(style)


def spaced(num_layers: int, depth: int) -> tuple[int, ...]:
    """Return a ranking whose first ``depth`` layers are evenly spaced from the first to the last layer.

    Order ``even`` is nested, so that it is evenly spaced at some depths only.
    """
    first = [round(i * (num_layers - 1) / max(depth - 1, 1)) for i in range(depth)]
    return (*first, *(layer for layer in ranking("even", num_layers, 1) if layer not in first))


def spare(num_layers: int, depth: int, error: Callable[[Sequence[Schedule]], Sequence[float]]) -> tuple[int, ...]:
    """Drop the layer whose loss raises the error least, then the next, until ``depth`` are left; return the ranking.

    The bottom layer is never dropped. Those left come first, in network order, then the dropped, last first.

    Args:
        num_layers: of the model.
        depth: at least 1.
        error: of schedules of constant depth.
    """
    left, dropped = list(range(num_layers)), list[int]()
    while len(left) > depth:
        fewer = Schedule.full(num_layers).flat(len(left) - 1)
        ways = [fewer.replace(order=(*(i for i in left if i != out), out, *reversed(dropped))) for out in left[1:]]
        errors = error(ways)
        left.remove(out := left[1 + min(range(len(errors)), key=errors.__getitem__)])
        dropped.append(out)
    return (*left, *reversed(dropped))
