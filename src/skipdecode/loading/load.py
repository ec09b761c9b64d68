"""Checkpoints: a name is resolved once into model files, a tokenizer and an adapter, and loaded from there."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_accelerate_available, is_gguf_available

from ..errors import FileError, MissingExtra, ModelError, UnsupportedModel, UsageError
from ..model.adapter import (
    is_adapter,
    load_adapter,
    locate_adapter,
    read_about,
    read_sampling,
    read_schedules,
)
from ..model.attach import attach
from ..model.config import CONFIG_KEY, bind, config_schedules, num_layers, set_entry
from ..schedule import Schedule, choose_schedule
from .device import default_device, placement
from .int8 import linear_class, optimize
from .offload import Offload

DEMO = Path(__file__).parent.parent / "demo"

#: Patterns of the files that decide what a checkpoint generates.
FILES = "*.safetensors *.jinja *.model config.json generation_config.json tokenizer* skipdecode_adapter.json"
#: A file's fingerprint is made from so many blocks of so many bytes; from all of a small file.
BLOCKS, BLOCK = 256, 4096


@dataclass(frozen=True)
class Checkpoint:
    """Files that a name stands for: a model's and perhaps an adapter's.

    Properties are read when first used, and only once. Raises ModelError where the files cannot be read.
    """

    name: str  #: As the user wrote it, for messages.
    path: str  #: Folder of the model as an absolute path, or its name on the Hub.
    gguf_file: str | None = None  #: In that folder.
    adapter: Path | None = None  #: Folder of the adapter to attach.
    revision: str | None = None  #: Branch, tag or commit of a model on the Hub.

    @classmethod
    def resolve(
        cls, name: str | Path = "demo", adapter: str | Path | None = None, revision: str | None = None
    ) -> Checkpoint:
        """Checkpoint that a name stands for. Arguments and errors are those of :func:`load`."""
        model = name = str(name)
        folder = None if adapter is None else locate_adapter(adapter)
        if name != "demo" and is_adapter(Path(name)):
            folder = folder or Path(name)
            model = _base_model(Path(name))
        return cls(name, *_locate(model), folder, revision)

    @cached_property
    def config(self) -> Any:
        """transformers' config of the model, as its files have it."""
        with self._errors():
            config = AutoConfig.from_pretrained(self.path, **self._options)
        if config.is_encoder_decoder:
            raise UnsupportedModel(f"{self.name} is an encoder-decoder model: SkipDecode works on decoder-only models")
        return config

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer, with left padding and a padding token that has an embedding."""
        with self._errors():
            tokenizer = AutoTokenizer.from_pretrained(self.path, **self._options)
        tokenizer.padding_side = "left"
        padding = tokenizer.pad_token_id
        if padding is None or padding >= self.config.get_text_config(decoder=True).vocab_size:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)  # any token will do
        return tokenizer

    @cached_property
    def generation_config(self) -> GenerationConfig:
        """transformers' GenerationConfig that the model generates with unless the user says otherwise."""
        config = own = GenerationConfig.from_model_config(self.config)
        if self.gguf_file is None:
            try:
                config = GenerationConfig.from_pretrained(self.path, revision=self.revision)
            except Exception as error:  # the file is optional
                if (file := Path(self.path, "generation_config.json")).exists() or not isinstance(error, OSError):
                    raise FileError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
        if config is not own and config.eos_token_id is not None:
            return config
        ends = _turn_ends(self)
        if self.gguf_file is not None:
            ends |= _gguf_ends(Path(self.path, self.gguf_file))
        known = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
        config.eos_token_id = sorted({*known, *ends} - {None}) if ends else own.eos_token_id
        return config

    @property
    def sampling(self) -> dict[str, Any]:
        """The adapter's sampling, which comes before the model's where layers are skipped; {}: it names none."""
        return {} if self.adapter is None else read_sampling(self.adapter)

    @cached_property
    def schedules(self) -> dict[float, Schedule]:
        """Trained schedules by speed-up: the adapter's, else those in the model's config."""
        return config_schedules(self.config) if self.adapter is None else read_schedules(self.adapter)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return num_layers(self.config)

    def schedule(self, speedup: float | None = None, given: Schedule | None = None) -> Schedule:
        """Schedule for a speed-up, or the given one. Raises ScheduleError if the model or its adapter cannot run it."""
        schedule = given or choose_schedule(self.schedules, self.num_layers, speedup)
        bind(schedule, self.config, None if self.adapter is None else self.schedules)
        return schedule

    @cached_property
    def folder(self) -> Path:
        """Folder with the weights; for a model on the Hub, where huggingface_hub keeps them here."""
        if Path(self.path).is_dir():
            return Path(self.path)
        from huggingface_hub import snapshot_download

        with self._errors():
            files = snapshot_download(self.path, revision=self.revision, allow_patterns=["model*.safetensors*"])
        return Path(files)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the names, sizes and sampled bytes of the model's and adapter's files, or of the commit on the Hub.

        It tells whether a job goes on with the same model.
        """
        files = [Path(self.path, self.gguf_file)] if self.gguf_file else _files(Path(self.path))
        files += [] if self.adapter is None else _files(self.adapter)
        on_hub = None if Path(self.path).is_dir() else (self.path, getattr(self.config, "_commit_hash", None))
        digest = hashlib.sha256(repr(on_hub).encode())
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb") as content:
                for start in range(0, size, max(size // BLOCKS, BLOCK)):
                    content.seek(start)
                    digest.update(content.read(BLOCK))
        return digest.hexdigest()[:16]

    def load(
        self,
        dtype: str | torch.dtype = "auto",
        device: str | None = None,
        attn_implementation: str | None = None,
        offload: str | Offload | None = None,
        quantization: str | None = None,
        prepack: bool = False,
    ) -> PreTrainedModel:
        """Model with gates attached and its adapter on. :func:`load` describes the arguments and errors."""
        dtype, device = placement(self.config, dtype, device)
        if device.partition(":")[0] not in ("cpu", here := default_device()):
            raise UsageError(f"this machine has no device {device}: give cpu, or leave it out for {here}")
        kind = linear_class(quantization, prepack, device)
        places = {} if offload is None else self._offload_options(offload, dtype, device)
        if places and kind is not None:
            raise UsageError("offloaded layers take no int8 or prepacked weights: leave one of these out")
        if device != "cpu" and is_accelerate_available():
            places = places or {"device_map": {"": device}}
        model = self.read_weights(dtype=dtype, attn_implementation=attn_implementation, **places).eval()
        model = model if places else model.to(device)
        adapter = None
        if self.adapter is not None:  # compared with the model's weights before these are replaced
            files = None if self.gguf_file else lambda: self.folder
            adapter = load_adapter(self.adapter, model, files).to(dtype=model.dtype)
            adapter.merge(model)
        model = optimize(model, quantization, prepack, None if adapter is None else adapter.private)
        return attach(model, adapter=adapter)

    def _offload_options(self, offload: str | Offload, dtype: str | torch.dtype, device: str) -> dict[str, Any]:
        if self.gguf_file is not None:
            raise UsageError("a GGUF file cannot be offloaded: load it, save_pretrained, and offload that folder")
        if not is_accelerate_available():
            raise MissingExtra("offloading needs accelerate: pip install '.[memory]' in a clone")
        settings = Offload(offload) if isinstance(offload, str) else offload
        ranking = choose_schedule(self.schedules, self.num_layers).ranking
        named = (self.config.dtype or torch.float32) if dtype == "auto" else dtype
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(deepcopy(self.config), dtype=named, trust_remote_code=False)
        return settings.options(empty, ranking, device)

    def read_weights(self, **options: Any) -> PreTrainedModel:
        """Model without gates, by transformers' ``from_pretrained`` with ``options``, if all weights are there."""
        options |= self._options | {"use_safetensors": self.gguf_file is None or None}
        if self.gguf_file is not None and options.get("dtype", "auto") == "auto":  # transformers' own for .gguf
            options["dtype"] = torch.float32
        with self._errors():
            model, info = AutoModelForCausalLM.from_pretrained(
                self.path, config=self.config, output_loading_info=True, **options
            )
        if missing := sorted(info["missing_keys"]):
            raise ModelError(f"{self.name}: {len(missing)} weights are missing from its files, such as {missing[0]}")
        model.generation_config = deepcopy(self.generation_config)
        set_entry(model.config, getattr(self.config, CONFIG_KEY, None))  # a multimodal config's part for text lacks it
        if self.gguf_file is not None:  # its weights are floats by now; transformers would refuse to save them
            model.hf_quantizer = None
            model.is_quantized = False
            del model.config.quantization_config
        return model

    @property
    def _options(self) -> dict[str, Any]:
        return {"revision": self.revision, "trust_remote_code": False, "gguf_file": self.gguf_file}

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """ModelError in place of what libraries raise for files that are missing or damaged."""
        try:
            yield
        except ImportError:
            raise
        except Exception as error:  # of damaged files, libraries raise anything
            reason = " ".join(str(error).split())[:300]
            if self.adapter == Path(self.name):
                reason = f"give its base model {self.path}, which cannot be read, and --adapter {self.name} ({reason})"
            raise ModelError(f"{self.name} cannot be loaded: {reason}") from error


def load(
    name: str | Path = "demo",
    *,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    offload: str | Offload | None = None,
    quantization: str | None = None,
    prepack: bool = False,
    adapter: str | Path | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Causal LM with gates attached, and its tokenizer. Code in the checkpoint is never run.

    Args:
        name: ``demo``, a folder, a GGUF file, a model on the Hub, or an adapter's folder, which loads its base model
            with the adapter. Weights of a GGUF file are converted to ``dtype``.
        dtype: ``float32``, ``bfloat16`` or ``float16``. ``auto``: the checkpoint's; on a CPU only bfloat16 that it
            computes in hardware, else float32.
        device: ``cuda``, ``mps``, ``cpu``, …; None: an accelerator if there is one, else the CPU.
        attn_implementation: ``eager``, ``sdpa``, …; None: transformers' choice.
        revision: branch, tag or commit of a model on the Hub.
        offload: where decoder layers wait: ``auto``, ``disk``, ``cpu``, or an
            :class:`~skipdecode.loading.offload.Offload`, which also limits the memory for weights.
        quantization: ``int8``: layers and LM head compute in 8 bits, on CPUs.
        prepack: bfloat16 or float32 weights of layers and LM head in the layout of the CPU's kernels.
        adapter: folder of an adapter, or its name on the Hub.

    Raises:
        ModelError: the model does not exist, or is no decoder-only causal LM; weights are missing, of another shape, or
            not in safetensors; this CPU lacks the kernels of int8.
        FileError: the adapter is missing or damaged.
        MissingExtra: a GGUF file needs the package ``gguf``, or offloading accelerate.
        UsageError: an unknown quantization, or more than one of quantization, prepack and offload.
    """
    checkpoint = Checkpoint.resolve(name, adapter, revision)
    return checkpoint.load(dtype, device, attn_implementation, offload, quantization, prepack), checkpoint.tokenizer


def _locate(name: str) -> tuple[str, str | None]:
    """Folder or Hub name, and the GGUF file in the folder, that ``name`` stands for."""
    path = Path(name)
    if name == "demo":
        if (path / "config.json").exists() or is_adapter(path):
            raise ModelError("demo is the demo model, and a folder here: write ./demo, or rename the folder")
        return str(DEMO), None
    if (path / "config.json").exists():
        return os.path.abspath(path), None
    if path.is_dir():
        raise ModelError(f"{name} holds no config.json: give a folder with a whole model, or an adapter's")
    if path.suffix.lower() == ".gguf" and path.is_file():
        if not is_gguf_available():
            raise MissingExtra(f"{name} needs the package gguf: pip install '.[gguf]' in a clone")
        return os.path.abspath(path.parent), path.name
    if path.exists() or _looks_like_path(name):
        raise ModelError(f"no model at {name}: give a folder, a GGUF file, a model on the Hub, or 'demo'")
    return name, None


def _looks_like_path(name: str) -> bool:
    """Whether ``name`` cannot be one on the Hub, which has at most one slash."""
    return name.count("/") > 1 or bool(re.search(r"^[./~]|\\|/$|\.gguf$", name, re.IGNORECASE))


def _base_model(adapter: Path) -> str:
    """Model that an adapter's folder names. A relative path starts here, or in a folder above the adapter's."""
    name = str(read_about(adapter)["base_model"])
    if name == "demo" or Path(name).exists():
        return name
    for parent in adapter.resolve().parents:
        if (parent / name / "config.json").is_file() or (name.endswith(".gguf") and (parent / name).is_file()):
            return str(parent / name)
    if _looks_like_path(name):
        raise ModelError(f"the adapter {adapter} is for {name}, which is not here: give the model, --adapter {adapter}")
    return name


def _files(folder: Path) -> list[Path]:
    return sorted({file for pattern in FILES.split() for file in folder.glob(pattern)})


def _gguf_ends(file: Path) -> set[int]:
    """Ids of the tokens that end a text or a turn, from a GGUF file's header."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    keys = [f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom")]
    return {int(fields[key].parts[-1][0]) for key in keys if key in fields}


def _turn_ends(checkpoint: Checkpoint) -> set[int]:
    """Id of the special token with which the chat template, if there is one, ends an assistant's turn, if it does."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "…"}]
    with suppress(Exception):  # a template may raise anything
        tokenizer = checkpoint.tokenizer
        after = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("…")[2]
        ids = tokenizer(after, add_special_tokens=False)["input_ids"]
        known = tokenizer.added_tokens_decoder
        return {token for token in ids[:1] if token in known and known[token].special}
    return set()
