"""A tiny checkpoint on disk, as a user would have one: OPT with eight layers and a BPE tokenizer of its own."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from transformers import OPTConfig, OPTForCausalLM

from skipdecode.cli import main
from skipdecode.prompts import train_tokenizer

WORDS = "the cat sat on a mat and saw the dog that sat on the log near a small old house by the river".split()
TEXTS = [" ".join(WORDS[i : i + 7]) for i in range(len(WORDS) - 7)]


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


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def run(*arguments: object, stdin: bytes = b"") -> Done:
    """The command line, in this process: importing torch anew for each would take minutes."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    source = io.TextIOWrapper(io.BytesIO(stdin))
    with (
        mock.patch.object(sys, "argv", ["skipdecode", *map(str, arguments)]),
        mock.patch.object(sys, "stdin", source),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return Done(code, out.getvalue(), err.getvalue())
