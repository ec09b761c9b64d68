"""Results of generation: texts, and what they took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Completion:
    """One generated text, as it was written."""

    text: str
    tokens: int  #: Number of tokens, with the one that ended the text.
    finish_reason: str  #: ``stop``, or ``length`` if the text was cut off.


#: Figures of which several batches have the largest, not the sum.
PEAKS = ("peak_kv_bytes", "peak_memory_bytes")


@dataclass
class GenerationStats:
    """What one or more batches took. A decode step is a forward pass after the prompt's.

    Attributes:
        num_layers: decoder layers of the model.
        rows, tokens: completions, and their tokens.
        seconds, decode_seconds: wall-clock time, and the part of it after the prompts' passes.
        steps, layer_steps: decode steps, once a batch, and the layers that ran in them.
        row_steps, row_layers: the same for single sequences, where these exit on their own.
        prompt_positions, prompt_layer_positions: positions of padded prompts, once a batch, and the layers they ran.
        peak_kv_bytes: most bytes of keys and values at once.
        peak_memory_bytes: most bytes of a GPU's memory that generation took, beside the weights; 0 on other devices.
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
    peak_memory_bytes: int = 0

    @property
    def average_depth(self) -> float:
        """Layers per decode step."""
        return self.layer_steps / self.steps if self.steps else float(self.num_layers)

    @property
    def layer_ratio(self) -> float:
        """Layers of the full model over those that ran per decode step."""
        return self.num_layers / self.average_depth

    @property
    def prompt_depth(self) -> float:
        """Layers per position of the prompts."""
        return self.prompt_layer_positions / self.prompt_positions if self.prompt_positions else float(self.num_layers)

    @property
    def job_depth(self) -> float:
        """Layers per position of prompts and decode steps together."""
        positions = self.prompt_positions + self.steps
        ran = self.prompt_layer_positions + self.layer_steps
        return ran / positions if positions else float(self.num_layers)

    @property
    def row_depth(self) -> float:
        """Layers per step of one sequence: less than ``average_depth`` if sequences exit on their own."""
        return self.row_layers / self.row_steps if self.row_steps else self.average_depth

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, the time of prompts included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def __iadd__(self, other: GenerationStats) -> GenerationStats:
        for name in {own.name for own in fields(self)} - {"num_layers", *PEAKS}:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in PEAKS:
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        return self

    def summary(self) -> dict[str, Any]:
        """Rounded figures for JSON, without those that an engine does not measure."""
        figures = {
            "rows": self.rows,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "average_depth": round(self.average_depth, 2),
            "layer_ratio": round(self.layer_ratio, 3),
        }
        measured = {"decode_seconds": round(self.decode_seconds, 3)} | {name: getattr(self, name) for name in PEAKS}
        return figures | {name: value for name, value in measured.items() if value}


@dataclass
class GenerationOutput:
    """Completions in the order of the prompts, their stats, and the decode steps of each batch (``lengths``)."""

    stats: GenerationStats
    completions: list[Completion] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


#: Generates the texts of one batch of token-id prompts, with a seed.
GenerateBatch = Callable[[Sequence[Sequence[int]], int], GenerationOutput]
