"""Tiny random models of every supported family, and what the tests do with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    LogitsProcessor,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from skipdecode import Schedule, SkipCache, attach, teacher_forced

LAYERS = 8
WINDOW = 6
LENGTHS = (9, 5, 2)  # uneven prompts; the first is wider than the sliding window
WIDTH = max(LENGTHS)
NEW = 16  # new tokens: one from the prompt's pass and 15 steps, past every horizon below and past the window
STEPS = NEW - 1

_TOKENS = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_SHAPE = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "max_position_embeddings": 64}
_BASE = {**_TOKENS, **_SHAPE}
_OPT = {**_BASE, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
_MODERN = {**_BASE, "intermediate_size": 48, "num_key_value_heads": 2}
_GEMMA = {**_MODERN, "head_dim": 8}
_MIXED = ["full_attention" if i % 3 == 1 else "sliding_attention" for i in range(LAYERS)]
_GPT2 = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64, "n_inner": 48}
_GPT_NEO = {
    "hidden_size": 32,
    "num_layers": LAYERS,
    "num_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "attention_types": [[["global", "local"], LAYERS // 2]],
    "window_size": WINDOW,
    "embed_dropout": 0.0,
    "resid_dropout": 0.0,
    "attention_dropout": 0.0,
}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "opt": (OPTConfig, _OPT),
    "opt-post-norm": (OPTConfig, {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    "gpt2": (GPT2Config, {**_TOKENS, **_GPT2, **_NO_DROPOUT}),
    # Its layers return a tuple, and half of them attend locally without a sliding cache.
    "gpt-neo": (GPTNeoConfig, {**_TOKENS, **_GPT_NEO}),
    "gpt-neox": (GPTNeoXConfig, {**_BASE, "intermediate_size": 48}),
    "llama": (LlamaConfig, _MODERN),
    "mistral": (MistralConfig, {**_MODERN, "sliding_window": None}),
    "mistral-sliding": (MistralConfig, {**_MODERN, "sliding_window": WINDOW}),
    "qwen2": (Qwen2Config, _MODERN),
    "qwen2-sliding": (
        Qwen2Config,
        {**_MODERN, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3},
    ),
    "qwen2-mixed": (
        Qwen2Config,
        {**_MODERN, "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _MIXED},
    ),
    "qwen3": (Qwen3Config, {**_MODERN, "head_dim": 8}),
    "gemma": (GemmaConfig, _GEMMA),
    "gemma2": (Gemma2Config, {**_GEMMA, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": (Gemma3TextConfig, {**_GEMMA, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}),
    "phi": (PhiConfig, _MODERN),
    "phi3": (Phi3Config, _MODERN),
    "phi3-sliding": (Phi3Config, {**_MODERN, "sliding_window": WINDOW}),
}

_EAGER_ONLY = {"gemma2", "gpt-neo"}  # transformers gives them no SDPA
ATTENTIONS = [
    (name, kind) for name in FAMILIES for kind in ("eager", "sdpa") if kind == "eager" or name not in _EAGER_ONLY
]

SCHEDULES: dict[str, Schedule] = {
    "top": Schedule(LAYERS, 6, 2, horizon=8),
    "top-to-1": Schedule(LAYERS, 8, 1, horizon=15, warmup=0),
    "bottom": Schedule(LAYERS, 7, 2, horizon=10, order="bottom"),
    "even": Schedule(LAYERS, 5, 3, horizon=6, decay="cosine", order="even"),
    "permutation": Schedule(LAYERS, 7, 1, horizon=8, decay="power", order=(4, 2, 7, 1, 0, 5, 3, 6)),
    "list": Schedule.from_depths(LAYERS, (8, 8, 6, 3, 3, 1), warmup=1),
    "constant": Schedule(LAYERS, 3, 3, horizon=1, decay="constant"),
    "prompt": Schedule(LAYERS, 4, 2, horizon=8, prompt_decay=5),
    "prompt-wide": Schedule(LAYERS, 3, 2, horizon=8, prompt_decay=12, order=(6, 0, 3, 7, 5, 1, 4, 2)),
}
TOP = SCHEDULES["top"]


def build(name: str, attention: str | None = None) -> PreTrainedModel:
    """A model of the family with weights large enough for every layer to matter; the same weights at every call."""
    config_class, options = FAMILIES[name]
    config = config_class(**options)
    attention = attention or ("eager" if name in _EAGER_ONLY else "sdpa")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.1) if parameter.ndim < 2 else parameter.copy_(0.2 * noise)
    return model


def prompts(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    """A left-padded batch of random prompts."""
    width = max(lengths)
    ids = torch.randint(2, 128, (len(lengths), width), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    return {"input_ids": ids * mask, "attention_mask": mask}


def row(inputs: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """One prompt without its padding."""
    keep = inputs["attention_mask"][index].bool()
    return {key: value[index : index + 1, keep] for key, value in inputs.items()}


def run(model: PreTrainedModel, inputs: dict[str, Tensor], schedule: Schedule | None = None, **options: Any) -> Any:
    """``model.generate``, greedy unless told otherwise, with raw logits; no schedule is no SkipCache."""
    if schedule is not None:
        options["past_key_values"] = SkipCache(attach(model), schedule)
    defaults = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(**inputs, **(defaults | options))


def positions(mask: Tensor) -> Tensor:
    """Position ids as ``generate`` makes them."""
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)


def uncached(model: PreTrainedModel, schedule: Schedule, sequences: Tensor, prompt_mask: Tensor, **options: Any) -> Any:
    """One teacher-forced pass over whole sequences, without a cache."""
    width, length = prompt_mask.shape[1], sequences.shape[1]
    mask = torch.cat([prompt_mask, prompt_mask.new_ones(len(sequences), length - width)], dim=1)
    with teacher_forced(model, schedule, width):
        return model(sequences, attention_mask=mask, position_ids=positions(mask), use_cache=False, **options)


def new_token_logits(model: PreTrainedModel, schedule: Schedule, sequences: Tensor, prompt_mask: Tensor) -> Tensor:
    """Teacher-forced logits of each generated token: (batch, new tokens, vocabulary)."""
    with torch.no_grad():
        logits = uncached(model, schedule, sequences[:, :-1], prompt_mask).logits
    return logits[:, prompt_mask.shape[1] - 1 :]


def decode(model: PreTrainedModel, inputs: dict[str, Tensor], cache: Any, steps: int) -> Iterator[int]:
    """The prompt's pass and then ``steps`` greedy ones by hand; yields the pass's number right after it."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for number in range(steps + 1):
        where = positions(mask)[:, -ids.shape[1] :]
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, position_ids=where, past_key_values=cache, use_cache=True).logits
        yield number
        ids = logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the logits' scale."""
    return float(((a - b).abs().max() / b.abs().max()).detach())


def window(model: PreTrainedModel, layer: int) -> int | None:
    """The sliding window of a layer, or None if it attends to everything."""
    config = model.config
    size = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return size if types[layer] == "sliding_attention" else None


def heads(model: PreTrainedModel) -> tuple[int, int, int]:
    """(query heads, key and value heads, head size)."""
    config = model.config
    count = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // count
    return count, getattr(config, "num_key_value_heads", None) or count, size


class Probe(LogitsProcessor):
    """Notes what a cache holds after each pass of ``generate``."""

    def __init__(self, cache: SkipCache) -> None:
        self.cache = cache
        self.lengths: list[list[int]] = []  # per pass, per layer
        self.layer_bytes: list[list[int]] = []
        self.kv_bytes: list[int] = []
        self.tensors: list[list[bool]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        layers = self.cache.layers
        held = [[x for x in (layer.keys, layer.values) if x is not None] for layer in layers]
        self.lengths.append([layer.get_seq_length() for layer in layers])
        self.layer_bytes.append([sum(x.nbytes for x in tensors) for tensors in held])
        self.tensors.append([bool(tensors) for tensors in held])
        self.kv_bytes.append(self.cache.kv_bytes)
        return scores
