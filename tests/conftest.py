"""What every test runs under: no network, one thread, a fixed seed."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers

from helpers.tiny import save_checkpoint, write_examples


def pytest_configure(config: pytest.Config) -> None:
    """One thread: the models are tiny, and a second thread only spins while it waits for the next tiny kernel."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


def pytest_collection_finish() -> None:
    """What is imported by now is no garbage; accelerate looks through it all at every start of training."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _shared_checkpoint(folder: Path, **sizes: int) -> Iterator[Path]:
    """A checkpoint that many tests read; none may write to it."""
    before = _contents(save_checkpoint(folder, **sizes))
    yield folder
    assert _contents(folder) == before, f"a test changed {folder}, which others read: copy it first"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Eight layers, 96 positions, random weights. Read it, or copy it to change it."""
    yield from _shared_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def long_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same with 256 positions."""
    yield from _shared_checkpoint(tmp_path_factory.mktemp("long_checkpoint"), positions=256)


@pytest.fixture(scope="session")
def shallow_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same with four layers."""
    yield from _shared_checkpoint(tmp_path_factory.mktemp("shallow_checkpoint"), layers=4)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of train, validation and test splits, all of EXAMPLES. Read it, or copy it to change it."""
    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "validation", "test"):
        write_examples(folder / f"{split}.jsonl")
    return folder
