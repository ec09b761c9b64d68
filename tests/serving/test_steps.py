"""Plans of steps: which tokens run which layers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from helpers.plans import LAYERS, SCHEDULES, Requests, plan
from skipdecode import Schedule
from skipdecode.serving.steps import DepthTables

#: Speed-up, prompt length, tokens before, tokens in the step.
REQUEST = st.tuples(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 12), st.integers(0, 30), st.integers(1, 14))


@given(st.lists(REQUEST, min_size=1, max_size=6))
def test_a_tokens_layers_depend_on_its_place_alone(requests: Requests) -> None:
    """Whatever else is in the step and wherever chunks begin, layers are those of the schedule."""
    step = plan(requests)
    token = 0
    for speedup, prompt, computed, count in requests:
        counts = SCHEDULES[speedup].positions_per_layer(prompt, computed + count)
        for position in range(computed, computed + count):
            assert step.runs[token].tolist() == [position < inside for inside in counts]
            token += 1
    assert token == step.tokens
    assert step.counts == step.runs.sum(axis=0).tolist()
    assert step.is_full == bool(step.runs.all())


@given(st.lists(REQUEST, min_size=1, max_size=6), st.booleans())
def test_parts_are_the_tokens_that_run_a_layer(requests: Requests, has_private: bool) -> None:
    """Each once: those that skip other layers come last, and run the private copy, if there is one.

    So attention over a subset ends ``dropped`` tokens earlier, and nothing in the middle is missing.
    """
    step = plan(requests)
    for layer in range(LAYERS):
        ran: list[int] = []
        for private, subset in step.parts(layer, has_private):
            tokens = np.arange(step.tokens) if subset is None else subset.tokens
            ran += tokens.tolist()
            if has_private:
                assert (step.runs[tokens].all(axis=1) != private).all()
            if subset is None:
                continue
            ends = step.starts[1:][subset.requests] - subset.dropped
            ranges = [end - count + np.arange(count) for end, count in zip(ends, subset.counts, strict=True)]
            assert tokens.tolist() == [token for one in ranges for token in one]
            assert (ends - subset.counts >= step.starts[:-1][subset.requests]).all()
        assert sorted(ran) == np.flatnonzero(step.runs[:, layer]).tolist()


def test_layers_of_the_same_tokens_share_their_subset() -> None:
    """Attention's metadata are built once for all of them."""
    step = plan([(2.0, 3, 20, 1), (1.0, 3, 20, 1)])
    partial = [layer for layer in range(LAYERS) if 0 < step.counts[layer] < step.tokens]
    assert len(partial) > 1
    assert len({id(step.parts(layer)[0][1]) for layer in partial}) == 1


@given(st.lists(REQUEST, min_size=1, max_size=4), st.booleans())
def test_a_step_is_uniform_if_its_tokens_run_the_same_layers(requests: Requests, decoding: bool) -> None:
    """A CUDA graph of that layer set can run it; a decode step whose rows run the same layers is always uniform."""
    if decoding:
        requests = [(speedup, prompt, prompt + computed, 1) for speedup, prompt, computed, _ in requests]
    tables = DepthTables(SCHEDULES)
    step = plan(requests, tables)
    if step.uniform is not None:
        assert (step.runs == tables.uniform[step.uniform]).all()
        assert (tables.uniform_step(step.uniform, step.tokens).runs == step.runs).all()
    if decoding:
        assert (step.uniform is not None) == (step.runs == step.runs[0]).all()


def test_a_constant_depth_is_two_rows() -> None:
    """Prompts and steps, however long the horizon."""
    schedule = Schedule(24, 8, 8, horizon=4096, decay="constant")
    assert len(DepthTables({3.0: schedule}).of(3.0).runs) == 2
    assert len(DepthTables({1.0: Schedule.full(24)}).uniform) == 1
