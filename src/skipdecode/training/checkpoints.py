"""A training run's folder: checkpoints to resume from and the saved model, each whole or passed over."""

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

#: Beside the checkpoints: what makes the run what it is, and each checkpoint's files by size and checksum.
RECORD = "training.json"
#: The saved model is put together here before any of it takes its place.
STAGE = ".saving"
#: Whole checkpoints that stay: should the newest be damaged, there is the one before.
KEEP = 2

NAME = re.compile(r"checkpoint-(\d{1,12})")
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
AUTHOR = "skipdecode train"


class RunFolder:
    """``training.json`` and what it speaks of.

    Only checkpoints that it names are ever resumed from or removed; it names one before its first byte is written, and
    holds the checksums of its files once all of them are on the disk.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        #: Whether a save that a kill had cut short was finished when the folder was opened.
        self.finished = False

    # --- whose it is

    def claim(self, model: str | None = None) -> None:
        """Refuse a folder that holds another's model: saving would write over it.

        Args:
            model: the model to be trained; its own folder may be written to.

        Raises:
            FileError: there is a model, or a ``training.json``, that a training run did not write.
        """
        if (self.folder / RECORD).exists():
            self._read()
        elif model is None or not self.is_folder_of(model):
            theirs = [p.name for p in self.folder.glob("*") if p.is_file() and any(fnmatch(p.name, m) for m in MATTERS)]
            if theirs:
                raise FileError(
                    f"{self.folder} holds {sorted(theirs)[0]}, which no training run wrote: give another --output"
                )

    def is_folder_of(self, model: str) -> bool:
        """Whether ``model`` is this folder, however it is written."""
        return bool(model) and Path(model).is_dir() and Path(model).resolve() == self.folder.resolve()

    def foreign(self, steps: int) -> Path | None:
        """A checkpoint up to step ``steps`` that is in the way and not this run's, or None."""
        named = self._read()["checkpoints"]
        for path in sorted(self.folder.glob("checkpoint-*")):
            match = NAME.fullmatch(path.name)
            if match and path.name not in named and int(match[1]) <= steps and (path.is_file() or any(path.iterdir())):
                return path
        return None

    # --- checkpoints

    def start(self, run: Mapping[str, Any], plan: Mapping[str, Any], resume: Path | None = None) -> None:
        """Write down what makes this run what it is, and the options it was started with.

        Checkpoints newer than ``resume`` go, and those that would have gone before; all of them without it.
        """
        names = list(self._read()["checkpoints"])
        if resume is not None:
            kept = [name for name in sorted(names, key=_step) if _step(name) <= _step(resume.name)][-KEEP:]
            names = [name for name in names if name not in kept]
        self._drop(names)
        self._write(self._read() | {"run": dict(run), "plan": dict(plan)})

    def begin(self, name: str) -> None:
        """From here on ``name`` is a checkpoint of this run, not whole yet. What a killed run left in it is removed."""
        values = self._read()
        if name in values["checkpoints"]:
            self._drop([name])
            values = self._read()
        self._write(values | {"checkpoints": values["checkpoints"] | {name: None}})

    def seal(self, name: str) -> None:
        """All files of ``name`` are written: bring them to the disk, note their checksums, drop the oldest."""
        values = self._read()
        values["checkpoints"][name] = _checksums(self.folder / name)
        self._write(values)
        self._drop(list(values["checkpoints"])[:-KEEP])

    def newest(self, run: Mapping[str, Any], say: Callable[[str], object] = warnings.warn) -> Path | None:
        """The newest whole checkpoint of this very run, or None; ``say`` gets a line for each that is passed over.

        Raises:
            JobError: the checkpoints are of a run of which ``run`` does not hold; the message names what differs.
            FileError: ``training.json`` is damaged.
        """
        values = self._read()
        there = [name for name in values["checkpoints"] if (self.folder / name).is_dir()]
        differs = [name.replace("_", " ") for name in run if values["run"].get(name) != json.loads(_json(run[name]))]
        if there and differs:
            raise JobError(
                f"{self.folder} holds checkpoints of a run with another {', '.join(differs)}: "
                "give another --output, or --no-resume to drop them"
            )
        for name in sorted(there, key=_step, reverse=True):
            damage = _damage(self.folder / name, values["checkpoints"][name])
            if damage is None:
                return self.folder / name
            say(f"{self.folder / name} is not whole ({damage}) and is passed over")
        return None

    # --- the saved model

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
        self._write(self._read() | {"saving": list(_checksums(stage))})
        self.finish()

    def finish(self) -> bool:
        """Do what a killed :meth:`publish` left undone. Returns whether there was something to do."""
        values, stage, config = self._read(), self.folder / STAGE, "config.json"
        if (stage / config).exists() and values["saving"]:
            (self.folder / config).unlink(missing_ok=True)
            sync_folder(self.folder)
            for old in [path for form in WEIGHTS for path in self.folder.glob(form)]:
                if old.name not in values["saving"]:
                    old.unlink()
            for path in sorted(_files(stage), key=lambda path: path == stage / config):  # the config comes last
                target = self.folder / path.relative_to(stage)
                target.parent.mkdir(parents=True, exist_ok=True)
                sync_folder(target.parent)
                os.replace(path, target)
            sync_folder(self.folder)
        if values["saving"]:
            self._write(values | {"saving": []})
        if (self.folder / RECORD).exists():
            shutil.rmtree(stage, ignore_errors=True)
        return bool(values["saving"])

    # --- training.json

    def _read(self) -> dict[str, Any]:
        path = self.folder / RECORD
        if not path.exists():
            return {"author": AUTHOR, "run": {}, "plan": {}, "checkpoints": {}, "saving": []}
        remedy = f"delete it and {self.folder}/checkpoint-* to start anew, or give another --output"
        try:
            values = read_json(path)
        except FileError as error:
            raise FileError(f"{error}: {remedy}") from None
        if not isinstance(values, dict) or values.get("author") != AUTHOR:
            raise FileError(f"{path} was not written by {AUTHOR}: give another --output")
        checkpoints, saving = values.get("checkpoints"), values.get("saving")
        if not (
            isinstance(values.get("run"), dict)
            and isinstance(checkpoints, dict)
            and all(NAME.fullmatch(name) and isinstance(v, dict | None) for name, v in checkpoints.items())
            and isinstance(saving, list)
            and all(isinstance(name, str) for name in saving)
        ):
            raise FileError(f"{path} is damaged: {remedy}")
        return values

    def _write(self, values: Mapping[str, Any]) -> None:
        write(self.folder / RECORD, _json(values))

    def _drop(self, names: list[str]) -> None:
        """Remove checkpoints, and only then their names: a kill in between leaves nothing that nobody knows of."""
        for name in names:
            if (self.folder / name).is_symlink():
                (self.folder / name).unlink()
            else:
                shutil.rmtree(self.folder / name, ignore_errors=True)
        if names:
            values = self._read()
            left = {name: files for name, files in values["checkpoints"].items() if name not in names}
            self._write(values | {"checkpoints": left})


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


def _step(name: str) -> int:
    return int(name.split("-")[1])


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _checksums(folder: Path) -> dict[str, list[int]]:
    """Name -> size and CRC-32 of every file in ``folder``, all of which are on the disk when this returns."""
    found = {path.relative_to(folder).as_posix(): _checksum(path) for path in _files(folder)}
    sync_folder(folder)
    return found


def _checksum(path: Path) -> list[int]:
    size = total = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            size, total = size + len(chunk), zlib.crc32(chunk, total)
        with suppress(OSError):  # Windows flushes no file that is open for reading
            os.fsync(file.fileno())
    return [size, total]


def _damage(folder: Path, files: Mapping[str, Any] | None) -> str | None:
    """What is wrong with a checkpoint, or None."""
    if not files:
        return "a kill cut its writing short"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _checksum(path) != expected:
            return f"{name} is damaged"
    return None
