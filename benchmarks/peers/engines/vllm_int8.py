"""A checkpoint in the form of compressed-tensors with int8 weights per channel; activations are quantized per token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

#: As llm-compressor writes it for W8A8; the head stays as it was.
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
            },
        }
    },
}  # fmt: skip


def write_int8(checkpoint: Path, folder: Path) -> Path:
    """Round every layer's matrices to int8 with one scale per row. Returns ``folder``."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            if weight.ndim == 2 and ".layers." in name:
                scale = weight.float().abs().amax(1, keepdim=True) / 127
                tensors[name] = (weight.float() / scale).round().clamp(-127, 127).to(torch.int8)
                tensors[f"{name}_scale"] = scale.to(weight.dtype)
            else:
                tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (checkpoint / name).exists():
            shutil.copy(checkpoint / name, folder)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}), encoding="utf-8")
    return folder
