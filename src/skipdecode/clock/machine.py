"""The machine that numbers are of: its name, and what it can do at most, measured."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor

from ..generation.batch import synchronize
from ..generation.loading import cpu_capabilities

#: Bytes that are read to measure bandwidth: more than any cache holds.
READ = 2**29
#: Side of the matrices that are multiplied to measure the peak.
SIDE = 2048


def machine(device: str | None = None) -> str:
    """The machine and versions, to stand beside every number; ``device`` as :func:`skipdecode.load` takes it."""
    if torch.cuda.is_available() and (device is None or device.startswith("cuda")):
        device = torch.cuda.get_device_name(device)
    else:
        name = cpu_capabilities().get("cpu_name") or platform.machine()
        device = f"{name}, {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{device}; {versions}, Python {platform.python_version()}"


@dataclass(frozen=True)
class Peaks:
    """What a device reaches at most, as torch measures it.

    Attributes:
        bandwidth: bytes per second that a product of one row with a matrix reads.
        matrix: floating-point operations per second of a product of large matrices.
    """

    bandwidth: float
    matrix: float


@torch.inference_mode()
def measure_peaks(device: torch.device, dtype: torch.dtype, rounds: int = 5) -> Peaks:
    """Both peaks for weights of ``dtype`` on ``device``: the best of ``rounds``. A second or two."""
    rows = READ // (SIDE * dtype.itemsize)
    weight = torch.ones(rows, SIDE, dtype=dtype, device=device)
    row = torch.ones(1, SIDE, dtype=dtype, device=device)
    square = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
    read = min(_seconds(row, weight) for _ in range(rounds))
    multiply = min(_seconds(square, square) for _ in range(rounds))
    return Peaks(weight.numel() * dtype.itemsize / read, 2 * SIDE**3 / multiply)


def _seconds(left: Tensor, right: Tensor) -> float:
    synchronize(left.device)
    start = time.perf_counter()
    torch.nn.functional.linear(left, right)
    synchronize(left.device)
    return time.perf_counter() - start
