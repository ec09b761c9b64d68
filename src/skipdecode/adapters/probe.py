"""What skipping would do to an untrained model: its distance from full depth, bare and with closed-form stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.adapter import Adapter
from ..core.attach import attach, put_adapter
from ..core.checkpoint_config import layer_count
from ..core.decays import flat_depth
from ..core.schedule import Schedule
from ..core.stack import text_config
from ..core.text_passes import TextPasses
from ..data.collation import batches_of
from ..data.tasks import Example
from ..errors import UsageError
from ..generation.generate import max_positions
from .closed_form import fit_stand_ins


@dataclass(frozen=True)
class Damage:
    """Distance from full depth on the model's own texts.

    Attributes:
        kl: mean KL divergence of the next token's distribution from full depth's, in nats per token.
        agreement: share of positions whose most likely token is full depth's.
    """

    kl: float
    agreement: float


@dataclass(frozen=True)
class Probed:
    """One way to skip layers at one speed.

    Attributes:
        speedup: full depth over depth.
        schedule: the layers, the same at every step.
        bare: without anything in the place of skipped layers.
        stand_ins: with stand-ins fitted in closed form to other texts.
    """

    speedup: float
    schedule: Schedule
    bare: Damage
    stand_ins: Damage


def candidates(num_layers: int, speedups: Sequence[float]) -> Iterator[Schedule]:
    """Yield flat schedules of each speed-up: ``top`` with 1 warm-up layer, a sixth, a third of the depth; ``even``."""
    for speedup in speedups:
        depth = flat_depth(speedup, num_layers)
        for warmup in sorted({1, max(num_layers // 6, 1), max(depth // 3, 1), max(depth // 2, 1)}):
            if warmup <= depth:
                yield Schedule.full(num_layers).replace(order="top", warmup=warmup).flat(depth)
        yield Schedule.full(num_layers).replace(order="even").flat(depth)


@torch.no_grad()
def probe(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Example],
    speedups: Sequence[float] = (1.1, 1.25, 1.5, 2.0, 3.0),
    *,
    rank: int = 64,
    batch_size: int = 8,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[Probed]:
    """Measure candidates at each speed-up, on half of ``texts``; stand-ins are fitted to the other half.

    Args:
        model: a causal LM, with or without gates, without an adapter.
        texts: prompts and what the model wrote, from :func:`own_texts`.
        speedups: of layers; each is rounded to whole layers.
        rank: of the stand-ins.
        on_progress: called with the candidates done and in all.

    Raises:
        UsageError: there are fewer than four texts.
    """
    if len(texts) < 4:
        raise UsageError(f"probing needs at least four texts, not {len(texts)}")
    config, limit = model.config, max_positions(model.config)
    half = len(texts) // 2
    attach(model)
    fitted_to, measured = (
        [TextPasses(model, batch) for batch in batches_of(part, tokenizer, batch_size, limit, model.device)]
        for part in (texts[:half], texts[half:])
    )
    schedules = list(candidates(layer_count(config), speedups))
    results = []
    for done, schedule in enumerate(schedules):
        on_progress(done, len(schedules))
        bare = damage(measured, schedule)
        adapter = Adapter(text_config(config).hidden_size, rank, {schedule.target: schedule})
        put_adapter(model, adapter)
        fit_stand_ins(adapter, fitted_to)
        results.append(Probed(schedule.target, schedule, bare, damage(measured, schedule)))
        put_adapter(model, None)
    on_progress(len(schedules), len(schedules))
    return results


def damage(passes: Sequence[TextPasses], schedule: Schedule) -> Damage:
    """Return the distance of ``schedule`` from full depth over batches of texts."""
    divergence, same, count = 0.0, 0, 0
    for each in passes:
        wanted = each.batch["labels"][:, 2:] != -100  # the first token follows the prompt, which runs all layers
        full, here = (
            log_softmax(each.logits(run)[wanted].float(), -1) for run in (Schedule.full(schedule.num_layers), schedule)
        )
        divergence += float(kl_div(here, full, log_target=True, reduction="sum"))
        same += int((here.argmax(-1) == full.argmax(-1)).sum())
        count += len(here)
    return Damage(divergence / max(count, 1), same / max(count, 1))
