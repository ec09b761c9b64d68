"""Divergence from the full model before any training, for speeds and choices of layers: the code behind ``probe``."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..data.tasks import get_task
from ..data.tokenize import encode_prompts
from ..errors import UsageError
from ..evaluation.divergence import Divergence, divergence
from ..generation.generate import generate_ids
from ..loading.load import Checkpoint
from ..model.adapter import Adapter
from ..model.attach import put_adapter
from ..model.config import bind
from ..model.inspect import text_config
from ..schedule import Schedule
from .adapter_init import fit_bypasses
from .distill import default_warmup, prefill
from .prompts import find_prompts
from .self_generated import Say, log, self_generate


@dataclass(frozen=True)
class Candidate:
    """One choice of layers at one speed-up."""

    speedup: float  #: The requested one; ``schedule`` has the nearest depth in whole layers.
    schedule: Schedule
    skipped: Divergence  #: With nothing in place of skipped layers.
    bypassed: Divergence  #: With low-rank bypasses, fitted in closed form to other texts.


def candidates(num_layers: int, speedup: float) -> Iterator[Schedule]:
    """Schedules to compare, all of one depth: ``top`` with 1 to half of its layers at the bottom, and ``even``."""
    depth = Schedule.for_speedup(speedup, num_layers).max_depth
    full = Schedule.full(num_layers)
    for warmup in sorted({1, default_warmup(num_layers, speedup), max(depth // 3, 1), max(depth // 2, 1)}):
        yield full.replace(order="top", warmup=warmup).flat(depth)
    yield full.replace(order="even").flat(depth)


def probe(
    name: str,
    speedups: Sequence[float],
    *,
    prompts: str | Path | None = None,
    num_texts: int = 64,
    max_new_tokens: int = 96,
    rank: int = 256,
    dtype: str = "auto",
    say: Say = log,
) -> list[Candidate]:
    """Let a model write texts; fit bypasses to one half of them, and measure :func:`candidates` on the other.

    The help of ``skipdecode probe`` explains the options. Without ``prompts``, the model writes them too. ``say``
    receives messages for the user.

    Raises UsageError if ``name`` is an adapter, or fewer than four texts can be used.
    """
    checkpoint = Checkpoint.resolve(name)
    if checkpoint.adapter is not None:
        raise UsageError(f"{name} is an adapter already: give its model")
    schedules = [(k, schedule) for k in sorted(set(speedups)) for schedule in candidates(checkpoint.num_layers, k)]
    model = checkpoint.load(dtype).requires_grad_(False)
    tokenizer = checkpoint.tokenizer

    def write(prompts: Any, options: dict[str, Any], name: str) -> Any:
        ids = encode_prompts(tokenizer, prompts)
        with tqdm(desc=name, total=len(ids), file=sys.stderr) as bar:
            options |= {"seed": 0, "on_batch": lambda stats: bar.update(stats.rows)}
            return generate_ids(model, tokenizer, ids, None, 32, **options).completions

    found = find_prompts(checkpoint, prompts, get_task(), num_texts, write, say)
    texts = self_generate(found, get_task(), num_texts, max_new_tokens, None, write, say)
    if prompts is None:
        say("the texts are the model's own: people's prompts may come out twice as far, so give some with --prompts")
    if len(texts) < 4:
        raise UsageError(f"probing needs four texts at least: {len(texts)} of {num_texts} can be used")
    half = len(texts) // 2
    fitted, measured = (prefill(model, tokenizer, part) for part in (texts[:half], texts[half:]))
    skipped = divergence(measured, [schedule for _, schedule in schedules])
    tried = []
    for number, (speedup, schedule) in enumerate(tqdm(schedules, "choices of layers", file=sys.stderr)):
        adapter = Adapter(text_config(model.config).hidden_size, rank, {speedup: bind(schedule, model.config)})
        put_adapter(model, adapter)
        fit_bypasses(adapter, fitted)
        (bypassed,) = divergence(measured, [schedule])
        put_adapter(model, None)
        tried.append(Candidate(speedup, schedule, skipped[number], bypassed))
    return tried
