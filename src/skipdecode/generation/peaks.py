"""What a device reaches at most: bytes read and products made per second, as torch measures them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import synchronize

#: Bytes that are read to measure bandwidth: more than any cache holds.
READ = 2**29
#: Side of the matrices that are multiplied to measure the peak.
SIDE = 2048


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
    return Peaks(weight.numel() * dtype.itemsize / max(read, 1e-9), 2 * SIDE**3 / max(multiply, 1e-9))


def _seconds(left: Tensor, right: Tensor) -> float:
    synchronize(left.device)
    start = time.perf_counter()
    torch.nn.functional.linear(left, right)
    synchronize(left.device)
    return time.perf_counter() - start
