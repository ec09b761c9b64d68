"""The form of an adapter's schedules and training, unless the user asks for another (docs/adapter_results.md)."""

from __future__ import annotations

#: Texts of a training step, and passes over all of them.
ROWS, EPOCHS = 8, 3
#: Rank of maps and bottlenecks.
RANK = 256


def warmup_layers(num_layers: int, fastest: float) -> int:
    """Return how many bottom layers are never skipped: a sixth of all, at most half of those at the top speed-up."""
    return max(int(min(num_layers / 6, num_layers / fastest / 2)), 1)
