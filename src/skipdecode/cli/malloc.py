"""Keep freed memory in the process, for commands that hold the logits of whole texts."""

from __future__ import annotations

import ctypes
from contextlib import suppress

#: Parameters of glibc's ``mallopt``.
TRIM_THRESHOLD, MMAP_MAX = -1, -4


def keep_memory() -> None:
    """Let glibc keep what is freed; nothing where the C library is another.

    It would give large tensors back to the system and fetch them again, page by page, in every step.
    """
    with suppress(OSError, TypeError, AttributeError):  # Windows has no such handle; musl and macOS have no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, -1)
