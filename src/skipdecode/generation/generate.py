"""Prompts in, texts and what they cost out: batches of similar length through the ordinary ``model.generate``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StopStringCriteria,
)

from ..core.attach import attach
from ..core.cache import SkipCache, cache_bytes
from ..core.checkpoint_config import resolve_schedule
from ..core.schedule import Schedule
from ..data.chat import Prompt
from ..data.tokenization import encode_prompts
from ..errors import UsageError
from .sampling import Sampling, stable_hash

#: How to decode: a schedule, None for the stock model, or what makes each batch's cache for methods of their own.
Decoding = Schedule | Callable[[PreTrainedModel], DynamicCache] | None

_OURS = "it is made from the prompts"
_MORE = "texts and their cost are returned; for more, give model.generate a SkipCache"
_GONE = "transformers no longer has this way of decoding"
#: Options of ``model.generate`` that are not taken here, and why.
REFUSED = {
    "inputs": _OURS,
    "input_ids": _OURS,
    "inputs_embeds": _OURS,
    "attention_mask": _OURS,
    "past_key_values": "each batch has a cache of its own",
    "cache_implementation": "each batch has a cache of its own",
    "return_dict_in_generate": _MORE,
    "output_scores": _MORE,
    "output_logits": _MORE,
    "output_attentions": _MORE,
    "output_hidden_states": _MORE,
    "streamer": "texts come batch by batch; to stream one, give model.generate a SkipCache",
    "generation_config": "give its values as options",
    "guidance_scale": "it runs the model a second time in every step, with all its layers",
    "penalty_alpha": _GONE,
    "dola_layers": _GONE,
    "num_beam_groups": _GONE,
    "constraints": _GONE,
    "force_words_ids": _GONE,
    "custom_generate": "it would replace the loop whose steps are counted",
}


@dataclass(frozen=True)
class Completion:
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
    completions: list[Completion] = field(default_factory=list)
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
    plan: Decoding,
    **options: Any,
) -> tuple[list[Completion], Cost]:
    """One batch of token-id prompts; ``plan`` None is the stock model with its ordinary cache.

    ``options`` go to ``model.generate``; greedy unless ``do_sample`` is among them.
    """
    width = max(map(len, prompts))
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    cache = _cache(model, plan)
    clock = _Clock()
    # What a checkpoint says of its cache and outputs is for others: the cache is ours, texts are what is wanted.
    defaults = {
        "do_sample": False,
        "num_return_sequences": 1,
        "pad_token_id": pad,
        "use_cache": True,
        "cache_implementation": None,
    }
    options = defaults | options
    options["logits_processor"] = LogitsProcessorList([*(options.get("logits_processor") or []), clock])
    strings = options.get("stop_strings", model.generation_config.stop_strings)
    start = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        tokenizer=tokenizer if strings else None,
        **options | {"return_dict_in_generate": True},
    )
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    end = time.perf_counter()
    sequences = output.sequences.where(output.sequences >= 0, pad)  # beams without an end are filled up with -1
    written = sequences[:, width:].tolist()
    eos = options.get("eos_token_id", model.generation_config.eos_token_id)
    ends = _ends(written, {eos} if isinstance(eos, int) else set(eos or ()))
    if strings:
        stop = StopStringCriteria(tokenizer, strings)
        for length in range(1, len(written[0]) + 1):
            for row, met in enumerate(stop(sequences[:, : width + length], None).tolist()):
                if met:
                    ends[row] = min(ends[row] or length, length)
    if options.get("stopping_criteria"):
        ends = [end or _unpadded(row, pad) for row, end in zip(written, ends, strict=True)]
    rows = [_completion(tokenizer, row, end) for row, end in zip(written, ends, strict=True)]
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
        peak_kv_bytes=getattr(cache, "peak_kv_bytes", None) or cache_bytes(cache),
    )
    return rows, cost


def _cache(model: PreTrainedModel, plan: Decoding) -> DynamicCache:
    if plan is None:
        return DynamicCache(config=model.config)
    return SkipCache(attach(model), plan) if isinstance(plan, Schedule) else plan(model)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: str | Iterable[Prompt],
    *,
    speedup: float | None = None,
    schedule: Schedule | str | Path | None = None,
    full: bool = False,
    batch_size: int = 32,
    seed: int | None = None,
    **options: Any,
) -> Generated:
    """Generate a text for each prompt.

    Args:
        prompts: texts (a string is one); batches are made of similar lengths, rows come back in the order given.
        speedup, schedule: the budget, or (it goes first) the schedule or its file; by default the one in the config.
        full: the unmodified model instead.
        batch_size: rows per ``model.generate`` call.
        seed: for sampling: a row's text then depends on it and on the row's place in ``prompts``, not on its batch
            (with beams: on the whole batch). None: torch's global generator.
        options: as ``model.generate`` names them (``max_new_tokens``, ``do_sample``, ``num_beams``, …). Greedy unless
            ``do_sample`` is given, whatever the checkpoint's generation_config says.

    Raises:
        ScheduleError: a schedule that does not fit the model.
        UsageError: no prompts, one that is no string or has no token, a prompt and ``max_new_tokens`` that need more
            positions than the model has, or options that are not taken.

    Example:
        >>> model, tokenizer = skipdecode.load("demo")
        >>> result = skipdecode.generate(model, tokenizer, ["name Aromi, food English ->"], speedup=3)
        >>> result.completions[0].text, result.cost.layer_ratio
    """
    texts = _texts(prompts)
    if isinstance(schedule, (str, Path)):
        schedule = Schedule.load(Path(schedule))
    elif not isinstance(schedule, (Schedule, type(None))):
        raise UsageError(f"schedule is a Schedule or the path of its JSON file, not {schedule!r}")
    if full and (speedup is not None or schedule is not None):
        raise UsageError("give one of speedup, schedule and full")
    chosen = None if full else resolve_schedule(model.config, speedup, schedule)
    return generate_ids(model, tokenizer, encode_prompts(tokenizer, texts), chosen, batch_size, seed=seed, **options)


def _texts(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (Mapping, bytes)):
        raise UsageError(f"prompts are a string or a list of strings, not {type(prompts).__name__}")
    texts = list(prompts)
    if not texts:
        raise UsageError("no prompts were given")
    for number, text in enumerate(texts):
        if isinstance(text, tuple):  # a conversation
            continue
        if not isinstance(text, str):
            raise UsageError(f"prompt {number} is no string: {text!r}")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UsageError(f"prompt {number} holds a lone surrogate, which no tokenizer knows: {text!r}")
    return texts


def generate_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    plan: Decoding,
    batch_size: int,
    on_batch: Callable[[Cost], object] | None = None,
    seed: int | None = None,
    **options: Any,
) -> Generated:
    """The same for token-id prompts and any plan; ``on_batch`` is told each batch's cost."""
    empty = next((number for number, prompt in enumerate(prompts) if not len(prompt)), None)
    if empty is not None:
        raise UsageError(f"prompt {empty} has no token to go on from: the tokenizer puts none at the beginning")
    room = max_positions(model)
    new = options.get("max_new_tokens") or 0
    longest = max(max(map(len, prompts), default=0) + new, 0 if new else options.get("max_length") or 0)
    if room is not None and longest > room:
        raise UsageError(f"the longest prompt and max_new_tokens need {longest} positions, the model has {room}")
    result = Generated(Cost(model.config.get_text_config(decoder=True).num_hidden_layers))
    rows: dict[int, Completion] = {}
    for indices, batch, cost in batches(model, tokenizer, dict(enumerate(prompts)), plan, batch_size, seed, **options):
        rows.update(zip(indices, batch, strict=True))
        result.cost += cost
        result.lengths.append(cost.steps)
        if on_batch:
            on_batch(cost)
    result.completions = [rows[i] for i in range(len(prompts))]
    return result


def batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Mapping[int, list[int]],
    plan: Decoding,
    batch_size: int,
    seed: int | None = None,
    **options: Any,
) -> Iterator[tuple[list[int], list[Completion], Cost]]:
    """(keys, rows, cost) of token-id ``prompts`` by batch; with a ``seed``, a key samples the same when run again."""
    _check(model, plan, batch_size, seed, options)
    # Similar lengths share a batch, the longest first: what does not fit in memory shows at once.
    order = sorted(prompts, key=lambda i: (-len(prompts[i]), i))
    for start in range(0, len(order), batch_size):
        keys = order[start : start + batch_size]
        chosen = [prompts[i] for i in keys]
        if seed is None or not options.get("do_sample"):
            rows, cost = generate_batch(model, tokenizer, chosen, plan, **options)
        else:
            # Beams are drawn for all rows at once: there it is the batch that is the same when run again.
            own = {} if _beams(model, options) > 1 else {"watermarking_config": Sampling(seed, keys)}
            with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
                torch.manual_seed(stable_hash(seed, *keys))
                rows, cost = generate_batch(model, tokenizer, chosen, plan, **options | own)
        yield keys, rows, cost


def _check(
    model: PreTrainedModel, plan: Decoding, batch_size: int, seed: int | None, options: Mapping[str, Any]
) -> None:
    """Raises UsageError for what cannot be."""
    if type(batch_size) is not int or batch_size < 1:
        raise UsageError(f"batch_size is a number of rows, 1 or more, not {batch_size!r}")
    if seed is not None and type(seed) is not int:
        raise UsageError(f"seed is a whole number, not {seed!r}")
    for name, reason in REFUSED.items():
        if options.get(name) is not None and options[name] is not False:
            raise UsageError(f"{name}: {reason}")
        # A checkpoint may ask for the same.
        asked = name not in options and getattr(model.generation_config, name, None)
        if asked and (reason == _GONE or name == "guidance_scale"):
            raise UsageError(f"the checkpoint's generation_config asks for {name}: {reason}; give {name}=None")
    if options.get("num_return_sequences", 1) != 1:
        raise UsageError("one text per prompt is generated: repeat the prompt instead of num_return_sequences")
    if plan is not None and options.get("use_cache") is False:
        raise UsageError("use_cache=False leaves a schedule nothing to skip by: it works through the cache")
    mark = options.get("watermarking_config", model.generation_config.watermarking_config)
    if seed is not None and mark is not None and options.get("do_sample") and _beams(model, options) == 1:
        raise UsageError("watermarking_config and seed: both would be the last to touch the scores; leave one out")


def _beams(model: PreTrainedModel, options: Mapping[str, Any]) -> int:
    return options.get("num_beams", model.generation_config.num_beams) or 1


def max_positions(model: PreTrainedModel) -> int | None:
    """How many tokens, prompt and new ones together, the model has positions for; None if it does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def _ends(written: Sequence[Sequence[int]], stops: set[int]) -> list[int | None]:
    """How many of each row's tokens there are up to the first of ``stops``; None if there is none."""
    return [next((n for n, token in enumerate(row, 1) if token in stops), None) for row in written]


def _unpadded(row: Sequence[int], pad: int) -> int | None:
    """How many tokens there are before the padding at the row's end; None if there is no padding."""
    length = next((n for n in range(len(row), 0, -1) if row[n - 1] != pad), 0)
    return length if length < len(row) else None


def _completion(tokenizer: PreTrainedTokenizerBase, new: list[int], end: int | None) -> Completion:
    text = tokenizer.decode(new[:end], skip_special_tokens=True).strip()
    return Completion(text, len(new[:end]), "length" if end is None else "stop")
