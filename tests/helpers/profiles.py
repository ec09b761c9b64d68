"""Profiles of machines whose costs are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skipdecode.latency.profile import Pass, Profile, shape_of
from skipdecode.loading.device import machine
from skipdecode.loading.load import Checkpoint

SIZES, LENGTHS = (1, 4, 16), (16, 128, 512)


def made(
    layers: tuple[int, ...] = (0,) * 12,
    outside: float = 0.002,
    weights: tuple[float, ...] = (0.001,),
    context: tuple[float, ...] = (1e-7,),
    prompt: float = 1e-5,
) -> Profile:
    """A machine whose costs are known: steps and prompts are straight lines in the batch size and the length."""

    def step(size: int, length: int) -> Pass:
        costs = tuple(w + c * size * length for w, c in zip(weights, context, strict=True))
        return Pass(size, length, costs, outside / 2 + 1e-5 * size, outside / 2)

    def prefill(size: int, length: int) -> Pass:
        return Pass(size, length, tuple(w + prompt * size * length for w in weights), outside, 0.0)

    cells = [(size, length) for size in SIZES for length in LENGTHS]
    return Profile(
        model="made",
        shape="0",
        machine="here",
        dtype="float32",
        device="cpu",
        kinds=tuple(f"kind {k}" for k in range(len(weights))),
        layers=layers,
        prompts=tuple(prefill(*cell) for cell in cells),
        steps=tuple(step(*cell) for cell in cells),
    )


def profile_of(checkpoint: Path, **options: Any) -> Profile:
    """Of eight layers that take as long as all that is beyond them."""
    passes = tuple(Pass(size, length, (0.00125,), 0.01, 0.0) for size in (1, 8) for length in (4, 90))
    placed: dict[str, Any] = {"shape": shape_of(Checkpoint.resolve(checkpoint).config), "machine": machine("cpu")}
    placed |= {"model": "made", "dtype": "float32", "device": "cpu", "options": options}
    return Profile(**placed, kinds=("layer",), layers=(0,) * 8, prompts=passes, steps=passes)
