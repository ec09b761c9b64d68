"""Refuse damaged checkpoints, which transformers would load with random or missing weights, or fail on later."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import FileError, ModelError, SkipDecodeError, UnsupportedModel
from ..files import read_json
from ..model.config import num_layers
from ..model.inspect import decoder_layers

#: Suffixes of keys in old checkpoints whose values models now compute: masks, angles, versions.
COMPUTED = tuple("inv_freq masked_bias attn.bias attention.bias causal_mask cos_cached sin_cached .version".split())

TEXT_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@contextmanager
def as_model_error(what: str) -> Iterator[None]:
    """Turn any error raised inside, except a SkipDecodeError, into a ModelError that begins with ``what``."""
    try:
        yield
    except SkipDecodeError:
        raise
    except Exception as error:  # many libraries read a checkpoint's files, each with its own errors
        raise ModelError(f"{what}: {_one_line(error)}") from error


def _one_line(error: BaseException | None) -> str:
    if isinstance(error, UnpicklingError):
        return "it is damaged, or holds more than tensors, which is never unpickled"
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return "it needs code of its own (auto_map), which skipdecode never runs"
    if "offload_folder" in text:
        return "offloaded weights that are converted need a folder: give Offload(folder=…) or --offload-folder"
    named = text if isinstance(error, (OSError, ValueError)) and text else f"{type(error).__name__} {text}".strip()
    return named if len(named) <= 300 else named[:300] + "…"


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file of a checkpoint. Raise ModelError if it cannot be read or holds no JSON object."""
    try:
        values = read_json(path)
    except FileError as error:
        raise ModelError(str(error)) from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds no JSON object")
    return values


def check_files(folder: Path, names: Sequence[str] = TEXT_FILES) -> None:
    """Raise ModelError if a file of these names is there but holds no JSON object, which transformers may ignore."""
    for path in (folder / name for name in names):
        if path.is_file():
            read_object(path)


def check_config(name: str, config: Any) -> None:
    """Raise UnsupportedModel for an encoder-decoder model, ModelError for an impossible number of layers."""
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder model; SkipDecode works on decoder-only causal LMs")
    with as_model_error(f"the config of {name} names no num_hidden_layers"):
        layers = num_layers(config)
    if not layers:
        raise ModelError(f"the config of {name} has no decoder layers")


def check_size(folder: Path, model: PreTrainedModel) -> None:
    """Raise ModelError if a large ``model`` (on the meta device) has more weights than the files in ``folder`` hold."""
    files = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    count = sum(parameter.numel() for parameter in model.parameters())
    # Quantized weights have at least a bit each. For small models, check_weights names the missing weights.
    if count > max(8 * files, 1 << 28):
        raise ModelError(f"{folder}: its config describes {count:,} weights, its files have room for {8 * files:,}")


def check_weights(name: str, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Check that a model was loaded as it was saved.

    Args:
        name: the checkpoint's name, for messages.
        model: as ``from_pretrained`` returned it.
        info: its ``output_loading_info``, which omits tied weights and those that the model family may leave out.

    Raises:
        ModelError: weights are missing, of another shape or not finite, or the files hold layers that the model lacks.
    """
    for key, saved, wanted in sorted(info["mismatched_keys"]):
        raise ModelError(f"{name}: {key} has the shape {tuple(saved)}, its config wants {tuple(wanted)}")
    _refuse(name, info["missing_keys"], "are missing from its files")
    extra = {key for key in info["unexpected_keys"] if not key.endswith(COMPUTED)}
    layers = decoder_layers(model)
    stack = next(path for path, module in model.named_modules() if module is layers)
    # Keys of the decoder begin with one of these; older files leave the base model's name out.
    decoder = (stack.rpartition(".")[0] + ".", stack.removeprefix(f"{model.base_model_prefix}.") + ".")
    _refuse(name, {key for key in extra if key.startswith(decoder)}, "in its files are not used by its config")
    if extra:
        shown = ", ".join(sorted(extra)[:3])
        warnings.warn(f"{name}: {len(extra)} weights are no part of a causal LM: left out ({shown})", stacklevel=3)
    for key, parameter in model.named_parameters():
        # Quantized weights are integers; weights offloaded to the disk are on the meta device.
        if parameter.is_floating_point() and not parameter.is_meta and not finite(parameter.detach()):
            raise ModelError(f"{name}: {key} holds values that are not finite")


def finite(weight: torch.Tensor) -> bool:
    """Return whether all values of a weight are finite."""
    # A finite sum proves it without extra memory; large finite numbers may overflow the sum.
    return bool(weight.sum(dtype=torch.float32).isfinite()) or bool(weight.isfinite().all())


def _refuse(name: str, keys: set[str], why: str) -> None:
    if keys:
        shown = ", ".join(sorted(keys)[:2]) + (", …" if len(keys) > 2 else "")
        raise ModelError(f"{name}: {len(keys)} weights {why}: {shown}")


def check_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Raise ModelError if the vocabulary is empty, or a token has no embedding among the model's ``rows``.

    Added tokens other than pad, eos and bos may lack one, as Gemma 3's image token does.
    """
    words = set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder)
    if not words:
        raise ModelError(f"{name} holds no tokenizer: its vocabulary is empty")
    most = max(words)
    if most >= rows:
        raise ModelError(f"{name}: the tokenizer has {most + 1} tokens, the model {rows} embeddings")
    for role in ("pad", "eos", "bos"):
        token = getattr(tokenizer, f"{role}_token_id")
        if token is not None and token >= rows:
            raise ModelError(f"{name}: the tokenizer's {role} token is {token}, the model has {rows} embeddings")
