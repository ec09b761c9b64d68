"""Load checkpoints from a directory, the hub or the package (``demo``), or make a model from a config."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import EntryNotFoundError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME, is_accelerate_available, is_gguf_available, logging

from ..data.tokenize import for_decoding, train_tokenizer
from ..errors import MissingExtra, ModelError, UsageError
from ..model.adapter_folder import hash_of_files, is_adapter, load_adapter, locate_adapter, read_about, read_schedules
from ..model.attach import attach
from ..model.config import CONFIG_KEY, set_entry, to_config_entry
from ..model.inspect import text_config
from ..provenance import identity
from .checkpoint_checks import (
    as_model_error,
    check_config,
    check_files,
    check_size,
    check_tokenizer,
    check_weights,
    read_object,
)
from .device import placement
from .linear import check_linear
from .offload import Offload, prepare_offloaded
from .optimize import check_optimizations, linear_kind, optimizations, optimize

DEMO = Path(__file__).parent.parent / "demo"

#: Model types for which tests check that cached decoding equals a pass without a cache.
TESTED = frozenset(
    """opt gpt2 gpt_neo gpt_neox llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 mixtral qwen3_moe gpt_oss
    glm4_moe deepseek_v3 qwen3_5_text granitemoehybrid falcon_h1 jamba gemma3n_text gemma4_text""".split()
)


def resolve(name: str, files: Sequence[str] = ("config.json",)) -> str:
    """Return the absolute path or hub name from which config, weights, tokenizer and generation config are read.

    Args:
        name: ``demo`` (the embedded checkpoint), a folder, a GGUF file, or else a hub name; results of this function
            stay the same. The folder of an adapter stands for the model that the adapter was trained on.
        files: a folder must hold one of these.

    Raises:
        MissingExtra: a GGUF file is given, and the package that reads it is not installed.
        ModelError: there is no such folder and the name is no hub name; the folder holds no whole checkpoint; or
            ``demo`` is also a folder here.
    """
    path = Path(name)
    if name == "demo":
        if is_adapter(path) or any((path / file).exists() for file in ("config.json", "tokenizer_config.json")):
            raise ModelError("demo is the embedded checkpoint, and a folder here: give ./demo, or rename the folder")
        return str(DEMO)
    if path.is_dir():
        if is_adapter(path):
            return resolve(read_about(path)["base_model"], files)
        if (path / "adapter_config.json").exists():
            raise ModelError(f"{name} holds a PEFT adapter: merge it first (merge_and_unload), save the whole model")
        if not any((path / file).exists() for file in files):
            if any((*path.glob("training.json"), *path.glob("own_*.jsonl*"))):
                raise ModelError(f"training of {name} has not ended: the same train command goes on")
            if saved := sorted(path.glob("checkpoint-*"), key=lambda each: each.stat().st_mtime):
                raise ModelError(f"{name} holds checkpoints and no model: give one of them, such as {saved[-1]}")
            raise ModelError(f"{name} holds no {' or '.join(files)}: is it a Hugging Face checkpoint?")
        return os.path.abspath(path)
    if path.suffix == ".gguf" and path.is_file():
        if not is_gguf_available():
            raise MissingExtra(f"{name} needs the package gguf: pip install 'skipdecode[gguf]'")
        return os.path.abspath(path)
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"no model at {name}: give a directory, a GGUF file, a hub name, or 'demo'")
    return name


def is_gguf(path: str | Path) -> bool:
    """Tell whether a path from :func:`resolve` is a GGUF file."""
    return Path(path).suffix == ".gguf" and Path(path).is_file()


def refuse_gguf(name: str, what: str) -> None:
    """Raise UsageError if ``what`` is asked to read a GGUF file."""
    if is_gguf(resolve(name)):
        raise UsageError(f"{what} reads no GGUF file: load it, save it with save_pretrained, and give that folder")


def _source(path: str) -> tuple[str, dict[str, str]]:
    """Return what transformers' ``from_pretrained`` takes for a path from :func:`resolve`: a name, and options."""
    return (str(Path(path).parent), {"gguf_file": Path(path).name}) if is_gguf(path) else (path, {})


def load(
    name: str = "demo",
    *,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    attention: str | None = None,
    revision: str | None = None,
    offload: str | Offload | None = None,
    quantization: str | None = None,
    prepack: bool = False,
    adapter: str | Path | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM with gates attached, and its tokenizer, without running code of the checkpoint.

    Args:
        name: directory, GGUF file, hub name, or ``demo``; the folder of an adapter loads its model, and attaches the
            adapter. The weights of a GGUF file are converted to ``dtype``.
        dtype: ``float32``, ``bfloat16`` or ``float16``. ``auto``: the checkpoint's dtype on a GPU; on a CPU bfloat16 if
            the checkpoint has it and the CPU computes it in hardware, else float32.
        device: ``cuda``, ``mps``, ``cpu``, …; None: an accelerator if there is one, else the CPU.
        attention: ``eager``, ``sdpa``, …; None: transformers' choice.
        revision: revision of a hub model.
        offload: keep decoder layers in host memory or on the disk until they run: ``auto``, ``disk``, ``cpu``, or an
            :class:`~skipdecode.loading.offload.Offload`, which also limits the memory for weights.
        quantization: ``int8``: layers and LM head compute in 8 bits, on CPUs.
        prepack: store bfloat16 or float32 weights of layers and LM head in the layout of the CPU's kernels.
        adapter: folder or hub name of an adapter to attach.

    Raises:
        FileError: the adapter is missing or damaged.
        ModelError: the model, device or dtype does not exist; this machine cannot use int8 or prepacked weights; the
            checkpoint is no decoder-only causal LM; or it is damaged: weights that are missing, unused, of another
            shape or not finite, a tokenizer of another model, invalid JSON.
        UsageError: an unknown quantization, or more than one of quantization, prepack and offload.
    """
    folder, path = adapter_of(name, adapter), resolve(name)
    if folder is not None:
        read_about(folder)
    config = read_config(path, revision)  # the model's own entry, also where ``name`` is an adapter
    dtype, device = placement(config, dtype, device)
    optimized = optimizations(quantization, prepack)
    if isinstance(offload, str):
        offload = Offload(offload)
    if offload is not None and optimized:
        raise UsageError(f"offloaded layers take no {' or '.join(optimized)}: leave it or offload out")
    check_optimizations(name, config, dtype, device, **optimized)
    if (kind := linear_kind(**optimized)) is not None and (empty := _on_meta(config)) is not None:
        check_linear(empty, kind)
    options: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    if offload is not None:
        refuse_gguf(name, "offloading")
    placed = {} if offload is None else offload.options(_on_meta(config), dtype, device)
    if not placed and device != "cpu" and is_accelerate_available():
        options["device_map"] = {"": device}
    tokenizer = load_tokenizer(name, revision)
    model = read_weights(path, config=config, dtype=dtype, revision=revision, **options, **placed)
    check_tokenizer(name, tokenizer, model.get_input_embeddings().weight.shape[0])
    family = text_config(config).model_type
    if family not in TESTED:
        warnings.warn(f"{name}: models of type {family!r} are not tested: try `skipdecode check {name}`", stacklevel=2)
    if placed:
        prepare_offloaded(model)
    else:
        with as_model_error(f"{name} does not fit on {device!r}"):
            model = model.to(device)
    learnt = None
    if folder is not None:  # compared before weights are rounded to 8 bits
        files = None if is_gguf(path) else partial(checkpoint_files, path, revision)
        learnt = load_adapter(folder, model, files).to(dtype=model.dtype)
    return attach(optimize(model.eval(), **optimized), adapter=learnt), tokenizer


def read_weights(path: str, *, config: Any = None, revision: str | None = None, **options: Any) -> PreTrainedModel:
    """Read a checkpoint's model, and check that its weights are complete (:func:`check_weights`).

    Args:
        path: as :func:`resolve` returns it.
        config: the model's config; None: read it from ``path``.
        options: further options of transformers' ``from_pretrained``.

    Raises:
        ModelError: the checkpoint is damaged.
    """
    check_files(Path(path))
    config = read_config(path, revision) if config is None else config
    read_generation_config(path, revision)
    folder = Path(path) / (options.get("subfolder") or "")
    if folder.is_dir() and (empty := _on_meta(config)) is not None:
        check_size(folder, empty)
    with as_model_error(f"{path} cannot be loaded"), _quiet():
        options |= {"config": config, "revision": revision, "trust_remote_code": False, "output_loading_info": True}
        # check_weights refuses mismatched shapes, and names the weight.
        source, gguf = _source(path)
        model, info = AutoModelForCausalLM.from_pretrained(source, ignore_mismatched_sizes=True, **options, **gguf)
    check_weights(path, model, info)
    set_entry(model.config, getattr(config, CONFIG_KEY, None))  # a multimodal config's part for text lacks it
    if gguf:  # its weights are floats by now, but transformers refuses to save what it calls quantized
        model.hf_quantizer, model.is_quantized = None, False
        del model.config.quantization_config
    return model


def _on_meta(config: Any) -> PreTrainedModel | None:
    """Return the model on the meta device; None if that fails, since reading the model then raises a clear error."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(deepcopy(config), trust_remote_code=False)
    except Exception:
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' and accelerate's warnings about weights: :func:`check_weights` raises errors instead."""
    # accelerate warns that layers are offloaded.
    level, dispatching = logging.get_verbosity(), getLogger("accelerate.big_modeling")
    logging.set_verbosity_error()
    before, dispatching.disabled = dispatching.disabled, True
    try:
        yield
    finally:
        logging.set_verbosity(level)
        dispatching.disabled = before


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Return a checkpoint's tokenizer, with left padding and a padding token. Raises ModelError if it is damaged."""
    path = resolve(name, ("config.json", "tokenizer_config.json"))  # a folder may hold a tokenizer only
    check_files(Path(path))
    with as_model_error(f"the tokenizer of {name} cannot be read"):
        source, gguf = _source(path)
        return for_decoding(AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False, **gguf))


def checkpoint_files(path: str, revision: str | None = None) -> Path:
    """Return the folder with the files of a checkpoint; for a hub name, where the hub's library keeps its weights."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    with as_model_error(f"the weights of {path} cannot be read"):
        return Path(snapshot_download(path, revision=revision, allow_patterns=["model*.safetensors*"]))


def hash_of_checkpoint(name: str, model: PreTrainedModel) -> str | None:
    """Return :func:`hash_of_files` of the checkpoint that a model was loaded from; None for a GGUF file."""
    path = resolve(name)
    return None if is_gguf(path) else hash_of_files(checkpoint_files(path), model)


def adapter_of(name: str, adapter: str | Path | None = None) -> Path | None:
    """Return the folder of the adapter to attach: ``adapter``, else ``name`` if that is an adapter's folder."""
    if adapter is not None:
        return locate_adapter(adapter)
    return Path(name) if is_adapter(Path(name)) else None


def refuse_adapter(name: str, what: str) -> None:
    """Raise UsageError if ``what`` is asked to use an adapter: it would run the bare model."""
    if (folder := adapter_of(name)) is not None:
        raise UsageError(f"{what} cannot use adapters yet: {folder} is one, for {resolve(name)}")


def identity_of(name: str, adapter: str | Path | None = None, revision: str | None = None) -> list[Any]:
    """Return what identifies a model and its adapter in a job's hash: files as :func:`identity` has them, or a commit.

    Raises ModelError if a hub's commit can be learnt neither from the hub nor from the files that it left here.
    """
    folder, path = adapter_of(name, adapter), resolve(name)
    known = identity(path)
    if not Path(path).exists():
        with as_model_error(f"no model could be read at {name}"):
            known += [Path(_from_hub(path, "config.json", revision)).parent.name]  # …/snapshots/COMMIT/config.json
    return known + ([] if folder is None else identity(str(folder)))


def _from_hub(name: str, file: str, revision: str | None) -> str:
    """Return where the hub's library keeps a file of a model."""
    from huggingface_hub import hf_hub_download

    return hf_hub_download(name, file, revision=revision)


def read_config(name: str, revision: str | None = None, adapter: str | Path | None = None) -> Any:
    """Read a model's config without its weights; an adapter's schedules stand in the place of the model's own.

    Raises ModelError if the config is missing or invalid, or no decoder's, FileError if the adapter's folder is.
    """
    check_files(Path(resolve(name)), ["config.json"])
    with as_model_error(f"no model could be read at {name}"):
        source, gguf = _source(resolve(name))
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False, **gguf)
    check_config(name, config)
    if (folder := adapter_of(name, adapter)) is not None:
        set_entry(config, to_config_entry(read_schedules(folder)))
    return config


def read_generation_config(name: str, revision: str | None = None) -> GenerationConfig:
    """Return a checkpoint's generation config, else transformers' defaults. Raises ModelError for an invalid one."""
    path = resolve(name)
    if is_gguf(path):  # a generation_config.json beside it may be another model's
        return GenerationConfig()
    file = Path(path, GENERATION_CONFIG_NAME)
    with as_model_error(f"{path}: {GENERATION_CONFIG_NAME} cannot be used"):
        if not Path(path).exists():
            # It is optional. Where there is no network, one that is not here counts as one that the hub has not either.
            with suppress(EntryNotFoundError):
                file = Path(_from_hub(path, GENERATION_CONFIG_NAME, revision))
        if not file.exists():
            return GenerationConfig()
        config = GenerationConfig.from_pretrained(file.parent)
        config.validate()
        return config


def new_config(path: Path) -> Any:
    """Read the ``config.json`` of a model to train from scratch. Raises ModelError if it is invalid."""
    values = read_object(path)
    with as_model_error(f"{path} is no model config"):
        if not isinstance(values.get("model_type"), str):
            raise ModelError(f"{path} is no model config: it has no model_type")
        config = AutoConfig.for_model(**values)
    check_config(str(path), config)
    return config


def from_config(
    path: Path, texts: Sequence[str], tokenizer_name: str | None = None, attention: str | None = None, seed: int = 0
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Make a model with random weights from a ``config.json``; load its tokenizer, or train a BPE one on ``texts``.

    BPE is trained to the config's ``vocab_size``; the config gets the tokenizer's special token ids. ``seed`` decides
    the weights, ``attention`` is as :func:`load` takes it. Raise ModelError if the config is invalid.
    """
    config = new_config(path)
    tokenizer = load_tokenizer(tokenizer_name) if tokenizer_name else train_tokenizer(texts, config.vocab_size)
    config.vocab_size = max(config.vocab_size, len(tokenizer))
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    config.bos_token_id = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    torch.manual_seed(seed)
    options = {"attn_implementation": attention} if attention else {}
    with as_model_error(f"no model can be made from {path}"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options), tokenizer
