"""A checkpoint of a known shape with random weights, written layer by layer: it need not fit into memory.

    python benchmarks/checkpoint.py opt-6.7b FOLDER --dtype float32

The folder is an ordinary Hugging Face checkpoint with the demo's tokenizer: ``skipdecode generate FOLDER`` takes it.
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from model_shapes import shape_config
from skipdecode.loading.load import DEMO, load_tokenizer
from skipdecode.model.inspect import decoder_layers


def make(config: Any, folder: Path, dtype: torch.dtype, seed: int = 0) -> int:
    """Write the shards, the index, the config and the tokenizer. Returns the bytes of the weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = decoder_layers(model)
    stack = next(name for name, module in model.named_modules() if module is layers) + "."

    def shard_of(item: tuple[str, Tensor]) -> str:
        """A layer's weights lie in one file, and so do all others."""
        name = item[0]
        return f"layer-{int(name[len(stack) :].split('.')[0]):05d}" if name.startswith(stack) else "rest"

    folder.mkdir(parents=True, exist_ok=True)
    weights = sorted(model.named_parameters(), key=shard_of)  # tied ones once
    where: dict[str, str] = {}
    total = 0
    generator = torch.Generator().manual_seed(seed)
    for shard, items in groupby(weights, key=shard_of):
        values = {
            name: torch.empty(like.shape, dtype=dtype).uniform_(-0.02, 0.02, generator=generator)
            for name, like in items
        }
        save_file(values, folder / f"{shard}.safetensors", metadata={"format": "pt"})
        where |= dict.fromkeys(values, f"{shard}.safetensors")
        total += sum(value.nbytes for value in values.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    describe(config, folder, dtype)
    return total


def describe(config: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write all but the weights: the config and the tokenizer."""
    with torch.device("meta"):
        config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    load_tokenizer(str(DEMO)).save_pretrained(folder)


def main() -> None:
    """Write the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help="as skipdecode bench --shape takes it")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--layers", type=int, help="only so many layers")
    given = parser.parse_args()
    config = shape_config(given.shape)
    if given.layers:
        config.num_hidden_layers = given.layers
    size = make(config, given.folder, getattr(torch, given.dtype))
    print(f"{given.folder}: {given.shape}, {config.num_hidden_layers} layers, {given.dtype}, {size / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
