"""Whether a checkpoint is whole: what transformers would fill in, leave out or trip over later is refused here."""

from __future__ import annotations

import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.checkpoint_config import layer_count
from ..core.schedule import MOST_LAYERS
from ..core.stack import decoder_layers
from ..errors import FileError, ModelError, SkipDecodeError, UnsupportedModel
from ..files import read_json

#: What the libraries raise while they read files that are wrong. Nothing of ours runs where these are caught.
UNREADABLE = (
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    ImportError,
    MemoryError,
    EOFError,
    UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
    SafetensorError,
    StrictDataclassError,
)

#: What a family computes and old checkpoints hold all the same: masks (no projection is called so), angles, versions.
COMPUTED = (
    "inv_freq",
    "masked_bias",
    "attn.bias",
    "attention.bias",
    "causal_mask",
    "cos_cached",
    "sin_cached",
    ".version",
)

TEXT_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

#: Keys of a generation config by what they hold.
WHOLE = """max_length max_new_tokens min_length min_new_tokens num_beams num_return_sequences top_k no_repeat_ngram_size
bos_token_id pad_token_id""".split()
NUMBERS = "temperature top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty length_penalty".split()
FLAGS = """do_sample use_cache output_attentions output_hidden_states output_scores output_logits
return_dict_in_generate renormalize_logits remove_invalid_values""".split()
IDS = ("eos_token_id", "suppress_tokens", "begin_suppress_tokens")
LISTS_OF_IDS = ("bad_words_ids",)


@contextmanager
def as_model_error(what: str) -> Iterator[None]:
    """Around calls of transformers that read files: what they raise becomes a ModelError that begins with ``what``."""
    try:
        yield
    except SkipDecodeError:
        raise
    except Exception as error:
        # The tokenizers library raises bare Exceptions; ours are of classes of their own.
        if not isinstance(error, UNREADABLE) and type(error) is not Exception:
            raise
        raise ModelError(f"{what}: {_one_line(error)}") from error


def _one_line(error: BaseException | None) -> str:
    if isinstance(error, UnpicklingError):
        return "it is damaged, or holds more than tensors, which is never unpickled"
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return "it needs code of its own (auto_map), which skipdecode never runs"
    if "offload_folder" in text:
        return "offloaded weights that are converted when they are read need a place: give --offload-folder"
    named = text if isinstance(error, (OSError, ValueError)) and text else f"{type(error).__name__} {text}".strip()
    return named if len(named) <= 300 else named[:300] + "…"


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint. Raises ModelError."""
    try:
        values = read_json(path)
    except FileError as error:
        raise ModelError(str(error)) from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds no JSON object")
    return values


def check_files(folder: Path, names: Sequence[str] = TEXT_FILES) -> None:
    """Raises ModelError where one of these is there, but no JSON object: transformers may go on without it."""
    for path in (folder / name for name in names):
        if path.is_file():
            read_object(path)


def check_config(name: str, config: Any) -> None:
    """Raises ModelError for an encoder-decoder model, and for layers and dropout that no model has."""
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder model; SkipDecode works on decoder-only causal LMs")
    with as_model_error(f"the config of {name} names no num_hidden_layers"):
        layers = layer_count(config)
    if type(layers) is not int or not 1 <= layers <= MOST_LAYERS:
        raise ModelError(f"the config of {name}: num_hidden_layers is 1 to {MOST_LAYERS}, not {layers!r}")
    for key, value in vars(config.get_text_config(decoder=True)).items():
        if "drop" in key and isinstance(value, (int, float)) and not 0 <= value <= 1:
            raise ModelError(f"the config of {name}: {key} is between 0 and 1, not {value!r}")


def check_size(folder: Path, model: PreTrainedModel) -> None:
    """Raises ModelError for a large model that is larger than its files, before it is given memory.

    Args:
        folder: of the checkpoint.
        model: on the meta device.
    """
    files = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    count = sum(parameter.numel() for parameter in model.parameters())
    # Quantized weights have at least a bit each. What is missing from a small one is told by name.
    if count > max(8 * files, 1 << 28):
        raise ModelError(f"{folder}: its config describes {count:,} weights, its files have room for {8 * files:,}")


def check_weights(name: str, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """What was loaded is what was saved: every parameter from the files, no layer left over, only finite numbers.

    Args:
        name: of the checkpoint.
        model: as ``from_pretrained`` returned it.
        info: its ``output_loading_info``. Tied weights, and what a family says may be left out, are not in it.

    Raises:
        ModelError: else.
    """
    for key, saved, wanted in sorted(info["mismatched_keys"]):
        raise ModelError(f"{name}: {key} has the shape {tuple(saved)}, its config wants {tuple(wanted)}")
    _refuse(name, info["missing_keys"], "are missing from its files")
    extra = {key for key in info["unexpected_keys"] if not key.endswith(COMPUTED)}
    layers = decoder_layers(model)
    stack = next(path for path, module in model.named_modules() if module is layers)
    # Under the module that holds the layers; older files leave the base model's name out.
    decoder = (stack.rpartition(".")[0] + ".", stack.removeprefix(f"{model.base_model_prefix}.") + ".")
    _refuse(name, {key for key in extra if key.startswith(decoder)}, "in its files are not used by its config")
    if extra:
        shown = ", ".join(sorted(extra)[:3])
        warnings.warn(f"{name}: {len(extra)} weights are no part of a causal LM: left out ({shown})", stacklevel=3)
    for key, parameter in model.named_parameters():
        # Quantized weights are whole numbers, and those offloaded to a disk have nothing to be read here.
        if parameter.is_floating_point() and not parameter.is_meta and not finite(parameter.detach()):
            raise ModelError(f"{name}: {key} holds values that are not finite")


def finite(weight: torch.Tensor) -> bool:
    """Whether all its values are."""
    # A finite sum is proof, and needs no memory; one that is not may have come of large numbers.
    return bool(weight.sum(dtype=torch.float32).isfinite()) or bool(weight.isfinite().all())


def _refuse(name: str, keys: set[str], why: str) -> None:
    if keys:
        shown = ", ".join(sorted(keys)[:2]) + (", …" if len(keys) > 2 else "")
        raise ModelError(f"{name}: {len(keys)} weights {why}: {shown}")


def check_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Raises ModelError for a tokenizer without words, or one whose ids the model has no embeddings for.

    Added tokens may lie beyond the last of ``rows`` (Gemma 3's stand for images), unless every batch may hold them.
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


def check_generation(name: str, config: Any) -> None:
    """Raises ModelError for a generation config with values of wrong type, by its key."""
    numbers = (int, float)
    for keys, kinds in ((WHOLE, (int,)), (NUMBERS, numbers), (FLAGS, (bool,))):
        for key in keys:
            value = getattr(config, key, None)
            if value is not None and (not isinstance(value, kinds) or isinstance(value, bool) != (kinds == (bool,))):
                raise ModelError(f"{name}: generation_config.json has {key} = {value!r}")
    for key in (*IDS, *LISTS_OF_IDS):
        value = getattr(config, key, None)
        rows = value if key in LISTS_OF_IDS else [[value] if type(value) is int else value]
        if value is not None and not (isinstance(rows, list) and all(map(_are_ids, rows))):
            raise ModelError(f"{name}: generation_config.json has {key} = {value!r}")
    with as_model_error(f"{name}: generation_config.json cannot be used"):
        config.validate()


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)
