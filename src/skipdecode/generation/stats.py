"""The results of generation: completions and what they took."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Completion:
    """One generated text; ``tokens`` counts the end-of-sequence token, ``finish_reason`` is ``stop`` or ``length``."""

    text: str
    tokens: int
    finish_reason: str


@dataclass
class GenerationStats:
    """What one or more batches took. Seconds are wall-clock time; a decode step is a forward pass after the prompt's.

    ``rows`` and ``tokens`` count completions and their tokens. Steps, layers and the prompt's (padded) positions are
    counted once per batch, whatever its size; a batch runs steps until its longest text ends.
    """

    num_layers: int
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    layer_steps: int = 0
    row_layers: int = 0
    row_steps: int = 0
    prompt_positions: int = 0
    prompt_layer_positions: int = 0
    peak_kv_bytes: int = 0

    @property
    def average_depth(self) -> float:
        """Return the mean number of layers that ran per decode step."""
        return self.layer_steps / self.steps if self.steps else float(self.num_layers)

    @property
    def layer_ratio(self) -> float:
        """Return the full model's layers per decode step, divided by those that ran."""
        return self.num_layers / self.average_depth

    @property
    def prompt_depth(self) -> float:
        """Return the mean number of layers that ran per position of the prompts."""
        return self.prompt_layer_positions / self.prompt_positions if self.prompt_positions else float(self.num_layers)

    @property
    def job_depth(self) -> float:
        """Return the layers that ran per position of the whole job, which is prompt positions and decode steps."""
        positions = self.prompt_positions + self.steps
        ran = self.prompt_layer_positions + self.layer_steps
        return ran / positions if positions else float(self.num_layers)

    @property
    def row_depth(self) -> float:
        """Return the layers per step of one sequence: less than ``average_depth`` if sequences exit on their own."""
        return self.row_layers / self.row_steps if self.row_steps else self.average_depth

    @property
    def tokens_per_second(self) -> float:
        """Return new tokens per second, the time for prompts included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def __iadd__(self, other: GenerationStats) -> GenerationStats:
        for name in {each.name for each in fields(self)} - {"num_layers", "peak_kv_bytes"}:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.peak_kv_bytes = max(self.peak_kv_bytes, other.peak_kv_bytes)
        return self

    def summary(self) -> dict[str, Any]:
        """Return rounded figures for JSON, without the decoding time and memory that an engine does not measure."""
        figures = {
            "rows": self.rows,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "decode_seconds": round(self.decode_seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "average_depth": round(self.average_depth, 2),
            "layer_ratio": round(self.layer_ratio, 3),
            "peak_kv_bytes": self.peak_kv_bytes,
        }
        for name in ("decode_seconds", "peak_kv_bytes"):
            if self.rows and not getattr(self, name):
                del figures[name]
        return figures


@dataclass
class GenerationOutput:
    """Completions in the order of the prompts, their stats, and the decode steps of each batch (``lengths``)."""

    stats: GenerationStats
    completions: list[Completion] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
