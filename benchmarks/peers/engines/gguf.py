"""A Llama-type checkpoint as GGUF, without a vocabulary: prompts are token ids."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from safetensors.torch import load_file

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(checkpoint: Path, file: Path, kind: str) -> Path:
    """Matrices as ``kind`` (f32, bf16, q8_0), vectors as float32. Returns ``file``."""
    if file.exists():
        return file
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(f"llama.cpp runs no {config['model_type']}")
    unfinished = file.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    rows = {"self_attn.q_proj": heads, "self_attn.k_proj": config["num_key_value_heads"]}
    matrices = gguf.GGMLQuantizationType[kind.upper()]
    for path in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            name = name.removesuffix(".weight")
            array = tensor.float()
            if name in WHOLE:
                target = WHOLE[name]
            else:
                layer, part = name.removeprefix("model.layers.").split(".", 1)
                target = f"blk.{layer}.{PARTS[part]}"
                if part in rows:  # llama.cpp rotates neighbours, transformers halves
                    array = _neighbours(array, rows[part])
            values: np.ndarray = array.contiguous().numpy()
            if values.ndim == 2:
                writer.add_tensor(f"{target}.weight", quantize(values, matrices), raw_dtype=matrices)
            else:
                writer.add_tensor(f"{target}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(file)


def _neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from two halves into pairs."""
    out, inner = weight.shape
    return weight.view(heads, 2, out // heads // 2, inner).transpose(1, 2).reshape(out, inner)
