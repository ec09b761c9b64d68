"""A tiny checkpoint on disk, as a user would have one: OPT with eight layers and a BPE tokenizer of its own."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import typer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from skipdecode.cli.main import main
from skipdecode.data.tasks import Example

WORDS = "the cat sat on a mat and saw the dog that sat on the log near a small old house by the river".split()
TEXTS = [" ".join(WORDS[i : i + 7]) for i in range(len(WORDS) - 7)]
#: A prompt of nine characters and the rest of the text as its response.
EXAMPLES = [Example(text[:9], (text[10:],)) for text in TEXTS]


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most ``vocab_size`` tokens, 258 at least, with ``<pad>`` and ``</s>``."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        eos_token="</s>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def save_checkpoint(folder: Path, layers: int = 8, positions: int = 96) -> Path:
    """Random weights: what is tested is the machinery, not the text."""
    tokenizer = train_tokenizer(TEXTS * 20, vocab_size=320)
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        word_embed_proj_dim=32,
        num_hidden_layers=layers,
        ffn_dim=64,
        num_attention_heads=4,
        max_position_embeddings=positions,
        dropout=0.0,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    OPTForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_examples(path: Path, examples: Iterable[Example] = EXAMPLES) -> Path:
    """Examples with their first references, as the task ``jsonl`` reads them."""
    return write_jsonl(path, ({"prompt": e.prompt, "response": e.references[0]} for e in examples))


def sentence_pieces(kind: str = "legacy", *, bos: bool = True, eos: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer in the form of Llama's: a space is a letter, and a text begins with one that is not there.

    Args:
        kind: ``legacy`` (Llama 2: the normalizer puts it there), ``first`` or ``always`` (Metaspace, of pieces by
            BPE), ``unigram`` (Metaspace, of likely pieces), ``crossing`` (as legacy, with merges over words).
        bos, eos: whether every text gets one.
    """
    special = ["<unk>", "<s>", "</s>"]
    alphabet = sorted({*"".join(TEXTS), *map(chr, range(33, 127)), "▁", "\n"})
    if kind == "unigram":
        pieces = Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=200, special_tokens=special, unk_token="<unk>", initial_alphabet=alphabet, show_progress=False
        )
    else:
        pieces = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        trainer = trainers.BpeTrainer(
            vocab_size=200, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    scheme = kind if kind in ("first", "always") else "always"
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=kind != "crossing")
    pieces.decoder = decoders.Metaspace(prepend_scheme=scheme)
    pieces.train_from_iterator(TEXTS * 20, trainer)
    if kind in ("legacy", "crossing"):
        pieces.pre_tokenizer = pre_tokenizers.Sequence([])
        pieces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        strip = decoders.Strip(" ", 1, 0)
        pieces.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), strip])
    template = f"{'<s> ' * bos}$A{' </s>' * eos}"
    pieces.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=pieces,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


#: typer makes the whole tree of commands anew at every call.
_command = functools.cache(typer.main.get_command)


def run(*arguments: object, stdin: bytes = b"", program: Callable[[], object] = main) -> Done:
    """The command line, or another program, in this process: importing torch anew for each would take minutes."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    source = io.TextIOWrapper(io.BytesIO(stdin))
    with (
        mock.patch.object(sys, "argv", ["skipdecode", *map(str, arguments)]),
        mock.patch.object(sys, "stdin", source),
        mock.patch.object(typer.main, "get_command", _command),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            program()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return Done(code, out.getvalue(), err.getvalue())


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All of a model's, in one row."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])
