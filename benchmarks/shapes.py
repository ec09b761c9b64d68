"""Checkpoints with random weights and the dimensions of published models. Speed does not depend on the values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from skipdecode.loading.load import Checkpoint


def _opt(layers: int, width: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "word_embed_proj_dim": width,
        "ffn_dim": 4 * width,
        "num_attention_heads": heads,
        "max_position_embeddings": 4096,
    }


#: Configs by name. OPT's have 4,096 positions here, for long contexts.
SHAPES: dict[str, dict[str, Any]] = {
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "llama-3.1-8b": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "tiny": _opt(8, 64, 2) | {"vocab_size": 4096},
    "tiny-llama": {
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 4096,
    },
}


def config_of(shape: str) -> Any:
    """Return the config of a shape."""
    return AutoConfig.for_model(**SHAPES[shape] | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})


def write_checkpoint(shape: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write random weights and the demo model's tokenizer into ``folder``, unless they are there."""
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype)
        model.save_pretrained(folder, max_shard_size="100GB")
        Checkpoint.resolve("demo").tokenizer.save_pretrained(folder)
    return folder
