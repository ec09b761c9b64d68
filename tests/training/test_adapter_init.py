"""The closed-form start: the best affine maps of their rank, and nearer to the full model than skipping alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.families import FORMS, LAYERS, build, texts_of
from skipdecode import Schedule, attach
from skipdecode.evaluation.divergence import divergence
from skipdecode.model.teacher_forcing import PrefilledBatch
from skipdecode.training.adapter_init import RIDGE, best_map, moments
from skipdecode.training.distill import make_model

SIZE, SAMPLES = 6, 500


def error(x: Tensor, y: Tensor, down: Tensor, up: Tensor, bias: Tensor) -> float:
    """Mean squared error of a map, with the ridge penalty on its matrix."""
    ridge = RIDGE * (x - x.mean(0)).square().mean(0).mean()
    return float(((x @ down) @ up + bias - y).square().sum(1).mean() + ridge * (down @ up).square().sum())


@pytest.mark.parametrize("rank", [1, 3, SIZE])
def test_no_map_of_its_rank_is_better(rank: int) -> None:
    """However samples come in pieces; nudged anywhere, the error grows."""
    torch.manual_seed(1)
    x = torch.randn(SAMPLES, SIZE, dtype=torch.float64) + 2
    y = x @ torch.randn(SIZE, SIZE, dtype=torch.float64) + torch.randn(SAMPLES, SIZE, dtype=torch.float64)
    solved = best_map(sum(map(moments, x.split(70), y.split(70)), torch.tensor(0)), rank)
    assert [tuple(part.shape) for part in solved] == [(SIZE, rank), (rank, SIZE), (SIZE,)]
    least = error(x, y, *solved)
    for part in range(3):
        for _ in range(20):
            nudged = [value + 0.01 * torch.randn_like(value) * (i == part) for i, value in enumerate(solved)]
            assert error(x, y, *nudged) > least


@pytest.mark.parametrize(("name", "order"), [*((name, "top") for name in (*FORMS, "gemma3n")), ("llama", "even")])
def test_the_start_is_nearer_to_the_full_model(name: str, order: str) -> None:
    """And all that learns from there gets a gradient; biases stay as they are fitted."""
    model = attach(build(name))
    schedule = Schedule.full(LAYERS).replace(order=order, warmup=1).flat(LAYERS // 2)
    batch = texts_of(model)
    (skipped,) = divergence([PrefilledBatch(model, batch)], [schedule])
    distilled = make_model(model, {2.0: schedule}, 8, None, [PrefilledBatch(model, batch)])
    loss = distilled(distilled.teacher_output(batch), schedule)
    assert 0 < loss.item() < skipped.kl
    (bypassed,) = divergence([PrefilledBatch(model, batch)], [schedule])
    assert loss.item() == pytest.approx(bypassed.kl, rel=1e-4)
    loss.backward()
    for weight in distilled.parameters():
        assert weight.requires_grad == (weight.ndim == 2)
        assert weight.grad is None or weight.grad.isfinite().all()
        assert (weight.grad is None) == (weight.ndim == 1)
    assert all(weight.grad is None for weight in model.parameters())


def test_spans_above_others_are_fitted_to_what_the_lower_ones_give() -> None:
    """With two spans, the second gets the first one's output: fitted so, it is nearer than to the full model's."""
    model = attach(build("llama"))
    schedule = Schedule(LAYERS, 4, 4, 1, decay="constant", order=(0, 3, 6, 7, 1, 2, 4, 5))
    batch = PrefilledBatch(model, texts_of(model))
    make_model(model, {2.0: schedule}, 8, None, [batch])
    (in_turn,) = divergence([batch], [schedule])
    lower = Schedule(LAYERS, 6, 6, 1, decay="constant", order=(0, 3, 4, 5, 6, 7, 1, 2))
    upper = Schedule(LAYERS, 6, 6, 1, decay="constant", order=(0, 1, 2, 3, 6, 7, 4, 5))
    alone: dict[str, Any] = {}
    for number, one in enumerate((lower, upper), 2):
        alone |= make_model(model, {float(number): one}, 8, None, [batch]).adapter.bypasses.state_dict()
    both = make_model(model, {2.0: schedule}, 8, None, [batch])
    assert not all(map(torch.equal, alone.values(), both.adapter.bypasses.state_dict().values()))
    both.adapter.bypasses.load_state_dict(alone)
    (apart,) = divergence([batch], [schedule])
    assert in_turn.kl < apart.kl
