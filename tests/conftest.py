"""What every test runs under: no network, one thread, a fixed seed."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers


def pytest_configure(config: pytest.Config) -> None:
    """One thread: the models are tiny, and a second thread only spins while it waits for the next tiny kernel."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
