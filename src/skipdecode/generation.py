"""Prompts in, texts and what they cost out: batches of similar length through the ordinary ``model.generate``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from .cache import SkipCache
from .errors import UsageError
from .gate import attach
from .prompts import encode_prompts
from .schedule import Schedule
from .trained import choose

#: How to decode: a schedule, None for the stock model, or what makes each batch's cache for methods of their own.
Plan = Schedule | Callable[[PreTrainedModel], DynamicCache] | None


@dataclass(frozen=True)
class Row:
    """One generated text: new ``tokens``, end-of-sequence included; ``finish_reason`` is ``stop`` or ``length``."""

    text: str
    tokens: int
    finish_reason: str


@dataclass
class Cost:
    """What a run took. Seconds are wall clock; a decode step is a forward pass after the prompt's."""

    num_layers: int
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    layer_steps: int = 0
    row_layers: int = 0
    row_steps: int = 0
    peak_kv_bytes: int = 0

    @property
    def average_depth(self) -> float:
        """Layers per decode step that really ran."""
        return self.layer_steps / self.steps if self.steps else float(self.num_layers)

    @property
    def layer_ratio(self) -> float:
        """How many times fewer layers the decode steps ran than the full model would have."""
        return self.num_layers / self.average_depth

    @property
    def row_depth(self) -> float:
        """Layers per decode step that a row alone would have run: less than ``average_depth`` if rows exit singly."""
        return self.row_layers / self.row_steps if self.row_steps else self.average_depth

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of wall clock, prompts included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def __iadd__(self, other: Cost) -> Cost:
        for name in ("rows", "tokens", "seconds", "decode_seconds", "steps", "layer_steps", "row_layers", "row_steps"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.peak_kv_bytes = max(self.peak_kv_bytes, other.peak_kv_bytes)
        return self

    def summary(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "decode_seconds": round(self.decode_seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "average_depth": round(self.average_depth, 2),
            "layer_ratio": round(self.layer_ratio, 3),
            "peak_kv_bytes": self.peak_kv_bytes,
        }


@dataclass
class Generated:
    """Rows in the order of the prompts, their cost, and the decode steps that each batch took."""

    cost: Cost
    rows: list[Row] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


class _Clock(LogitsProcessor):
    """Notes when the prompt's logits are there: ``generate`` calls it once per forward pass."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.calls = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.first is None:
            if scores.is_cuda:
                torch.cuda.synchronize()
            self.first = time.perf_counter()
        self.calls += 1
        return scores


def generate_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    plan: Plan,
    **options: Any,
) -> tuple[list[Row], Cost]:
    """One batch of token-id prompts; ``plan`` None is the stock model with its ordinary cache.

    ``options`` go to ``model.generate``.
    """
    width = max(map(len, prompts))
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    cache = _cache(model, plan)
    clock = _Clock()
    processors = LogitsProcessorList([*options.pop("logits_processor", []), clock])
    if options.setdefault("num_return_sequences", 1) != 1:
        raise UsageError("one text per prompt is generated: repeat the prompt instead of num_return_sequences")
    options.setdefault("pad_token_id", pad)
    options.setdefault("use_cache", True)  # a checkpoint saved in training may say otherwise
    start = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        logits_processor=processors,
        return_dict_in_generate=True,
        **options,
    )
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    end = time.perf_counter()
    stops = _stop_ids(model, options)
    rows = [_row(tokenizer, new.tolist(), stops) for new in output.sequences[:, width:]]
    steps = clock.calls - 1
    cost = Cost(
        layers,
        rows=len(prompts),
        tokens=sum(row.tokens for row in rows),
        seconds=end - start,
        decode_seconds=end - (clock.first or end),
        steps=steps,
        layer_steps=sum(getattr(cache, "step_depths", [layers] * steps)),
        row_layers=getattr(cache, "row_layers", 0),
        row_steps=getattr(cache, "row_steps", 0),
        peak_kv_bytes=getattr(cache, "peak_kv_bytes", None) or _bytes(cache),
    )
    return rows, cost


def _cache(model: PreTrainedModel, plan: Plan) -> DynamicCache:
    if plan is None:
        return DynamicCache(config=model.config)
    return SkipCache(attach(model), plan) if isinstance(plan, Schedule) else plan(model)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    speedup: float | None = None,
    schedule: Schedule | None = None,
    full: bool = False,
    batch_size: int = 32,
    **options: Any,
) -> Generated:
    """Generate a text for each prompt.

    Args:
        prompts: texts; batches are made of similar lengths, rows come back in the order given.
        speedup, schedule: the budget, or (it goes first) the schedule; by default the one in the model's config.
        full: the unmodified model instead.
        batch_size: rows per ``model.generate`` call.
        options: as ``model.generate`` names them (``max_new_tokens``, ``do_sample``, ``num_beams``, …).

    Raises:
        ScheduleError: a schedule that does not fit the model.
        UsageError: a prompt and ``max_new_tokens`` need more positions than the model has.

    Example:
        >>> model, tokenizer = skipdecode.load("demo")
        >>> result = skipdecode.generate(model, tokenizer, ["name Aromi, food English ->"], speedup=3)
        >>> result.rows[0].text, result.cost.layer_ratio
    """
    chosen = None if full else choose(model.config, speedup, schedule)
    return generate_ids(model, tokenizer, encode_prompts(tokenizer, prompts), chosen, batch_size, **options)


def generate_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    plan: Plan,
    batch_size: int,
    on_batch: Callable[[Cost], object] | None = None,
    **options: Any,
) -> Generated:
    """The same for token-id prompts and any plan; ``on_batch`` is told each batch's cost."""
    room = positions(model)
    longest = max(map(len, prompts), default=0) + options.get("max_new_tokens", 0)
    if room is not None and longest > room:
        raise UsageError(f"the longest prompt and max_new_tokens need {longest} positions, the model has {room}")
    result = Generated(Cost(model.config.get_text_config(decoder=True).num_hidden_layers))
    rows: dict[int, Row] = {}
    for indices, batch, cost in batches(model, tokenizer, dict(enumerate(prompts)), plan, batch_size, **options):
        rows.update(zip(indices, batch, strict=True))
        result.cost += cost
        result.lengths.append(cost.steps)
        if on_batch:
            on_batch(cost)
    result.rows = [rows[i] for i in range(len(prompts))]
    return result


def batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Mapping[int, list[int]],
    plan: Plan,
    batch_size: int,
    seed: int | None = None,
    **options: Any,
) -> Iterator[tuple[list[int], list[Row], Cost]]:
    """(keys, rows, cost) of token-id ``prompts`` by batch; with a ``seed``, a batch samples the same when run again."""
    # Similar lengths share a batch, the longest first: what does not fit in memory shows at once.
    order = sorted(prompts, key=lambda i: (-len(prompts[i]), i))
    for start in range(0, len(order), batch_size):
        keys = order[start : start + batch_size]
        if seed is not None:
            torch.manual_seed(seed + keys[0])
        rows, cost = generate_batch(model, tokenizer, [prompts[i] for i in keys], plan, **options)
        yield keys, rows, cost


def positions(model: PreTrainedModel) -> int | None:
    """How many tokens, prompt and new ones together, the model has positions for; None if it does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def _stop_ids(model: PreTrainedModel, options: dict[str, Any]) -> set[int]:
    ends = options.get("eos_token_id", model.generation_config.eos_token_id)
    if ends is None:
        return set()
    return set(ends) if isinstance(ends, list) else {ends}


def _row(tokenizer: PreTrainedTokenizerBase, new: list[int], stops: set[int]) -> Row:
    end = next((i for i, token in enumerate(new) if token in stops), None)
    tokens = len(new) if end is None else end + 1
    text = tokenizer.decode(new[:tokens], skip_special_tokens=True).strip()
    return Row(text, tokens, "length" if end is None else "stop")


def _bytes(cache: DynamicCache) -> int:
    return sum(x.nbytes for layer in cache.layers if layer.keys is not None for x in (layer.keys, layer.values))
