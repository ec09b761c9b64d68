"""A checkpoint with random weights of a shape, which every engine can load: speed does not depend on their values."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PreTrainedConfig

from model_shapes import shape_config

UNKNOWN, PAD, END = 0, 1, 2
#: Tokens from here on are ordinary ones, of which prompts are made.
FIRST = 3

_IDS = {"pad_token_id": PAD, "bos_token_id": END, "eos_token_id": END}


def _opt(name: str, **others: int) -> OPTConfig:
    """A shape that SkipDecode knows, with other sizes, its weights' spread, and the tokens of our tokenizer."""
    config: OPTConfig = shape_config(name)
    config.update(others | _IDS)
    config.update({"initializer_range": config.hidden_size**-0.5})
    return config


def _llama(like: OPTConfig, inner: int) -> LlamaConfig:
    """The same width, depth, vocabulary and positions in Llama's form."""
    return LlamaConfig(
        vocab_size=like.vocab_size,
        hidden_size=like.hidden_size,
        intermediate_size=inner,
        num_hidden_layers=like.num_hidden_layers,
        num_attention_heads=like.num_attention_heads,
        max_position_embeddings=like.max_position_embeddings,
        initializer_range=like.initializer_range,
        tie_word_embeddings=True,
        **_IDS,
    )


_LARGE = _opt("opt-1.3b", max_position_embeddings=2048)
_TINY = _opt("tiny", hidden_size=128, word_embed_proj_dim=128, ffn_dim=512, vocab_size=512, max_position_embeddings=256)

#: ``llama-1.3b`` is OPT-1.3B's width, depth, vocabulary and number of weights in Llama's form, for engines without OPT.
SHAPES: dict[str, PreTrainedConfig] = {
    "opt-1.3b": _LARGE,
    "llama-1.3b": _llama(_LARGE, 5504),
    "opt-tiny": _TINY,
    "llama-tiny": _llama(_TINY, 320),
}


def write(shape: str, folder: Path) -> Path:
    """Write ``folder`` once: bfloat16 safetensors (in float32 for the tiny shapes) with a tokenizer. Returns it."""
    if (folder / "tokenizer_config.json").exists():
        return folder
    config = SHAPES[shape]
    torch.manual_seed(0)
    dtype = torch.float32 if shape.endswith("-tiny") else torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        # A logit of zero is never the greatest of thousands: no engine can end a text, or write padding.
        model.get_input_embeddings().weight[:FIRST] = 0
    model.save_pretrained(folder)
    save_tokenizer(config.vocab_size, folder)
    return folder


def save_tokenizer(size: int, folder: Path) -> None:
    """One token per character and then words that no text has, so that every id has a name.

    Written out by hand: what transformers 5 saves names a class that older ones, which some engines need, do not know.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<unk>", "<pad>", "</s>", *letters]
    names += [f"word{number}" for number in range(len(names), size)]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(names[:FIRST])
    tokenizer.save(str(folder / "tokenizer.json"))
    values: dict[str, object] = {
        "unk_token": names[UNKNOWN],
        "pad_token": names[PAD],
        "eos_token": names[END],
        "bos_token": names[END],
    }
    values |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=2), encoding="utf-8")


def prompts(shape: str, rows: int, length: int) -> list[list[int]]:
    """Random ordinary tokens: the same for every engine, and the first rows of a greater batch."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(FIRST, SHAPES[shape].vocab_size, (length,), generator=generator).tolist() for _ in range(rows)
    ]
