"""What a schedule does to the texts: scores of full depth, of the schedule there was, and of the fitted one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..data.metrics import DEFAULT, Agreement
from ..data.tasks import Example
from .achieve import Written

#: How far a score may fall by calibration before it is not saved unasked.
POINTS = 1.0


@dataclass(frozen=True)
class Quality:
    """One score, 0 to 100, of the full model, of the schedule there was, and of the fitted one."""

    full: float
    before: float
    after: float


def quality_of(before: Written, after: Written, full: Written, examples: Sequence[Example]) -> dict[str, Quality]:
    """Each score by its label: those of the rows that have references, and agreement of all rows with full depth."""
    scored = [i for i, example in enumerate(examples) if example.references]
    references = [examples[i].references for i in scored]
    quality = {}
    for metric in DEFAULT if scored else ():
        own = (metric.score([each.texts[i] for i in scored], references) for each in (full, before, after))
        quality[metric.label] = Quality(*own)
    agreed = (Agreement().score(each.texts, [[text] for text in full.texts]) for each in (full, before, after))
    return quality | {"agreement with full depth": Quality(*agreed)}


def fallen(quality: Mapping[str, Quality]) -> dict[str, Quality]:
    """Scores that fell by more than POINTS; where there are scores against references, agreement does not count."""
    judged = list(quality)[: max(len(quality) - 1, 1)]
    return {label: quality[label] for label in judged if quality[label].before - quality[label].after > POINTS}
