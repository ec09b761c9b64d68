"""Which layers keep their keys and values together, and from which position on a request needs them no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipdecode import Schedule
from skipdecode.serving.buckets import Buckets, choose_buckets, held_layers, retirements
from skipdecode.serving.requests import assign_speedup, ends_of
from skipdecode.serving.settings import Serving
from skipdecode.serving.steps import Table

LAYERS = 12
FALLING = {speedup: Schedule.for_speedup(speedup, LAYERS, 20, decay="linear") for speedup in (2.0, 3.0, 5.0)}
FLAT = {speedup: Schedule.for_speedup(speedup, LAYERS, 20, decay="constant") for speedup in (2.0, 3.0, 5.0)}


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any depths, orders, and prompts of their own depth."""
    least, most = sorted((draw(st.integers(1, LAYERS)), draw(st.integers(1, LAYERS))))
    return Schedule(
        LAYERS,
        most,
        least,
        horizon=draw(st.integers(2, 9)),
        order=draw(st.one_of(st.sampled_from(["top", "bottom", "even"]), st.permutations(range(LAYERS)).map(tuple))),
        prompt_decay=draw(st.integers(0, 4)),
        prompt_layers=draw(st.sampled_from([None, "max", most])),
    )


@given(schedules(), st.sampled_from([2, 3, 4, 6]), st.permutations(range(LAYERS)), st.integers(1, 9))
def test_a_bucket_ends_where_the_last_position_runs_one_of_its_layers(
    schedule: Schedule, count: int, order: list[int], prompt: int
) -> None:
    """Also in buckets that follow another ranking: the table says which layers each position runs."""
    buckets: Buckets = tuple(tuple(order[place::count]) for place in range(count))
    table, positions = Table(schedule), np.arange(prompt + schedule.horizon + 5)
    runs = table.runs[table.rows(positions - prompt)]
    for bucket, end in zip(buckets, retirements(schedule, buckets), strict=True):
        running = np.flatnonzero(runs[:, list(bucket)].any(axis=1))
        first_free = running[-1] + 1 if len(running) else 0
        assert min(max(prompt + end, 0), len(positions)) == first_free


@pytest.mark.parametrize("served", [FLAT, FALLING])
def test_buckets_are_equal_parts_of_all_layers_and_hold_less(served: dict[float, Schedule]) -> None:
    """vLLM pads unequal ones, which would take memory at full depth; what a flat depth skips is not held."""
    buckets = choose_buckets([Schedule.full(LAYERS), *served.values()])
    assert sorted(layer for bucket in buckets for layer in bucket) == list(range(LAYERS))
    assert len(buckets) > 1
    assert len({len(bucket) for bucket in buckets}) == 1
    for schedule in served.values():
        assert schedule.average_depth(20) <= held_layers(schedule, buckets) < schedule.average_depth(20) + 3


def test_no_more_buckets_than_serve() -> None:
    """Thirds where all requests run a third; none where nothing retires, or layers have no equal parts."""
    assert choose_buckets([FLAT[3.0]]) == ((0, 9, 10, 11), (5, 6, 7, 8), (1, 2, 3, 4))
    assert choose_buckets([Schedule.full(LAYERS)]) == ()
    assert choose_buckets([Schedule(LAYERS, 11, 11, horizon=1, decay="constant")]) == ()
    assert choose_buckets([Schedule.for_speedup(3, 31, 20, decay="linear")]) == ()


class Config(SimpleNamespace):
    """A model's config, as far as schedules ask."""

    def get_text_config(self, decoder: bool = False) -> Config:
        """Itself: no multimodal parts."""
        return self


def request(speedup: float, prompt: int, **options: Any) -> Any:
    """A request of this speed-up, as the scheduler has it."""
    params = SimpleNamespace(extra_args={"speedup": speedup})
    config = Config(num_hidden_layers=LAYERS, skipdecode=None)
    assign_speedup(params, Serving(config, {"speedups": [1, 3], "speedup": 3} | options))
    return SimpleNamespace(sampling_params=params, num_prompt_tokens=prompt)


def test_requests_say_where_their_buckets_end() -> None:
    """After the prompt at a flat depth; never where the prompt runs no more itself; nothing is said of unknown ones."""
    inf = float("inf")
    assert ends_of(request(3, 7)) == [inf, 7, 7]
    assert ends_of(request(3, 7, prompt_layers="max")) == [inf, 0, 0]
    assert ends_of(request(1, 7)) == [inf, inf, inf]
    assert ends_of(SimpleNamespace(sampling_params=None, num_prompt_tokens=7)) is None
