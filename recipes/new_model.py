"""A model with random weights and a byte-level BPE tokenizer of its own.

    python recipes/new_model.py CONFIG.json TRAIN OUTPUT [--task e2e] [--layers 12]

The tokenizer is trained on the examples in TRAIN, to the config's ``vocab_size``.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import typer
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from skipdecode.data.examples import read_examples
from skipdecode.data.tasks import get_task


def main(config_file: Path, data: str, output: Path, task: str = "e2e", layers: int = 0, seed: int = 0) -> None:
    """Write the model and its tokenizer to OUTPUT."""
    config = AutoConfig.for_model(**json.loads(config_file.read_text(encoding="utf-8")))
    config.num_hidden_layers = layers or config.num_hidden_layers
    examples = read_examples(data, get_task(task), "train")
    bpe = ByteLevelBPETokenizer()
    texts = (f"{example.prompt} {example.references[0]}" for example in examples)
    bpe.train_from_iterator(texts, config.vocab_size, special_tokens=["<pad>", "</s>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>", eos_token="</s>")
    config.pad_token_id = tokenizer.pad_token_id
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    typer.run(main)
