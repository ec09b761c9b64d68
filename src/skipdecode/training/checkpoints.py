"""A training run's folder: checkpoints and the trained model, each either complete or absent."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..errors import FileError, UsageError
from ..files import locked, read_json, sync_folder, write
from ..model.config import ADAPTER_FILE
from ..provenance import MATTERS

AUTHOR = "skipdecode train"
#: File that marks the folder of a training run, and holds the run's options.
RECORD = "training.json"
#: A checkpoint's last file: the run's identity (``_record`` in run.py), and size and checksum of the other files.
SEAL = "whole.json"
#: Subfolder in which a checkpoint or the trained model is written before it is moved to its place.
STAGING = ".checkpoint"
#: Number of checkpoints to keep: if the newest is damaged, the one before it is used.
KEEP = 2

#: Files without which a model or an adapter does not load.
LAST = ("config.json", ADAPTER_FILE)

NAME = re.compile(r"checkpoint-(\d{1,12})")
#: Weight files of a previous model, which must not remain next to those of a new one.
FORMER = ("adapter.safetensors", "model*.safetensors*", "pytorch_model*.bin*")
#: Those of PEFT, in ``adapter``, where the user may have an adapter of ours.
PEFT = ("adapter_config.json", "adapter_model.*")


class RunFolder:
    """The output folder of one training run, which resumes from and deletes only checkpoints with a ``SEAL``."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def claim(self, *starts: str | None) -> None:
        """Raise FileError if the folder is one of those that training starts from, or holds files of other origin."""
        if any(each and Path(each).is_dir() and Path(each).resolve() == self.folder.resolve() for each in starts):
            raise FileError(f"{self.folder} holds what is to be trained: give another --output")
        path, theirs = self.folder / RECORD, []
        if path.exists():
            try:
                values = read_json(path)
            except FileError as error:
                raise FileError(f"{error}: give another --output, or remove {self.folder} to start anew") from None
            if not isinstance(values, dict) or values.get("author") != AUTHOR:
                raise FileError(f"{path} was not written by {AUTHOR}: give another --output")
        else:
            theirs = [p for p in self.folder.glob("*") if p.is_file() and any(fnmatch(p.name, m) for m in MATTERS)]
            theirs += [path for name in PEFT for path in self.folder.glob(f"adapter/{name}")]
        theirs += [p for p in self.folder.glob("checkpoint-*") if NAME.fullmatch(p.name) and not (p / SEAL).exists()]
        if theirs:
            raise FileError(f"{min(theirs)} was written by no training run: move it away, or give another --output")

    # --- checkpoints

    def checkpoints(self) -> list[Path]:
        """Return the finished checkpoints, which have a ``SEAL``, oldest first."""
        found = [path for path in self.folder.glob("checkpoint-*") if NAME.fullmatch(path.name)]
        return sorted((path for path in found if (path / SEAL).exists()), key=_step)

    def newest(self, run: Mapping[str, Any], say: Callable[[str], object]) -> Path | None:
        """Return the newest undamaged checkpoint, None if there is none; ``say`` reports each damaged one.

        Raises UsageError if that checkpoint's run has another identity than ``run``, and names what differs.
        """
        for path in reversed(self.checkpoints()):
            sealed, damage = _damage(path)
            differs = [name.replace("_", " ") for name in run if sealed.get(name) != json.loads(_json(run[name]))]
            if damage is None and differs:
                raise UsageError(
                    f"{self.folder} holds checkpoints of a run with another {', '.join(differs)}: "
                    "give another --output, or --no-resume to drop them"
                )
            if damage is None:
                return path
            say(f"{path} is not whole ({damage}) and is passed over")
        return None

    def start(self, plan: Mapping[str, Any], resume: Path | None = None) -> None:
        """Save the options ``plan``, and delete the checkpoints newer than ``resume`` (None: all)."""
        kept = [] if resume is None else [p for p in self.checkpoints() if _step(p) <= _step(resume)][-KEEP:]
        for path in self.checkpoints():
            if path not in kept:
                self._drop(path)
        write(self.folder / RECORD, _json({"author": AUTHOR, "plan": dict(plan)}))

    def new_staging(self) -> None:
        """Delete the run's temporary folder ``STAGING`` if there is one, and make it anew."""
        shutil.rmtree(self.folder / STAGING, ignore_errors=True)
        (self.folder / STAGING).mkdir()

    def keep(self, name: str, run: Mapping[str, Any]) -> None:
        """Seal checkpoint ``name`` in ``STAGING`` with the identity ``run``, move it here, keep the newest ``KEEP``."""
        path = self.folder / STAGING / name
        write(path / SEAL, _json({"files": _contents(path), "run": dict(run)}))
        os.replace(path, self.folder / name)
        sync_folder(self.folder)
        for old in self.checkpoints()[:-KEEP]:
            self._drop(old)
        shutil.rmtree(self.folder / STAGING, ignore_errors=True)

    def _drop(self, path: Path) -> None:
        """Move a checkpoint away, then delete it: a kill in between leaves no half-deleted checkpoint."""
        self.new_staging()
        os.replace(path, self.folder / STAGING / path.name)
        shutil.rmtree(self.folder / STAGING, ignore_errors=True)

    # --- the trained model

    def publish(self) -> None:
        """Replace the model in this folder by the one in ``STAGING``, so that no mixture of the two ever loads.

        After a kill in between there is none of ``LAST``, so nothing loads; the same command goes on from the run's
        last checkpoint.
        """
        new = self.folder / STAGING
        names = sorted(_contents(new), key=lambda name: name in LAST)
        for name in LAST:
            (self.folder / name).unlink(missing_ok=True)
        sync_folder(self.folder)
        former = [*FORMER, *(f"adapter/{name}" for name in PEFT)]
        for old in [path for pattern in former for path in self.folder.glob(pattern)]:
            old.unlink()
        for name in names:
            target = self.folder / name
            target.parent.mkdir(exist_ok=True)
            sync_folder(target.parent)
            os.replace(new / name, target)
        sync_folder(self.folder)
        shutil.rmtree(new, ignore_errors=True)


@contextmanager
def run_folder(folder: str | Path, *starts: str | None) -> Iterator[RunFolder]:
    """Create ``folder``, lock it for a training run (in the first of its processes), and yield it.

    Args:
        starts: the model to train, and what else training starts from: none may be in ``folder``.

    Raises:
        UsageError: another process trains there.
        FileError: :meth:`RunFolder.claim` refuses the folder.
        OSError: it cannot be created.
    """
    run = RunFolder(folder)
    if run.folder.is_file():
        raise FileError(f"{folder} is a file: give a folder for --output")
    run.folder.mkdir(parents=True, exist_ok=True)
    try:
        first = os.environ.get("RANK", "0") == "0"
        with locked(run.folder / RECORD, str(folder)) if first else nullcontext():
            run.claim(*starts)
            yield run
    finally:
        with suppress(OSError):  # succeeds only if the folder is empty
            run.folder.rmdir()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn the errors that torch and safetensors raise on a full disk, which have no errno, into FileError.

    Only calls that save belong inside: any RuntimeError becomes a FileError.
    """
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        raise FileError(f"{folder} could not be written, the disk may be full: {str(error).splitlines()[0]}") from error


def _json(values: Any) -> str:
    return json.dumps(values, indent=1) + "\n"


def _step(path: Path) -> int:
    return int(path.name.split("-")[1])


def _contents(folder: Path) -> dict[str, list[int]]:
    """Flush all files of ``folder`` to the disk, and return their [size, CRC-32] by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    found = {path.relative_to(folder).as_posix(): _checksum(path) for path in files}
    sync_folder(folder)
    return found


def _checksum(path: Path) -> list[int]:
    """Flush a file to disk, and return its size and CRC-32."""
    size = total = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            size, total = size + len(chunk), zlib.crc32(chunk, total)
        with suppress(OSError):  # Windows flushes no file that is open for reading
            os.fsync(file.fileno())
    return [size, total]


def _damage(folder: Path) -> tuple[dict[str, Any], str | None]:
    """Return (the run's identity in a checkpoint's ``SEAL``, how the checkpoint is damaged or None)."""
    try:
        values = read_json(folder / SEAL)
        run, files = dict(values["run"]), dict(values["files"])
    except (FileError, KeyError, TypeError, ValueError):
        return {}, f"{SEAL} is damaged"
    found = _contents(folder)
    broken = [name for name, expected in files.items() if found.get(name) != expected]
    return run, f"{broken[0]} is missing or damaged" if broken else None
