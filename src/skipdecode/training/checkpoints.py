"""A training run's folder: checkpoints to resume from and the trained model, each of them whole or not there."""

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
#: Says that the folder is a training run's, and holds the run's options.
RECORD = "training.json"
#: In a checkpoint: what makes its run what it is, and size and checksum of its files. Written last.
SEAL = "whole.json"
#: The trained model is put together here before any of it takes its place.
STAGE = ".saving"
#: Here a checkpoint is written before it gets its name, and removed after it has lost it.
SCRAP = ".checkpoint"
#: Checkpoints that stay: should the newest be damaged, there is the one before.
KEEP = 2

NAME = re.compile(r"checkpoint-(\d{1,12})")
#: What a former model may have left beside the weights of a new one.
FORMER = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    "adapter/*",
)


class RunFolder:
    """The folder that one training run writes. Only checkpoints with a seal are resumed from, or removed."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        #: Whether a save that a kill had cut short was finished when the folder was opened.
        self.finished = False

    # --- whose it is

    def claim(self, model: str | None = None) -> None:
        """Refuse a folder that holds another's model or checkpoints: saving would write over them.

        Args:
            model: the model to be trained; its own folder may be written to.

        Raises:
            FileError: there is a model, a checkpoint or a ``training.json`` that a training run did not write.
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
        """Whether ``model`` is this folder, however it is written."""
        return bool(model) and Path(model).is_dir() and Path(model).resolve() == self.folder.resolve()

    # --- checkpoints

    def checkpoints(self) -> list[Path]:
        """The sealed ones, oldest first."""
        found = [path for path in self.folder.glob("checkpoint-*") if NAME.fullmatch(path.name)]
        return sorted((path for path in found if (path / SEAL).exists()), key=_step)

    def newest(self, run: Mapping[str, Any], say: Callable[[str], object] = warnings.warn) -> Path | None:
        """The newest whole checkpoint of this very run, or None; ``say`` gets a line for each that is passed over.

        Raises:
            JobError: a checkpoint is of a run of which ``run`` does not hold; the message names what differs.
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
        """Write down the run's options. Checkpoints newer than ``resume`` go; all of them without it."""
        shutil.rmtree(self.folder / SCRAP, ignore_errors=True)
        kept = [] if resume is None else [p for p in self.checkpoints() if _step(p) <= _step(resume)][-KEEP:]
        for path in self.checkpoints():
            if path not in kept:
                self._drop(path)
        write(self.folder / RECORD, _json({"author": AUTHOR, "plan": dict(plan)}))

    def new_scrap(self) -> Path:
        """An empty folder to write a checkpoint into."""
        shutil.rmtree(self.folder / SCRAP, ignore_errors=True)
        (self.folder / SCRAP).mkdir()
        return self.folder / SCRAP

    def keep(self, name: str, run: Mapping[str, Any]) -> None:
        """Seal the checkpoint ``name`` in the scrap folder, give it its place, and drop the oldest."""
        path = self.folder / SCRAP / name
        _seal(path, run)
        os.replace(path, self.folder / name)
        sync_folder(self.folder)
        for old in self.checkpoints()[:-KEEP]:
            self._drop(old)
        shutil.rmtree(self.folder / SCRAP, ignore_errors=True)

    def _drop(self, path: Path) -> None:
        """Remove a checkpoint: its name first, so that a kill in between leaves nothing that looks like one."""
        os.replace(path, self.new_scrap() / path.name)
        shutil.rmtree(self.folder / SCRAP, ignore_errors=True)

    # --- the trained model

    def publish(self, save: Callable[[Path], object]) -> None:
        """Put what ``save`` writes into a folder in place of the model here, so that no mixture of the two ever loads.

        Killed before all is written, the old model is still there. Killed later, there is no ``config.json``, so that
        nothing loads, and :meth:`finish` does the rest.
        """
        stage = self.folder / STAGE
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir()
        with writing(stage):
            save(stage)
        _seal(stage, {})
        self.finish()

    def finish(self) -> bool:
        """Do what a killed :meth:`publish` left undone. Returns whether there was something to do."""
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
            for path in sorted(files, key=lambda path: path == stage / config.name):  # the config comes last
                target = self.folder / path.relative_to(stage)
                target.parent.mkdir(parents=True, exist_ok=True)
                sync_folder(target.parent)
                os.replace(path, target)
            sync_folder(self.folder)
        shutil.rmtree(stage, ignore_errors=True)
        return True


@contextmanager
def run_folder(folder: str | Path, model: str | None = None) -> Iterator[RunFolder]:
    """Make ``folder`` and hold it against other processes for a training run. A save cut short by a kill is finished.

    Of several processes that train together, the first holds it.

    Raises:
        JobError: another process trains there.
        FileError: the folder is another model's (see :meth:`RunFolder.claim`).
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
        with suppress(OSError):  # nothing came of it: an empty folder goes
            run.folder.rmdir()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Around calls of transformers that write: what torch and safetensors raise on a full disk becomes a FileError.

    Each has several kinds of it, none with an errno. Nothing of ours runs inside.
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
    """Bring all files of ``folder`` to the disk and note that it is whole."""
    files = {path.relative_to(folder).as_posix(): _checksum(path) for path in _files(folder)}
    sync_folder(folder)
    write(folder / SEAL, _json({"run": dict(run), "files": files}))


def _checksum(path: Path) -> list[int]:
    """Size and CRC-32 of a file, which is on the disk when this returns."""
    size = total = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            size, total = size + len(chunk), zlib.crc32(chunk, total)
        with suppress(OSError):  # Windows flushes no file that is open for reading
            os.fsync(file.fileno())
    return [size, total]


def _damage(folder: Path) -> tuple[dict[str, Any], str | None]:
    """What makes the run of a sealed checkpoint what it is, and what is wrong with the checkpoint, or None."""
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
