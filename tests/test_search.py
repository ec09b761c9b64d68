"""The search for a schedule's form: candidates achieve the same speed-up, the nearest to full depth comes first."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import skipdecode
from helpers.tiny import EXAMPLES, TEXTS, run, save_checkpoint
from skipdecode import Schedule
from skipdecode.data.collator import batches_of
from skipdecode.errors import ScheduleError
from skipdecode.evaluation import search
from skipdecode.evaluation.divergence import damage
from skipdecode.latency.fitting import TOLERANCE, Lengths
from skipdecode.model.attach import attach
from skipdecode.model.teacher_forcing import TextPasses

LENGTHS = Lengths([5, 20, 23, 31])


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of eight layers that was never trained to skip."""
    return save_checkpoint(tmp_path_factory.mktemp("eight"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that have prompts and nothing else."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text[:9]}) + "\n" for text in TEXTS[:8]))
    return path


def trials_of(folder: Path, **options: Any) -> search.Trials:
    """What measures on the texts of the tests, a few in a batch."""
    model, tokenizer = skipdecode.load(str(folder))
    return search.Trials(model, batches_of(EXAMPLES, tokenizer, 2), **options)


def flat(order: tuple[int, ...], depth: int) -> Schedule:
    """A constant schedule with this order."""
    return Schedule(len(order), depth, depth, 1, decay="constant", order=order)


@pytest.mark.parametrize("speedup", [1.15, 2, 3])
def test_all_that_is_tried_achieves_the_speedup_and_the_best_is_nearest(eight: Path, speedup: float) -> None:
    """Distances of the winners are those of all texts; no other candidate that got as far is nearer."""
    trials = trials_of(eight)
    everything = set(search.all_candidates(trials, 8, speedup, LENGTHS, None, None))
    found = search.search(trials, 8, speedup, LENGTHS)
    assert len({each.schedule for each in found}) == len(found) == min(search.FINALISTS, len(everything))
    assert {each.schedule for each in found} <= everything
    assert [each.damage.kl for each in found] == sorted(each.damage.kl for each in found)
    texts = sum(len(batch["input_ids"]) for batch in trials.batches)
    for each in found:
        assert each.texts == texts
        assert each.ratio == pytest.approx(LENGTHS.ratio(each.schedule))
        assert abs(each.ratio / speedup - 1) <= TOLERANCE
        passes = (TextPasses(attach(trials.model), batch) for batch in trials.batches)
        (again,) = damage(passes, [each.schedule])
        assert (again.kl, again.agreement) == pytest.approx((each.damage.kl, each.damage.agreement))
    assert len({each.order for each in everything}) >= 3
    own = Schedule(8, 5, 2, 20, order=(7, 0, 1, 2, 3, 4, 5, 6), decay="cosine")
    with_own = search.search(trials, 8, speedup, LENGTHS, "even", "constant", own)
    assert any(each.schedule.order == own.order for each in with_own) == (speedup == 2)
    if speedup == 2:
        assert len({(each.max_depth, each.min_depth) for each in everything}) >= 3


def test_what_is_given_is_not_searched(eight: Path) -> None:
    """An order or a decay of the user's own narrows the search to it."""
    trials = trials_of(eight)
    assert {each.order for each in search.all_candidates(trials, 8, 2, LENGTHS, "even", None)} == {"even"}
    assert {each.decay for each in search.all_candidates(trials, 8, 2, LENGTHS, "even", "cosine")} == {"cosine"}
    assert {each.decay for each in search.all_candidates(trials, 8, 2, LENGTHS, None, "constant")} == {"constant"}


def test_a_decay_that_cannot_achieve_a_speedup_is_named(eight: Path) -> None:
    """No horizon brings a steep fall near enough."""
    with pytest.raises(ScheduleError, match=r"decay power achieves 3x .*leave it out"):
        search.search(trials_of(eight), 8, 3, LENGTHS, None, "power")


@pytest.mark.parametrize("depth", range(1, 9))
def test_spaced_layers_are_evenly_spaced_and_all_layers_are_ranked(depth: int) -> None:
    """Gaps between neighbours differ by one at most; the first and last layers are kept."""
    ranked = search.spaced(8, depth)
    assert sorted(ranked) == list(range(8))
    kept = flat(ranked, depth).layers(depth)
    gaps = {b - a for a, b in pairwise(kept)}
    assert kept[0] == 0
    assert depth == 1 or kept[-1] == 7
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_layers_are_dropped_where_it_costs_least(eight: Path) -> None:
    """At each depth the layers left are the best of all that one more removal could leave; the bottom one stays."""
    trials = trials_of(eight)

    def error(ways: Any) -> list[float]:
        return [each.kl for each in trials.measure(ways, 1, "")]

    ranked = search.spare(8, 1, error)
    assert sorted(ranked) == list(range(8))
    assert ranked[0] == 0
    for depth in range(7, 0, -1):
        left, here = ranked[: depth + 1], error([flat(ranked, depth)])[0]
        for out in left[1:]:
            rest = tuple(layer for layer in left if layer != out)
            assert here <= error([flat((*rest, out, *ranked[depth + 1 :]), depth)])[0] + 1e-6
    some = search.spare(8, 5, error)
    assert some[5:] == ranked[5:]
    assert list(some[:5]) == sorted(some[:5])


def test_an_interrupted_search_goes_on(
    eight: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured is kept, and not measured again; what is of other texts is."""
    target, file, passed = tmp_path / "schedule.json", tmp_path / "schedule.search.json", list[int]()
    common = ("--search", "--speedup", 2, "--output", target, "--max-new-tokens", 12)

    def noted(passes: Any, schedules: Any, **options: Any) -> Any:
        passed.append(len(schedules))
        if len(passed) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return damage(passes, schedules, **options)

    monkeypatch.setattr("skipdecode.evaluation.search.damage", noted)
    stopped = run("calibrate", eight, "--data", prompts, *common)
    assert stopped.returncode == 130
    assert "the same command goes on from what is saved" in stopped.stderr
    kept = json.loads(file.read_text())["trials"]
    assert len(kept) == sum(passed[:3])
    done = run("calibrate", eight, "--data", prompts, *common, "--json")
    assert done.returncode == 0, done.stderr
    whole = json.loads(file.read_text())["trials"]
    assert kept.items() <= whole.items()
    assert sum(passed[:3]) + sum(passed[4:]) == len(whole)
    schedule, before = Schedule.load(target), len(passed)
    found = json.loads(done.stdout.splitlines()[-1])
    assert 1 <= len(found["trials"]) <= search.FINALISTS
    assert Schedule.from_dict(found["schedule"]) == schedule
    assert found["step_layer_ratio"] == pytest.approx(2, rel=TOLERANCE)
    assert run("calibrate", eight, "--data", prompts, *common).returncode == 0
    assert len(passed) == before
    assert Schedule.load(target) == schedule
    assert trials_of(eight, file=file, job="another")._known == {}
    # A file of that name that is not ours stays.
    file.write_text("mine")
    done = run("calibrate", eight, "--data", prompts, *common)
    assert done.returncode == 2
    assert file.read_text() == "mine"
