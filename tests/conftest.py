"""What every test runs under: no network, one thread, a fixed seed."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of child processes too: a second thread only spins

from helpers import interpreted

if interpreted.V2 and not interpreted.GPU:
    interpreted.allow()  # before anything imports vLLM

import pytest


def pytest_collection() -> None:
    """Before the tests are read. With pytest-xdist this is in its workers only: their parent needs none of it.

    One thread: the models are tiny, and a second thread only spins while it waits for the next tiny kernel. Hypothesis
    takes the same examples at every run, however long each takes.
    """
    import hypothesis
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    hypothesis.settings.register_profile(
        "fixed",
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
    )
    hypothesis.settings.load_profile("fixed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of tests that run for every family, those of one family of each form are not slow."""
    families: Any = sys.modules.get("helpers.families")  # imported by the tests that need it
    for item in items if families else []:
        name = getattr(getattr(item, "callspec", None), "params", {}).get("name")
        if name in families.FAMILIES and name not in families.FORMS:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def _freeze() -> None:
    """What is left by now is no garbage; accelerate looks through it all at every start of training."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _shared_checkpoint(folder: Path, **sizes: int) -> Iterator[Path]:
    """A checkpoint that many tests read; none may write to it."""
    from helpers.tiny import save_checkpoint

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
    from helpers.tiny import write_examples

    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "validation", "test"):
        write_examples(folder / f"{split}.jsonl")
    return folder
