"""Save an adapter as a folder, and load it for the model that it was trained on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from ..errors import FileError, ModelError
from ..files import has_key, read_json, write
from .adapter import Adapter
from .checkpoint_config import ADAPTER_FILE
from .schedule import Schedule

#: The folder's files.
ABOUT, WEIGHTS = ADAPTER_FILE, "adapter.safetensors"
#: Values of each weight of the base model that its hash is made from.
SAMPLED = 256


def save_adapter(folder: Path, adapter: Adapter, model: nn.Module, base: str) -> None:
    """Write an adapter, its schedules, and hashes of the base model's weights.

    Args:
        folder: created if it is missing.
        model: the base model.
        base: its name or path, for the reader.

    Raises:
        FileError: the folder holds files of the same name that no adapter wrote.
    """
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "skipdecode_adapter": 1,
        "base_model": base,
        "rank": adapter.rank,
        "schedules": {f"{speedup:g}": schedule.to_dict() for speedup, schedule in adapter.schedules.items()},
        "base_hashes": hashes(model),
    }
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.state_dict().items()}
    write(folder / WEIGHTS, save(weights))
    write(folder / ABOUT, json.dumps(about, indent=1) + "\n", may_replace=has_key("skipdecode_adapter"))


def is_adapter(folder: Path) -> bool:
    """Tell whether a folder holds an adapter."""
    return (folder / ABOUT).is_file()


def read_schedules(folder: Path) -> dict[float, Schedule]:
    """Return an adapter's schedules by target speed-up. Raises FileError if there is none, or a damaged one."""
    try:
        return {float(k): Schedule.from_dict(schedule) for k, schedule in read_about(folder)["schedules"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"the adapter in {folder} is damaged: {error}") from error


def read_about(folder: Path) -> dict[str, Any]:
    """Return what the folder says of its adapter. Raises FileError if the folder holds none, or a damaged one."""
    if not (folder / ABOUT).exists():
        raise FileError(f"{folder} holds no adapter: there is no {ABOUT}")
    about = read_json(folder / ABOUT)
    if not isinstance(about, dict) or about.get("skipdecode_adapter") != 1:
        raise FileError(f"{folder / ABOUT} was written by another version of skipdecode")
    return about


def load_adapter(folder: Path, model: nn.Module) -> Adapter:
    """Load the adapter of a folder for ``model``.

    Raises:
        FileError: the folder holds no adapter, or a damaged one.
        ModelError: the adapter was trained on another model.
    """
    about = read_about(folder)
    check_base(about, model, folder)
    schedules = read_schedules(folder)
    try:
        weights = load((folder / WEIGHTS).read_bytes())
        adapter = Adapter(weights_size(weights), about["rank"], schedules)
        adapter.load_state_dict(weights)
    except (SafetensorError, RuntimeError, KeyError, TypeError, ValueError, OSError) as error:
        raise FileError(f"the adapter in {folder} is damaged: {' '.join(str(error).split())[:300]}") from error
    return adapter.eval()


def weights_size(weights: dict[str, Tensor]) -> int:
    """Return the width of the hidden states that an adapter's weights are for."""
    return next(tensor.shape[0] for name, tensor in weights.items() if name.endswith("down"))


def check_base(about: dict[str, Any], model: nn.Module, folder: Path) -> None:
    """Raise ModelError if ``model`` is not the one that the adapter was trained on."""
    known, here = about["base_hashes"], hashes(model)
    other = [name for name in here if name in known and here[name] != known[name]]
    # Weights in 8 bits or laid out for a CPU's kernels are no parameters any more: the others tell enough.
    if other or not here.keys() <= known.keys() or not here:
        which = other[0] if other else "its layers"
        raise ModelError(
            f"the adapter in {folder} was trained on another model ({about['base_model']}): {which} differs"
        )


def hashes(model: nn.Module) -> dict[str, str]:
    """Return a hash of evenly spaced values of each weight, rounded to bfloat16, so that the dtype does not matter."""
    found = {}
    for name, weight in model.named_parameters():
        flat = weight.detach().flatten()
        some = flat[:: max(len(flat) // SAMPLED, 1)][:SAMPLED].to(torch.bfloat16).float().cpu()
        found[name] = hashlib.sha256(some.numpy().tobytes() + str(tuple(weight.shape)).encode()).hexdigest()[:8]
    return found
