"""Profiles of machines whose costs are known."""

from __future__ import annotations

from skipdecode.planning.profile import Pass, Profile

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
