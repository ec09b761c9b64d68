"""Adapters: low-rank bypasses in place of skipped layers, bottlenecks before some others; their folders.

An adapter changes only positions that skip layers: the full model, and a prompt that runs all layers, stay as they are.
"""

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn.functional import silu

from ..errors import FileError, ModelError, UntrainedWarning
from ..files import read_json, write
from ..schedule import Schedule, SkippedSpan, skipped_spans
from .config import parse_schedules, speedup_key
from .inspect import decoder_layers
from .lora import LoRA, layer_of, linear_modules

logger = logging.getLogger(__name__)

#: A bottleneck stands before every fourth layer: few wide ones cost a step less than many narrow ones.
BOTTLENECK_INTERVAL = 4
#: Files of an adapter's folder; the last, the texts that it was trained on, is not published.
ABOUT, WEIGHTS, TEXTS = "skipdecode_adapter.json", "adapter.safetensors", "self_generated.jsonl"
#: An optional file of an adapter's folder, transformers' GenerationConfig: how its speeds sample where the user gives
#: nothing else. The model without skipping keeps its own.
GENERATION = "generation_config.json"
#: Its values that are read.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
#: Versions of the folder's format: without and with LoRA.
FORMATS = 2, 3
#: Values of each weight of the base model that are kept with the adapter, under names that begin so.
SAMPLED, SAMPLE = 256, "base_model_sample."
#: Most distance of a weight from the base model's, as a share of that. Up to there KL from the full model grows by less
#: than a tenth: noise of 2% adds 2%, of 5% 13%, rounding to 4 bits (10%) 30% (results/adapter_distance.json).
MAX_DISTANCE = 0.04


class LowRank(nn.Module):
    """Two matrices, (size, rank) and (rank, size); the second begins at 0, so that nothing changes at first."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(size, rank) / size**0.5)
        self.up = nn.Parameter(torch.zeros(rank, size))

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states (…, size), changed, in their dtype."""
        if self.down.device != hidden.device:  # layers may be on several devices
            self.to(hidden.device)
        # In two dimensions: of three, products take several times longer for one position of a few rows on a CPU.
        rows = hidden.reshape(-1, hidden.shape[-1]).to(self.down.dtype)
        return self.changed(rows).view(hidden.shape).to(hidden.dtype)

    def changed(self, hidden: Tensor) -> Tensor:
        """Hidden states (positions, size) with the change added."""
        raise NotImplementedError

    def reduce(self, hidden: Tensor) -> Tensor:
        """Product (positions, rank) with the first matrix."""
        return hidden @ self.down

    def expand(self, low: Tensor, other: Tensor) -> Tensor:
        """Sum of ``other`` (positions, size) and the product with the second matrix."""
        return torch.addmm(other, low, self.up)


class LowRankBypass(LowRank):
    """An affine map in place of a skipped span: ``h + (h A) B + c``."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__(size, rank)
        self.bias = nn.Parameter(torch.zeros(size))

    def changed(self, hidden: Tensor) -> Tensor:
        """Hidden states (positions, size) as they might be after the skipped layers."""
        return self.expand(self.reduce(hidden), hidden + self.bias)


class Bottleneck(LowRank):
    """A correction before a layer that runs: ``h + silu(norm(h) A) B``, with the root mean square as the norm."""

    def changed(self, hidden: Tensor) -> Tensor:
        """Corrected hidden states. The norm is a factor, so it can follow the product: a smaller operation."""
        factor = hidden.shape[-1] ** 0.5 / torch.linalg.vector_norm(hidden, dim=-1, keepdim=True).clamp_min(1e-6)
        return self.expand(silu(self.reduce(hidden) * factor), hidden)


class Adapter(nn.Module):
    """The low-rank bypasses, bottlenecks and LoRA of one model, for one speed-up or several.

    Args:
        size: width of the hidden states.
        rank: of each bypass and bottleneck, at most ``size``.
        schedules: by target speed-up, each bound to the model (:func:`~skipdecode.model.config.bind`).
        linears: (inputs, outputs) of the linear modules of the layers, as :func:`~skipdecode.model.lora.linear_sizes`
            gives them. Those of layers that run above skipped ones get LoRA.
        lora_rank: of each LoRA; 0: none.

    Attributes:
        loras: LoRA by the name of the linear module that it changes, like ``15.self_attn.q_proj``.
        private: by name, linear modules with a merged LoRA (:meth:`merge`); others add theirs to the output.
        sampling: options that its speeds sample with where the user gives none.
    """

    def __init__(
        self,
        size: int,
        rank: int,
        schedules: Mapping[float, Schedule],
        linears: Mapping[str, tuple[int, int]] | None = None,
        lora_rank: int = 0,
    ) -> None:
        super().__init__()
        self.size = size
        self.rank = min(rank, size)
        self.schedules = dict(schedules)
        self.num_layers = next(iter(schedules.values())).num_layers
        spans: set[SkippedSpan] = set()
        corrected: set[int] = set()
        above: set[int] = set()
        for schedule in schedules.values():
            for layers in schedule.prompt_layer_sets | schedule.step_layer_sets:
                own = skipped_spans(layers, self.num_layers)
                spans.update(own)
                if own:
                    corrected.update(layer for layer in layers if (layer + 1) % BOTTLENECK_INTERVAL == 0)
                    above.update(layer for layer in layers if layer > own[0].start)
        self.bypasses = nn.ModuleDict({str(span): LowRankBypass(size, self.rank) for span in sorted(spans)})
        self.bottlenecks = nn.ModuleDict({str(layer): Bottleneck(size, self.rank) for layer in sorted(corrected)})
        self._acts_before = corrected.union(span.start for span in spans)
        chosen = {name: sizes for name, sizes in (linears or {}).items() if layer_of(name) in above and lora_rank}
        self.lora_rank = lora_rank
        self.loras = {name: LoRA(*sizes, lora_rank) for name, sizes in sorted(chosen.items())}
        self.lora = nn.ModuleDict({name.replace(".", "/"): lora for name, lora in self.loras.items()})
        self.private: dict[str, nn.Module] = {}
        self.sampling: dict[str, Any] = {}

    def merge(self, model: nn.Module) -> None:
        """Make private copies of those linear modules that have LoRA, so that it takes no time; they take memory.

        Modules whose weights are offloaded, or are not plain numbers, add their LoRA to the output instead.
        """
        linears: Mapping[str, Any] = linear_modules(model)
        found = {name: linears[name] for name in self.loras if name in linears and not linears[name].weight.is_meta}
        if found:
            size = sum(module.weight.nbytes for module in found.values())
            logger.warning(
                "LoRA is merged into copies of %d linear modules: %.1f MB more memory", len(found), size / 1e6
            )
        self.private = {name: self.loras[name].merged(module) for name, module in found.items()}

    def apply_before(self, layer: int, hidden: Tensor, axis: int, counts: Sequence[int]) -> Tensor:
        """Input of a layer, changed at the positions that skip layers and run this one or enter a skipped span here.

        ``axis`` is that of the positions in ``hidden``; ``counts`` says how many of them, from the first on, each layer
        runs.
        """
        width = hidden.shape[axis]
        if layer not in self._acts_before or min(counts) == width:
            return hidden
        # Positions that run the same layers stand side by side: they end where a layer's positions end.
        ends = sorted({*counts, width} - {0})
        parts = []
        start = 0
        acting = {end: self._module(layer, [i for i, count in enumerate(counts) if count >= end]) for end in ends}
        for module, same in groupby(ends, acting.get):
            stop = max(same)
            part = hidden.narrow(axis, start, stop - start)
            parts.append(part if module is None else module(part))
            start = stop
        return torch.cat(parts, axis) if len(parts) > 1 else parts[0]

    def _module(self, layer: int, running: Sequence[int]) -> Any:
        """Module that acts before ``layer`` at a position that runs the layers ``running``, in network order."""
        if layer in running:
            acts = len(running) < self.num_layers and str(layer) in self.bottlenecks
            return self.bottlenecks[str(layer)] if acts else None
        if layer > 0 and layer - 1 not in running:
            return None
        stop = next((other for other in running if other > layer), self.num_layers)
        return self.bypasses[str(SkippedSpan(layer, stop))]

    def changes(self, layers: Sequence[int]) -> dict[int, LowRank]:
        """Modules that act at a position that runs ``layers``, by the layer that each stands before."""
        modules = {layer: self._module(layer, layers) for layer in range(self.num_layers)}
        return {layer: module for layer, module in modules.items() if module is not None}

    def loras_at(self, layers: Sequence[int]) -> dict[str, LoRA]:
        """LoRA that acts at a position that runs ``layers``, by the name of the linear module; none if all run."""
        acting = layers if len(layers) < self.num_layers else ()
        return {name: lora for name, lora in self.loras.items() if layer_of(name) in acting}

    def flops(self, layers: Sequence[int]) -> int:
        """FLOPs at one position that runs ``layers``, which are in network order."""
        matrices = [weight for module in self.changes(layers).values() for weight in (module.down, module.up)]
        unmerged = (lora for name, lora in self.loras_at(layers).items() if name not in self.private)
        matrices += [weight for lora in unmerged for weight in lora.parameters()]
        return sum(2 * weight.numel() for weight in matrices)


# --- the folder


def save_adapter(folder: Path, adapter: Adapter, model: nn.Module, base: str) -> None:
    """Write an adapter, its schedules, and samples of the weights of its base model, whose name or path is ``base``.

    Weights are written in float32; in bfloat16 if the base model is in bfloat16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "skipdecode_adapter": FORMATS[bool(adapter.loras)],
        "base_model": base,
        "rank": adapter.rank,
        "lora_rank": adapter.lora_rank,
        "schedules": {speedup_key(speedup): schedule.to_dict() for speedup, schedule in adapter.schedules.items()},
    }
    dtype = torch.bfloat16 if next(model.parameters()).dtype == torch.bfloat16 else torch.float32
    stack = decoder_layers(model) if adapter.loras else None
    layers = next((name for name, module in model.named_modules() if module is stack), "")
    weights = {}
    for name, each in adapter.state_dict().items():
        if name.startswith("lora."):  # PEFT's names
            name = f"base_model.model.{layers}.{name.removeprefix('lora.').replace('/', '.')}.weight"
        name = name.replace("bypasses.", "stand_ins.")  # the format's name of bypasses
        weights[name] = each.to("cpu", dtype).contiguous()
    samples = {SAMPLE + name: sample(weight) for name, weight in model.named_parameters()}
    write(folder / WEIGHTS, save(weights | samples))
    write(folder / ABOUT, json.dumps(about, indent=1) + "\n")


def locate_adapter(name: str | Path) -> Path:
    """Folder of an adapter; a Hub repository is downloaded. Raises FileError if ``name`` is neither."""
    hub_name = name.as_posix() if isinstance(name, Path) else name  # Windows writes other slashes
    if Path(name).exists() or hub_name.startswith((".", "/", "~")) or hub_name.count("/") != 1:
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_name, allow_patterns=[ABOUT, WEIGHTS, GENERATION]))
    except (OSError, ValueError) as error:
        raise FileError(f"{name} is neither a folder nor a Hub repository: {str(error).splitlines()[0]}") from error


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (folder / ABOUT).is_file()


def read_about(folder: Path) -> dict[str, Any]:
    """Values of ``skipdecode_adapter.json``. Raises FileError if there is none, or one of another version."""
    if not is_adapter(folder):
        raise FileError(f"{folder} holds no adapter: there is no {ABOUT}")
    about = read_json(folder / ABOUT)
    if not isinstance(about, dict) or "base_model" not in about or about.get("skipdecode_adapter") not in FORMATS:
        raise FileError(f"{folder / ABOUT} was written by another version of skipdecode, or is damaged")
    return about


def read_schedules(folder: Path) -> dict[float, Schedule]:
    """Schedules of a folder's adapter, by target speed-up."""
    return parse_schedules(read_about(folder), str(folder / ABOUT))


def read_sampling(folder: Path) -> dict[str, Any]:
    """Sampling options in the GenerationConfig of an adapter's folder; {} if there is none."""
    values = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    return {name: values[name] for name in SAMPLING if name in values}


def read_adapter(folder: Path) -> Adapter:
    """Adapter of a folder, whatever the model. Raises FileError if it is missing or damaged."""
    about = read_about(folder)
    try:
        weights: dict[str, Tensor] = {}
        loras: dict[str, dict[str, Tensor]] = {}
        for name, each in load_file(folder / WEIGHTS).items():
            if name.startswith(SAMPLE):
                continue
            if lora := re.fullmatch(r".*?\b(\d+\..+)\.(lora_[AB])\.weight", name):
                loras.setdefault(lora[1], {})[lora[2]] = each
                name = f"lora.{lora[1].replace('.', '/')}.{lora[2]}"
            weights[name.replace("stand_ins.", "bypasses.")] = each
        size = next((tensor.shape[0] for name, tensor in weights.items() if name.endswith("down")), 0)
        sizes = {name: (parts["lora_A"].shape[1], parts["lora_B"].shape[0]) for name, parts in loras.items()}
        adapter = Adapter(size, about["rank"], read_schedules(folder), sizes, about.get("lora_rank", 0))
        adapter.load_state_dict(weights)
        adapter.sampling = read_sampling(folder)
    except (SafetensorError, RuntimeError, OSError, KeyError, TypeError) as error:
        raise FileError(f"the adapter in {folder} is damaged: {error}") from error
    return adapter.eval()


def load_adapter(folder: Path, model: nn.Module, files: Callable[[], Path] | None = None) -> Adapter:
    """Adapter of a folder, for ``model``, whose weights are compared with those that the adapter was trained on.

    ``files`` returns the folder of its checkpoint, whose files are compared if weights are offloaded or of other types
    than float32 and bfloat16. Raises FileError for no adapter or a damaged one, ModelError for another model's.
    """
    comparable = {
        name: weight
        for name, weight in model.named_parameters()
        if weight.dtype in (torch.float32, torch.bfloat16) and not weight.is_meta
    }
    if files is not None and read_samples(folder).keys() - comparable.keys():
        check_base_files(folder, files())
    else:
        _check_base(folder, comparable.items())
    return read_adapter(folder)


def check_base_files(folder: Path, base: Path) -> None:
    """Raise ModelError if the safetensors files in ``base`` hold another model than the adapter was trained on."""
    _check_base(folder, _tensors(base))


def _check_base(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    here: dict[str, list[Tensor]] = {}
    for name, weight in weights:
        here.setdefault(_place(name), []).append(sample(weight).float())
    distances = []
    for name, kept in (samples := read_samples(folder)).items():
        others = [other for other in here.get(_place(name), ()) if len(other) == len(kept)]
        if _place(name) in here:
            moved = min((float((other - kept).norm()) for other in others), default=inf)
            distances.append(moved / max(float(kept.norm()), 1e-30))
    base, most = read_about(folder)["base_model"], max(distances, default=0)
    differ = f"{sum(map(bool, distances))} of {len(distances)} weights differ, by up to {most:.1%}"
    if samples and not distances:
        raise ModelError(
            f"the adapter in {folder} cannot be compared with this model: load it in float32 or bfloat16, from "
            "safetensors files"
        )
    if most > MAX_DISTANCE:
        advice = "`skipdecode distill --adapter` trains it for this one"
        raise ModelError(f"the adapter in {folder} was trained on another model ({base}): {differ}. {advice}")
    if most or not samples:
        reason = differ if samples else "it holds no samples of that model's weights to compare"
        advice = "`skipdecode evaluate` measures what it generates here"
        warnings.warn(f"the adapter in {folder} was trained on {base}: {reason}. {advice}", UntrainedWarning, 2)


def read_samples(folder: Path) -> dict[str, Tensor]:
    """Samples of the base model's weights by name, in float32. Raises FileError if the adapter is damaged."""
    try:
        tensors = load_file(folder / WEIGHTS).items()
    except (SafetensorError, OSError) as error:
        raise FileError(f"the adapter in {folder} is damaged: {error}") from error
    return {name.removeprefix(SAMPLE): each.float() for name, each in tensors if name.startswith(SAMPLE)}


def _place(name: str) -> str:
    """Name of a weight from its layer's number on: what stands before differs between files and models."""
    return re.sub(r"^.*?\b(?=\d+\.)", "", name)


def _tensors(base: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of those files in a folder that transformers reads."""
    index = base / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file() and not (base / names[0]).is_file():
        names = sorted(set(read_json(index)["weight_map"].values()))
    for name in names:
        try:
            with safe_open(base / name, framework="pt") as weights:
                yield from ((key, weights.get_tensor(key)) for key in weights.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{base / name} cannot be read: {error}") from error


def sample(weight: Tensor) -> Tensor:
    """Evenly spaced values of a weight (at most 256), in bfloat16, so that float32 and bfloat16 weights agree."""
    flat = weight.detach().flatten()
    return flat[:: max(len(flat) // SAMPLED, 1)][:SAMPLED].to("cpu", torch.bfloat16, copy=True)
