"""A training run's folder: checkpoints and the trained model, each either complete or absent."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..errors import FileError, JobError
from ..files import locked, read_json, sync_folder, write
from ..provenance import MATTERS

AUTHOR = "skipdecode train"
#: File that marks the folder of a training run, and holds the run's options.
RECORD = "training.json"
#: A checkpoint's last file: the run's identity (``_record`` in run.py), and size and checksum of the other files.
SEAL = "whole.json"
#: Subfolder in which the trained model is completed before its files are moved to their place.
STAGE = ".saving"
#: Subfolder in which a checkpoint is written before it is moved to its place, or moved to be deleted.
SCRAP = ".checkpoint"
#: Number of checkpoints to keep: if the newest is damaged, the one before it is used.
KEEP = 2

NAME = re.compile(r"checkpoint-(\d{1,12})")
#: Weight files of a previous model, which must not remain next to those of a new one.
FORMER = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    "adapter/*",
)


class RunFolder:
    """The output folder of one training run, which resumes from and deletes only checkpoints with a ``SEAL``."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        #: Whether opening the folder completed the save of a killed run.
        self.finished = False

    def claim(self, model: str | None = None) -> None:
        """Raise FileError if the folder holds a model, checkpoint or ``training.json`` that no training run wrote.

        Args:
            model: the model to be trained, whose own folder may be overwritten.
        """
        path, theirs = self.folder / RECORD, []
        if path.exists():
            try:
                values = read_json(path)
            except FileError as error:
                raise FileError(f"{error}: give another --output, or remove {self.folder} to start anew") from None
            if not isinstance(values, dict) or values.get("author") != AUTHOR:
                raise FileError(f"{path} was not written by {AUTHOR}: give another --output")
        elif model is None or not self.is_folder_of(model):
            theirs = [p for p in self.folder.glob("*") if p.is_file() and any(fnmatch(p.name, m) for m in MATTERS)]
        theirs += [p for p in self.folder.glob("checkpoint-*") if NAME.fullmatch(p.name) and not (p / SEAL).exists()]
        for path in sorted(theirs):
            if path.is_file() or any(path.iterdir()):
                raise FileError(f"{path} was written by no training run: move it away, or give another --output")

    def is_folder_of(self, model: str) -> bool:
        """Return whether the path ``model`` leads to this folder."""
        return bool(model) and Path(model).is_dir() and Path(model).resolve() == self.folder.resolve()

    # --- checkpoints

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints that have a ``SEAL``, oldest first."""
        found = [path for path in self.folder.glob("checkpoint-*") if NAME.fullmatch(path.name)]
        return sorted((path for path in found if (path / SEAL).exists()), key=_step)

    def newest(self, run: Mapping[str, Any], say: Callable[[str], object] = warnings.warn) -> Path | None:
        """Return the newest undamaged checkpoint, or None; ``say`` reports each damaged one.

        Raises JobError if that checkpoint belongs to a run other than ``run``, and names what differs.
        """
        for path in reversed(self.checkpoints()):
            sealed, damage = _damage(path)
            differs = [name.replace("_", " ") for name in run if sealed.get(name) != json.loads(_json(run[name]))]
            if damage is None and differs:
                raise JobError(
                    f"{self.folder} holds checkpoints of a run with another {', '.join(differs)}: "
                    "give another --output, or --no-resume to drop them"
                )
            if damage is None:
                return path
            say(f"{path} is not whole ({damage}) and is passed over")
        return None

    def start(self, plan: Mapping[str, Any], resume: Path | None = None) -> None:
        """Save the run's options, and delete the checkpoints newer than ``resume`` (without it, all)."""
        shutil.rmtree(self.folder / SCRAP, ignore_errors=True)
        kept = [] if resume is None else [p for p in self.checkpoints() if _step(p) <= _step(resume)][-KEEP:]
        for path in self.checkpoints():
            if path not in kept:
                self._drop(path)
        write(self.folder / RECORD, _json({"author": AUTHOR, "plan": dict(plan)}))

    def new_scrap(self) -> Path:
        """Make an empty folder to write a checkpoint into."""
        shutil.rmtree(self.folder / SCRAP, ignore_errors=True)
        (self.folder / SCRAP).mkdir()
        return self.folder / SCRAP

    def keep(self, name: str, run: Mapping[str, Any]) -> None:
        """Seal the checkpoint ``name`` in ``SCRAP``, move it to its place, and delete all but the newest ``KEEP``."""
        path = self.folder / SCRAP / name
        _seal(path, run)
        os.replace(path, self.folder / name)
        sync_folder(self.folder)
        for old in self.checkpoints()[:-KEEP]:
            self._drop(old)
        shutil.rmtree(self.folder / SCRAP, ignore_errors=True)

    def _drop(self, path: Path) -> None:
        """Move a checkpoint away, then delete it: a kill in between leaves no half-deleted checkpoint."""
        os.replace(path, self.new_scrap() / path.name)
        shutil.rmtree(self.folder / SCRAP, ignore_errors=True)

    # --- the trained model

    def publish(self, save: Callable[[Path], object]) -> None:
        """Replace the model in this folder by the one that ``save`` writes, so that no mixture of the two ever loads.

        A kill while ``save`` writes leaves the old model. A later kill leaves no ``config.json``, so that nothing
        loads until :meth:`finish` completes the replacement.
        """
        stage = self.folder / STAGE
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir()
        with writing(stage):
            save(stage)
        _seal(stage, {})
        self.finish()

    def finish(self) -> bool:
        """Complete a :meth:`publish` that was killed; return whether there was one."""
        stage, config = self.folder / STAGE, self.folder / "config.json"
        if not (stage / SEAL).exists():
            return False
        names = read_json(stage / SEAL)["files"]
        if (stage / config.name).exists():
            config.unlink(missing_ok=True)
            sync_folder(self.folder)
            for old in [path for form in FORMER for path in self.folder.glob(form)]:
                if old.relative_to(self.folder).as_posix() not in names:
                    old.unlink()
            files = [path for path in _files(stage) if path.name != SEAL]
            for path in sorted(files, key=lambda path: path == stage / config.name):  # config last: loading needs it
                target = self.folder / path.relative_to(stage)
                target.parent.mkdir(parents=True, exist_ok=True)
                sync_folder(target.parent)
                os.replace(path, target)
            sync_folder(self.folder)
        shutil.rmtree(stage, ignore_errors=True)
        return True


@contextmanager
def run_folder(folder: str | Path, model: str | None = None) -> Iterator[RunFolder]:
    """Create ``folder``, lock it for a training run (by the first of its processes), and complete a killed save.

    Raises:
        JobError: another process trains there.
        FileError: ``folder`` is a file, or :meth:`RunFolder.claim` refuses it.
    """
    run = RunFolder(folder)
    if run.folder.exists() and not run.folder.is_dir():
        raise FileError(f"{folder} is a file: give a folder for --output")
    run.folder.mkdir(parents=True, exist_ok=True)
    try:
        first = os.environ.get("RANK", "0") == "0"
        with locked(run.folder / RECORD, str(folder)) if first else nullcontext():
            run.claim(model)
            run.finished = first and run.finish()
            yield run
    finally:
        with suppress(OSError):  # succeeds only if the folder is empty
            run.folder.rmdir()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn the errors that torch and safetensors raise on a full disk, none with an errno, into FileError.

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


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _seal(folder: Path, run: Mapping[str, Any]) -> None:
    """Flush all files of ``folder`` to disk, then write its ``SEAL``."""
    files = {path.relative_to(folder).as_posix(): _checksum(path) for path in _files(folder)}
    sync_folder(folder)
    write(folder / SEAL, _json({"run": dict(run), "files": files}))


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
    """Return the run that a checkpoint's ``SEAL`` records, and how the checkpoint is damaged (None: it is not)."""
    try:
        values = read_json(folder / SEAL)
        run, files = dict(values["run"]), dict(values["files"])
    except (FileError, KeyError, TypeError, ValueError):
        return {}, f"{SEAL} is damaged"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return run, f"{name} is missing"
        if _checksum(path) != expected:
            return run, f"{name} is damaged"
    return run, None
