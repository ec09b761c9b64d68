"""What every test runs under: no network, one thread, a fixed seed."""

from __future__ import annotations

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers


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
