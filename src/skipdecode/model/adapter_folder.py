"""Save an adapter as a folder, and load it for the model that it was trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor, nn

from ..errors import FileError, ModelError
from ..files import has_key, read_json, write
from ..schedule import Schedule
from .adapter import Adapter, check_trained
from .config import ADAPTER_FILE, schedule_for, speedup_key
from .inspect import with_lenders_first

#: The folder's files.
ABOUT, WEIGHTS = ADAPTER_FILE, "adapter.safetensors"
#: Grows when an adapter's modules change.
FORMAT = 2
#: Values of each weight of the base model that its hash is made from.
SAMPLED = 256


def save_adapter(folder: Path, adapter: Adapter, model: nn.Module, base: str, files: str | None = None) -> None:
    """Write an adapter, its schedules, and hashes of the base model's weights.

    Weights are written in float32; in bfloat16 if the base model is in bfloat16.

    Args:
        folder: created if it is missing.
        model: the base model.
        base: its name or path, for the reader.
        files: :func:`hash_of_files` of its checkpoint. vLLM, which cannot compare weights in memory, needs it.

    Raises:
        FileError: the folder holds files of the same name that no adapter wrote.
    """
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "skipdecode_adapter": FORMAT,
        "base_model": base,
        "rank": adapter.rank,
        "schedules": {speedup_key(speedup): schedule.to_dict() for speedup, schedule in adapter.schedules.items()},
        "base_hashes": hashes(model),
        "base_files": files,
    }
    ours = is_adapter(folder) and has_key("skipdecode_adapter")((folder / ABOUT).read_bytes())
    if not ours and (there := [name for name in (ABOUT, WEIGHTS) if (folder / name).exists()]):
        raise FileError(f"{folder / there[0]} is there, and no adapter's: give another folder")
    dtype = torch.bfloat16 if next(model.parameters()).dtype == torch.bfloat16 else torch.float32
    weights = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in adapter.state_dict().items()}
    write(folder / WEIGHTS, save(weights))
    write(folder / ABOUT, json.dumps(about, indent=1) + "\n")


def locate_adapter(name: str | Path) -> Path:
    """Return the folder of an adapter: the one of this name, else where the hub's library keeps the hub's.

    Raises FileError if a name that is no folder's is not the hub's either.
    """
    hub_name = name.as_posix() if isinstance(name, Path) else name  # Windows writes other slashes
    if Path(name).exists() or hub_name.startswith((".", "/", "~")) or hub_name.count("/") != 1:
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_name, allow_patterns=[ABOUT, WEIGHTS]))
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise FileError(f"there is no adapter at {name}, neither in a folder nor on the hub: {why}") from error


def is_adapter(folder: Path) -> bool:
    """Tell whether a folder holds an adapter."""
    return (folder / ABOUT).is_file()


def read_schedules(folder: Path) -> dict[float, Schedule]:
    """Return an adapter's schedules by target speed-up. Raises FileError if there is none, or a damaged one."""
    try:
        return {float(k): Schedule.from_dict(schedule) for k, schedule in read_about(folder)["schedules"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"the adapter in {folder} is damaged: {error}") from error


def trained_schedule(
    config: Any, speedup: float | None, folder: Path | None, new_tokens: int | None = None
) -> Schedule:
    """Return :func:`schedule_for` a speed-up. Raises ScheduleError if the adapter in ``folder`` does not know it."""
    schedule = schedule_for(config, speedup, new_tokens=new_tokens)
    if folder is not None:
        check_learnt(folder, schedule, config)
    return schedule


def check_learnt(folder: Path, schedule: Schedule, config: Any) -> None:
    """Raise ScheduleError if the adapter in ``folder`` did not learn a schedule's layers, with a model's config."""
    check_trained(read_schedules(folder), with_lenders_first(schedule, config))


def read_about(folder: Path) -> dict[str, Any]:
    """Return what the folder says of its adapter. Raises FileError if the folder holds none, or a damaged one."""
    if not (folder / ABOUT).exists():
        raise FileError(f"{folder} holds no adapter: there is no {ABOUT}")
    about = read_json(folder / ABOUT)
    if not isinstance(about, dict) or about.get("skipdecode_adapter") != FORMAT:
        raise FileError(f"{folder / ABOUT} was written by another version of skipdecode")
    if missing := [key for key in ("base_model", "rank", "schedules", "base_hashes") if not about.get(key)]:
        raise FileError(f"the adapter in {folder} is damaged: {ABOUT} has no {missing[0]}")
    return about


def load_adapter(folder: Path, model: nn.Module, files: Callable[[], Path] | None = None) -> Adapter:
    """Load the adapter of a folder for ``model``.

    Args:
        folder: of the adapter.
        model: whose weights are compared with those that the adapter was trained on.
        files: returns the folder of the model's checkpoint, for weights that cannot be compared in memory.

    Raises:
        FileError: the folder holds no adapter, or a damaged one.
        ModelError: the adapter was trained on another model, or that cannot be told.
    """
    about = read_about(folder)
    known, here = about["base_hashes"], dict(model.named_parameters())
    untold = known.keys() - here.keys()  # in 8 bits, or laid out for a CPU's kernels
    for name, weight in here.items():
        if weight.is_meta:  # offloaded
            untold |= {name}
        elif known.get(name) != hash_of(weight.detach()):
            if weight.dtype in (torch.float32, torch.bfloat16):
                raise ModelError(
                    f"the adapter in {folder} was trained on another model ({about['base_model']}): {name} differs"
                )
            untold |= {name}  # other types round otherwise
    if untold:
        if files is None:
            raise ModelError(
                f"whether the adapter in {folder} was trained on this model cannot be told: {min(untold)} is not there "
                "in bfloat16 or float32. Load the model in one of these; for one in a folder of safetensors files, "
                "skipdecode.load(MODEL, adapter=…) compares the files"
            )
        check_base_files(folder, files())
    return read_adapter(folder)


def read_adapter(folder: Path) -> Adapter:
    """Load the adapter of a folder without a look at the model. Raises FileError if it is missing or damaged."""
    about = read_about(folder)
    schedules = read_schedules(folder)
    try:
        weights = load((folder / WEIGHTS).read_bytes())
        width = next((tensor.shape[0] for name, tensor in weights.items() if name.endswith("down")), 0)
        adapter = Adapter(width, about["rank"], schedules)
        adapter.load_state_dict(weights)
    except (SafetensorError, RuntimeError, KeyError, TypeError, ValueError, OSError) as error:
        raise FileError(f"the adapter in {folder} is damaged: {' '.join(str(error).split())[:300]}") from error
    return adapter.eval()


def check_base_files(folder: Path, base: Path) -> None:
    """Raise ModelError if the checkpoint in ``base`` is not the one that the adapter was trained on, or cannot tell.

    For engines that hold weights in a form of their own.
    """
    about = read_about(folder)
    if about.get("base_files") is None:
        raise ModelError(
            f"the adapter in {folder} was not trained on a folder's safetensors files: it cannot be compared"
        )
    if about["base_files"] != hash_of_files(base):
        raise ModelError(
            f"the adapter in {folder} was trained on another model ({about['base_model']}): weights in {base} differ"
        )


def hash_of_files(base: Path, model: nn.Module | None = None) -> str | None:
    """Return a hash of the weights in a folder's safetensors files; None if it has none, or other ones than ``model``.

    Of each weight only the pages of the values that :func:`hash_of` takes are read.
    """
    found: dict[str, str] = {}
    for file in weights_files(base):
        try:
            with safe_open(file, framework="pt") as weights:
                found |= {name: hash_of(weights.get_tensor(name)) for name in weights.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
    loaded = {} if model is None else hashes(model)
    bare = f"{getattr(model, 'base_model_prefix', '')}."  # which some files leave out
    if not found or any(
        (found.get(name) or found.get(name.removeprefix(bare), value)) != value for name, value in loaded.items()
    ):
        return None
    return hashlib.sha256("\n".join(sorted(map(" ".join, found.items()))).encode()).hexdigest()[:16]


def weights_files(base: Path) -> list[Path]:
    """Return the safetensors files in a folder that transformers reads: there may be others, of other formats."""
    whole, index = base / "model.safetensors", base / "model.safetensors.index.json"
    if whole.is_file() or not index.is_file():
        return [whole] if whole.is_file() else []
    return [base / name for name in sorted({*read_json(index)["weight_map"].values()})]


def hashes(model: nn.Module) -> dict[str, str]:
    """Return :func:`hash_of` each weight."""
    return {name: hash_of(weight.detach()) for name, weight in model.named_parameters()}


def hash_of(weight: Tensor) -> str:
    """Return a hash of evenly spaced values of a weight, in bfloat16, so that float32 and bfloat16 weights agree."""
    flat = weight.flatten()
    some = flat[:: max(len(flat) // SAMPLED, 1)][:SAMPLED].to(torch.bfloat16).float().cpu()
    return hashlib.sha256(some.numpy().tobytes() + str(tuple(weight.shape)).encode()).hexdigest()[:8]
