"""Tiny random models of every supported family, and what the tests do with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    FalconH1Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    LlamaConfig,
    LogitsProcessor,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from skipdecode import Schedule, SkipCache, attach, detach, teacher_forced
from skipdecode.evaluation.exactness import discarding_skipped
from skipdecode.model.cache import layer_kv_bytes
from skipdecode.model.cache_name import CACHE

LAYERS = 8
WINDOW = 6
LENGTHS = (9, 5, 2)  # uneven prompts; the first is wider than the sliding window
WIDTH = max(LENGTHS)
NEW = 11  # new tokens: one from the prompt's pass and 10 steps, past every horizon below and past the window
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
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Layers with keys among layers whose state is a recurrence, in no regular pattern.
_HYBRID = ["full_attention" if i in (1, 4, 6) else "linear_attention" for i in range(LAYERS)]
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
}
_SHARED = {"num_kv_shared_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
_PER_LAYER = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}
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
    # Experts; latent attention.
    "mixtral": (MixtralConfig, {**_MODERN, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (Qwen3MoeConfig, {**_MODERN, **_MOE, "head_dim": 8, "num_experts": 4}),
    "gpt-oss": (
        GptOssConfig,
        {**_MODERN, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "glm4-moe": (Glm4MoeConfig, {**_MODERN, **_MOE, "head_dim": 8, "n_routed_experts": 4, "first_k_dense_replace": 1}),
    "deepseek-v3": (
        DeepseekV3Config,
        {**_MODERN, **_MOE, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
        | {"first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "head_dim": 4},
    ),
    # Recurrent layers between attention, or beside it in every layer; layers of two classes.
    "qwen3.5": (Qwen3_5TextConfig, {**_MODERN, **_LINEAR, "head_dim": 8, "layer_types": _HYBRID}),
    "granite4-hybrid": (
        GraniteMoeHybridConfig,
        {**_MODERN, **_MAMBA, "num_local_experts": 0, "shared_intermediate_size": 32, "layer_types": _HYBRID},
    ),
    "falcon-h1": (FalconH1Config, {**_MODERN, **_MAMBA, "head_dim": 8, "mamba_d_ssm": 64}),
    "jamba": (
        JambaConfig,
        {**_MODERN, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 3, "attn_layer_offset": 1}
        | {"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    ),
    # Inputs of their own per layer; upper layers borrow the keys of lower ones.
    "gemma3n": (
        Gemma3nTextConfig,
        {**_GEMMA, **_PER_LAYER, **_SHARED, "sliding_window": WINDOW, "laurel_rank": 4}
        | {"altup_num_inputs": 3, "intermediate_size": [48] * LAYERS, "activation_sparsity_pattern": [0.0] * LAYERS},
    ),
    "gemma4": (
        Gemma4TextConfig,
        {**_GEMMA, **_PER_LAYER, "num_kv_shared_layers": 0, "layer_types": _SHARED["layer_types"]}
        | {"sliding_window": WINDOW, "global_head_dim": 8},
    ),
    "gemma4-shared": (
        Gemma4TextConfig,
        {**_GEMMA, **_PER_LAYER, **_SHARED, "sliding_window": WINDOW, "global_head_dim": 8},
    ),
}

#: One family of each form: layers that return tuples, sliding windows, recurrent layers, keys that are lent.
FORMS: tuple[str, ...] = ("opt", "gpt-neo", "gemma3", "qwen3.5", "gemma4-shared")
#: The upper layers of these attend to the keys of lower ones. Before 5.21, no config said which: they were refused.
SHARED = ("gemma3n", "gemma4-shared")
if not hasattr(Gemma3nTextConfig, "kv_sharing_modes"):
    FAMILIES = {name: family for name, family in FAMILIES.items() if name not in SHARED}
    FORMS = tuple(name for name in FORMS if name in FAMILIES)

EAGER_ONLY = {"gemma2", "gpt-neo", "gpt-oss"}  # transformers gives them no SDPA
#: Where larger weights make float32 itself lose more than the tolerance, cached or not: long products, recurrences.
_SCALES = {"qwen3.5": 0.05, "jamba": 0.1, "deepseek-v3": 0.15}
#: Families whose layers do nothing but attend to keys of their own and multiply by fixed weights: costs are formulas.
DENSE = tuple(FAMILIES)[: tuple(FAMILIES).index("mixtral")]
#: Each family in what transformers runs it with; one of each form in both.
ATTENTIONS = [(name, "eager" if name in EAGER_ONLY else "sdpa") for name in FAMILIES]
ATTENTIONS += [(name, "eager") for name in FORMS if name in FAMILIES and name not in EAGER_ONLY]

SCHEDULES: dict[str, Schedule] = {
    "top": Schedule(LAYERS, 6, 2, horizon=8),
    "top-to-1": Schedule(LAYERS, 8, 1, horizon=9, warmup=0),
    "bottom": Schedule(LAYERS, 7, 2, horizon=9, order="bottom"),
    "even": Schedule(LAYERS, 5, 3, horizon=6, decay="cosine", order="even"),
    "permutation": Schedule(LAYERS, 7, 1, horizon=8, decay="power", order=(4, 2, 7, 1, 0, 5, 3, 6)),
    "list": Schedule.from_depths(LAYERS, (8, 8, 6, 3, 3, 1), warmup=1),
    "constant": Schedule(LAYERS, 3, 3, horizon=1, decay="constant"),
    "prompt": Schedule(LAYERS, 4, 2, horizon=8, prompt_layers=6, prompt_decay=5),
    "prompt-wide": Schedule(LAYERS, 3, 2, horizon=8, prompt_decay=12, order=(6, 0, 3, 7, 5, 1, 4, 2)),
}
TOP = SCHEDULES["top"]


def build(name: str, attention: str | None = None) -> PreTrainedModel:
    """A model of the family with weights large enough for every layer to matter; the same weights at every call."""
    return deepcopy(_first(name, attention))


@cache
def _first(name: str, attention: str | None) -> PreTrainedModel:
    config_class, options = FAMILIES[name]
    config = config_class(**options)
    attention = attention or ("eager" if name in EAGER_ONLY else "sdpa")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=0.1) if parameter.ndim < 2 else parameter.copy_(_SCALES.get(name, 0.2) * noise)
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
        options[CACHE] = SkipCache(attach(model), schedule)
    defaults = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(**inputs, **(defaults | options))


def positions(mask: Tensor) -> Tensor:
    """Position ids as ``generate`` makes them."""
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)


def uncached(model: PreTrainedModel, schedule: Schedule, sequences: Tensor, prompt_mask: Tensor, **options: Any) -> Any:
    """One teacher-forced pass over whole sequences, without a cache."""
    width, length = prompt_mask.shape[1], sequences.shape[1]
    mask = torch.cat([prompt_mask, prompt_mask.new_ones(len(sequences), length - width)], dim=1)
    told = {"position_ids": positions(mask)} if "position_ids" in signature(model.forward).parameters else {}
    with teacher_forced(model, schedule, width):
        return model(sequences, attention_mask=mask, use_cache=False, **told, **options)


def reference_logits(
    model: PreTrainedModel, schedule: Schedule, sequences: Tensor, prompt_mask: Tensor, adapter: Any = None
) -> Tensor:
    """The reference's logits of each generated token, uncached: (batch, new tokens, vocabulary)."""
    width, sequences = prompt_mask.shape[1], sequences[:, :-1]
    mask = torch.cat([prompt_mask, prompt_mask.new_ones(len(sequences), sequences.shape[1] - width)], dim=1)
    told = {"position_ids": positions(mask)} if "position_ids" in signature(model.forward).parameters else {}
    with torch.no_grad(), discarding_skipped(detach(model), schedule, width, sequences, adapter):
        return model(sequences, attention_mask=mask, use_cache=False, **told).logits[:, width - 1 :]


@contextmanager
def naive(model: PreTrainedModel, schedule: Schedule, width: int) -> Iterator[PreTrainedModel]:
    """The stock model with every pass undone where a layer should not have run; to be run without a cache."""
    stock = detach(model).forward

    @wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with discarding_skipped(model, schedule, width, kwargs["input_ids"]):
            return stock(*args, **kwargs)

    model.forward = forward
    try:
        yield model
    finally:
        del model.forward


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
            logits = model(ids, attention_mask=mask, position_ids=where, **{CACHE: cache}, use_cache=True).logits
        yield number
        ids = logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the logits' scale."""
    return float(((a - b).abs().max() / b.abs().max()).detach())


def same(a: Any, b: Any) -> bool:
    """Whether two outputs of ``run`` have the same tokens and logits, to the bit."""
    return torch.equal(a.sequences, b.sequences) and all(map(torch.equal, a.logits, b.logits))


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

    def __init__(self, cache: DynamicCache) -> None:
        self.cache = cache
        self.measure_layer_kv: list[list[int]] = []  # per pass, per layer

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.measure_layer_kv.append([layer_kv_bytes(layer) for layer in self.cache.layers])
        return scores


def texts_of(model: PreTrainedModel) -> dict[str, Any]:
    """A batch of texts that the model wrote, left-padded, as a Collator makes one."""
    text = run(model, prompts()).sequences
    mask = torch.cat([prompts()["attention_mask"], torch.ones(len(text), text.shape[1] - WIDTH, dtype=torch.long)], 1)
    batch = {"input_ids": text[:, :-1], "attention_mask": mask[:, :-1], "prompt_length": WIDTH}
    batch["position_ids"] = (mask[:, :-1].cumsum(1) - 1).clamp(min=0)
    batch["labels"] = torch.cat([torch.full((len(text), 1), -100), text[:, WIDTH:]], 1)
    return batch
