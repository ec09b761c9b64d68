"""Checkpoints in: a directory, a hub name, ``demo`` for the embedded one, or a config to start from scratch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .errors import ModelError, UnsupportedModel
from .gate import attach
from .prompts import for_decoding, train_tokenizer

DEMO = Path(__file__).parent / "checkpoint"


def resolve(name: str) -> str:
    """Path or hub name of a model. Raises ModelError for what can be neither."""
    if name == "demo":
        return str(DEMO)
    path = Path(name)
    if path.is_dir() and not (path / "config.json").exists():
        raise ModelError(f"{name} holds no config.json: is it a Hugging Face checkpoint?")
    if not path.is_dir() and (path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ModelError(f"no model at {name}: give a directory, a hub name, or 'demo'")
    return name


def load(
    name: str = "demo",
    *,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    attention: str | None = None,
    revision: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM with gates attached, and its tokenizer.

    Args:
        name: directory, hub name, or ``demo``.
        dtype: ``auto`` is the checkpoint's own on a GPU; on a CPU float32, or bfloat16 where both the checkpoint and
            the CPU's arithmetic have it.
        device: ``cuda``, ``cpu``, …; a GPU if there is one.
        attention: ``eager``, ``sdpa``, …; transformers' choice if None.
        revision: of a hub model.

    Raises:
        ModelError: no such model, no decoder-only causal LM, or no such device.
    """
    config = read_config(name, revision)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    if dtype == "auto" and device == "cpu" and (config.dtype != torch.bfloat16 or not _fast_bfloat16()):
        dtype = torch.float32
    options: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            resolve(name), config=config, dtype=dtype, revision=revision, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(resolve(name), revision=revision)
        return attach(model.to(device).eval()), for_decoding(tokenizer)
    except UnsupportedModel:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{name} cannot be loaded: {_first_line(error)}") from error


def check_device(device: str) -> None:
    """Raises ModelError for a device that is not there."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"there is no device {device!r} here: {_first_line(error)}") from error


def read_config(name: str, revision: str | None = None) -> Any:
    """A model's config, read without its weights. Raises ModelError."""
    try:
        config = AutoConfig.from_pretrained(resolve(name), revision=revision)
    except (OSError, KeyError, ValueError) as error:
        raise ModelError(f"no model could be read at {name}: {_first_line(error)}") from error
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder model; SkipDecode works on decoder-only causal LMs")
    return config


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def new_config(path: Path) -> Any:
    """The config of a model to be made, from a ``config.json``. Raises ModelError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return AutoConfig.for_model(values.pop("model_type"), **values)
    except (OSError, json.JSONDecodeError, KeyError, ValueError) as error:
        raise ModelError(f"{path} is no model config: {error}") from error


def from_config(
    path: Path, texts: Sequence[str], tokenizer: str | None = None, attention: str | None = None, seed: int = 0
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model with random weights from a ``config.json``, and a tokenizer: a given one, or BPE trained on ``texts``.

    The config's ``vocab_size`` is the size to train; token ids in it are set to the tokenizer's.
    """
    config = new_config(path)
    if tokenizer:
        tokens = for_decoding(AutoTokenizer.from_pretrained(tokenizer))
    else:
        tokens = train_tokenizer(texts, config.vocab_size)
    config.vocab_size = max(config.vocab_size, len(tokens))
    config.pad_token_id, config.eos_token_id = tokens.pad_token_id, tokens.eos_token_id
    config.bos_token_id = tokens.bos_token_id if tokens.bos_token_id is not None else tokens.eos_token_id
    torch.manual_seed(seed)
    options = {"attn_implementation": attention} if attention else {}
    return AutoModelForCausalLM.from_config(config, **options), tokens


def _fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware."""
    return any(present is True and name.endswith("bf16") for name, present in cpu_capabilities().items())


def cpu_capabilities() -> Mapping[str, Any]:
    """What torch knows about the CPU; nothing on torch versions that do not say."""
    return getattr(torch.cpu, "get_capabilities", dict)()
