"""Checkpoints of the families that vLLM is tried with: random weights, schedules in the config."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from helpers.tiny import train_tokenizer
from skipdecode import Schedule
from skipdecode.model.config import to_config_entry

Result = TypeVar("Result")

LAYERS = 6
#: Depths that fall, a layer 0 that some skip, prompts of their own depth and decay: whatever a schedule can be.
SCHEDULES = {
    1.0: Schedule.full(LAYERS),
    2.0: Schedule(LAYERS, 4, 2, horizon=8),
    3.0: Schedule(LAYERS, 2, 1, horizon=4, order=(3, 5, 1, 0, 2, 4), prompt_layers=4, warmup=0),
    4.0: Schedule(LAYERS, 2, 1, horizon=6, order="even", prompt_decay=3, warmup=0),
}
COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
#: Family -> its own fields, and how vLLM runs it.
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, "auto"),
    "llama by transformers": ({}, "transformers"),
    "qwen2": ({}, "auto"),
    "qwen3": ({}, "auto"),
    "mistral": ({"sliding_window": None}, "auto"),
    "gemma3_text": ({"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 3}, "auto"),
    "gpt_neox": ({"num_key_value_heads": 2}, "auto"),
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, "auto"),
    "gemma2": ({"sliding_window": 16}, "auto"),
    "phi3": ({}, "auto"),
    "gpt2": ({"n_inner": 96}, "auto"),
    "cohere": ({}, "auto"),
    "exaone4": ({"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 3}, "auto"),
    "gemma4_text": (
        {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 300,
            "global_head_dim": 32,
            "num_kv_shared_layers": 0,
        },
        "auto",
    ),
    "qwen3_moe": ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, "auto"),
}


def checkpoint(name: str, folder: Path) -> Path:
    """Random weights with the schedules above in their config."""
    tokenizer = train_tokenizer(["the cat sat on the mat"], vocab_size=300)
    fields, _ = FAMILIES[name]
    kind = CONFIG_MAPPING[name.split()[0]]
    torch.manual_seed(0)
    config = kind(**(COMMON | fields), vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=1)
    config.skipdecode = to_config_entry(SCHEDULES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # wide enough that two tokens are seldom nearly tied
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def in_fresh_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """What transformers alone computes: vLLM's Transformers backend changes its classes for the rest of a process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
