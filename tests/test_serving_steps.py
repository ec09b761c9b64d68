"""What the scheduler decides without vLLM: what steps cost, when a group comes in, whose turn it is."""

from __future__ import annotations

import random
from math import isfinite
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipdecode.errors import ScheduleError
from skipdecode.serving.admission import Admission
from skipdecode.serving.settings import MOST_TOGETHER, Serving, parse_group
from skipdecode.serving.step_costs import StepCosts
from skipdecode.serving.turns import Turns
from test_serving import config


def serve(
    fixed: float,
    each: float,
    extra: float,
    token: float,
    *,
    slots: int = 32,
    length: int = 128,
    steps: int = 3000,
    noise: float = 0.05,
    spikes: float = 0.0,
    together: int = 1,
    auto: bool = False,
    costs: StepCosts | None = None,
) -> tuple[StepCosts, Admission, float]:
    """A server that is never idle, as a scheduler drives it: its costs, its gate, and requests ended per second.

    Args:
        fixed, each: seconds of a decode step, and of a row in it.
        extra, token: seconds that prompts add to a step, and for each of their tokens.
        slots: requests at once.
        length: of texts, on average; each step may be a text's last.
        steps: so many.
        noise: of each step's time, as a share.
        spikes: share of steps that take ten times as long.
        together: requests of a group.
        auto: the group follows the costs.
        costs: go on from there.
    """
    source = random.Random(0)
    costs, gate = costs or StepCosts(), Admission(together, 1e9)
    rows, ended, now, done = 0, 0, 0.0, 0
    for step in range(steps):
        entering = 0 if gate.holds(slots - rows, 1000, now) else slots - rows
        prompt_tokens = sum(source.randint(20, 120) for _ in range(entering))
        seconds = fixed + each * rows + bool(entering) * extra + token * prompt_tokens
        seconds *= max(source.gauss(1, noise), 0.1) * (10 if source.random() < spikes else 1)
        now += seconds
        costs.add(seconds, rows, prompt_tokens, ended)
        rows += entering
        ended = sum(source.random() < 1 / length for _ in range(rows))
        rows, done = rows - ended, done + ended
        if auto and step % 32 == 0:
            gate.together = costs.group(slots, gate.together)
    return costs, gate, done / now


COST = st.floats(1e-4, 1.0)


@given(COST, st.floats(0, 0.01), st.floats(0, 2), st.floats(0, 0.01))
@settings(deadline=None, max_examples=10)
def test_costs_are_recovered_from_the_times_of_steps(fixed: float, each: float, extra: float, token: float) -> None:
    """Groups give the fit rows that differ; without noise what it predicts is right wherever it was."""
    costs, _, _ = serve(fixed, each, extra, token, noise=0, together=8, steps=1500)
    assert costs.known
    for rows in (24, 28, 32):
        assert costs.decode.at(rows) == pytest.approx(fixed + each * rows, rel=1e-6)
    for tokens in (400, 600):
        assert costs.prompts.at(tokens) == pytest.approx(extra + token * tokens, rel=1e-4, abs=1e-6)
    assert costs.steps == pytest.approx(128, rel=0.5)


def test_costs_are_recovered_under_noise() -> None:
    """Five per cent of every step, and one step in a hundred held up by something else."""
    costs, _, _ = serve(0.02, 0.0005, 0.15, 0.0005, spikes=0.01, together=6)
    assert costs.decode.at(30) == pytest.approx(0.02 + 0.0005 * 30, rel=0.1)
    assert costs.prompts.at(400) == pytest.approx(0.15 + 0.0005 * 400, rel=0.2)


@given(COST, st.floats(0, 0.01), st.floats(0, 0.02), st.integers(1, 64), st.integers(4, 300))
@settings(deadline=None, max_examples=25)
def test_prompts_that_add_nothing_but_their_tokens_are_never_grouped(
    fixed: float, each: float, token: float, slots: int, length: int
) -> None:
    """Then vLLM's own scheduling is the best there is, and the rule falls back to it from any group."""
    costs, _, _ = serve(fixed, each, 0, token, slots=slots, length=length, steps=800, noise=0)
    assert costs.group(slots) == 1
    assert costs.group(slots, slots) == 1


def exact(extra: float, slots: int, fixed: float, steps: float) -> StepCosts:
    """Costs as if all were known for certain."""
    costs = StepCosts()
    for rows in (slots, max(slots - 3, 1)):
        costs.decode.add(rows, fixed)
    for tokens in (50, 100, 150):
        costs.prompts.add(tokens, extra)
    costs.decode.count = costs.prompts.count = costs._endings = 1000
    costs._rows, costs._ended = steps, 1.0
    return costs


@given(st.integers(1, 200), st.floats(1e-3, 1), st.floats(5, 500), st.floats(0, 50), st.floats(1, 10))
@settings(deadline=None)
def test_the_group_grows_with_what_prompts_add(
    slots: int, fixed: float, steps: float, extra: float, more: float
) -> None:
    """And never beyond the slots. It is where the machine time of a request is least, as counted out."""
    groups = [exact(extra * times, slots, fixed, steps).group(slots) for times in (0, 1, more)]
    assert groups[0] == 1 <= groups[1] <= groups[2] <= slots
    costs = exact(extra, slots, fixed, steps).per_request(slots)
    assert all(isfinite(cost) and cost >= 0 for cost in costs)
    together = groups[1]
    if together > 1:
        # Rows end one by one; with so many left, the next end takes steps / rows steps.
        cycle = extra + sum(fixed * steps / (slots - empty) for empty in range(together))
        assert costs[together - 1] == pytest.approx(cycle / together, rel=1e-6, abs=1e-9)
        assert costs[together - 1] == min(costs)


NUMBER = st.floats(0, 1e6, allow_nan=False)
STEP = st.tuples(NUMBER, st.integers(0, 4096), st.integers(0, 100_000), st.integers(0, 4096))


@given(st.lists(STEP, max_size=200), st.integers(1, 64), st.integers(1, 4096))
@settings(deadline=None)
def test_whatever_steps_take_the_group_is_one_of_the_slots(
    steps: list[tuple[float, int, int, int]], slots: int, now: int
) -> None:
    """No division by zero, no NaN."""
    costs = StepCosts()
    for seconds, rows, prompt_tokens, ended in steps * 2:
        costs.add(seconds, rows, prompt_tokens, ended)
    assert 1 <= costs.group(slots, now) <= slots
    assert "nan" not in str(costs)


@pytest.mark.parametrize(("extra", "least", "most"), [(0.0, 1, 1), (0.1, 3, 12), (0.4, 6, 20)])
def test_a_server_that_is_never_idle_does_better_by_it(extra: float, least: int, most: int) -> None:
    """Decode steps that 5x made cheap, prompts that stayed dear: groups are found by measuring, and pay."""
    costs, gate, found = serve(0.03, 0.0002, extra, 0.0001, auto=True, steps=6000)
    assert least <= gate.together <= most
    _, _, alone = serve(0.03, 0.0002, extra, 0.0001, steps=6000)
    assert found >= (1.1 if extra else 0.999) * alone
    # It follows the machine: as soon as prompts add nothing, they come in one by one again.
    _, gate, _ = serve(0.03, 0.0002, 0, 0.0001, auto=True, together=gate.together, costs=costs, steps=6000)
    assert gate.together == 1


def test_nothing_is_concluded_from_a_few_steps() -> None:
    """Nor from prompts that are all of one length: what they add, and what a token adds, cannot be told apart."""
    costs = StepCosts()
    for _ in range(31):
        costs.add(0.01, 8, 0, 1)
        costs.add(1.0, 8, 64, 1)
    assert costs.group(8) == 1
    for _ in range(1000):
        costs.add(0.01, 8, 0, 1)
        costs.add(1.0, 8, 64, 1)
    assert costs.group(8) == 1
    for _ in range(20):
        costs.add(1.0, 8, 128, 2)
    assert costs.group(8) > 1


# --- admission


@given(
    st.integers(1, 12),
    st.floats(0, 5),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 20), st.floats(0, 1)), max_size=60),
)
@settings(deadline=None)
def test_nobody_is_held_for_longer_than_allowed(
    together: int, most: float, steps: list[tuple[int, int, float]]
) -> None:
    """Nor where a whole group has room, or none waits; once open, the gate stays so until slots or requests run out."""
    gate, now, since, let_in = Admission(together, most), 0.0, None, False
    for free, waiting, seconds in steps:
        held = gate.holds(free, waiting, now)
        if not free or not waiting:
            assert not held
            since, let_in = None, False
            now += seconds
            continue
        since = now if since is None else since
        if held:
            assert free < together <= waiting
            assert now - since < most
            assert not let_in
        let_in = let_in or not held
        now += seconds


# --- turns


@given(
    st.floats(1, 8),
    st.dictionaries(st.integers(1, 24), st.floats(1e-3, 1), min_size=1, max_size=5),
    st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=120),
)
@settings(deadline=None)
def test_no_row_waits_for_longer_than_its_turn(
    slowdown: float, seconds: dict[int, float], present: list[set[int]]
) -> None:
    """Rows of any depths come and go: those that stay get a token within the limit and one step more."""
    turns, now = Turns(slowdown), 0.0
    # A step of more layers takes longer.
    costs = dict(zip(sorted(seconds), sorted(seconds.values()), strict=True))
    depths = sorted(costs)
    waited: dict[int, float] = {}
    for indices in present:
        here = {depths[index % len(depths)] for index in indices}
        waited = {depth: waited.get(depth, 0.0) for depth in here}
        depth = turns.depth(here, now)
        stepped = {its for its in here if its <= depth}
        assert min(here) in stepped
        now += costs[depth]
        turns.ran(stepped, costs[depth], now)
        for its in here:
            waited[its] = 0.0 if its in stepped else waited[its] + costs[depth]
            assert waited[its] <= (slowdown - 1) * costs[its] + costs[depth] + 1e-9
    if slowdown == 1:
        assert all(not each for each in waited.values())


def test_shallow_rows_take_the_time_that_deep_ones_leave() -> None:
    """Depths 5 and 24, a second a layer: twice as long a token for the deep rows, four times as many for the others."""
    turns, now, steps = Turns(2), 0.0, {5: 0, 24: 0}
    while now < 4800:
        depth = turns.depth({5, 24}, now)
        now += depth
        stepped = {5, 24} if depth == 24 else {5}
        turns.ran(stepped, depth, now)
        for its in stepped:
            steps[its] += 1
    assert steps[24] == pytest.approx(4800 / 48, rel=0.05)
    assert steps[5] / steps[24] == pytest.approx(1 + 24 / 5, rel=0.1)


# --- settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"admit_together": 0}, f"admit_together must be a whole number from 1 to {MOST_TOGETHER}, or 'auto', not 0"),
        ({"admit_together": 2.5}, "admit_together must be a whole number"),
        ({"admit_together": True}, "admit_together must be a whole number"),
        ({"admit_together": "all"}, "admit_together must be .* not 'all'"),
        ({"admit_together": None}, "admit_together must be .* not None"),
        ({"admit_together": 1, "max_wait": 2}, "max_wait bounds the wait for a group, and admit_together 1 makes none"),
        ({"max_wait": -1}, "max_wait must be a number from 0 to 3600, not -1"),
        ({"max_slowdown": 0.5}, "max_slowdown must be a number from 1 to 1000, not 0.5"),
        ({"max_slowdown": float("nan")}, "max_slowdown must be a number"),
    ],
)
def test_bad_options_of_steps_are_refused(options: dict[str, Any], message: str) -> None:
    """At the start, with what is allowed."""
    with pytest.raises(ScheduleError, match=message):
        Serving(config(), options)


def test_a_group_on_a_command_line_is_a_number_or_a_word() -> None:
    """What is neither is judged where all options are."""
    assert [parse_group(text) for text in (None, "auto", "8", "-1", "x")] == [None, "auto", 8, "-1", "x"]


def test_requests_of_one_token_make_what_was_learned_forgotten() -> None:
    """A scoring client never decodes: after some time nobody knows how long requests are."""
    costs, _, _ = serve(0.03, 0.001, 0.1, 1e-4)
    assert costs.known
    for _ in range(12_000):
        costs.add(0.02, 0, 10, 1)
    assert not costs.known
    assert costs.group(32, 5) == 1


def test_prompts_of_one_length_keep_the_group() -> None:
    """Steps that all hold as many prompt tokens do not say which part is extra, so the group stays what it was."""
    costs, _, _ = serve(0.03, 0.001, 0.3, 1e-4)
    assert costs.group(32) > 1
    for _ in range(400):
        costs.add(0.03 + 0.03 + 0.3 + 0.05, 28, 500, 5)
    assert costs.group(32, 5) == 5
