"""SkipDecode and what it is compared with, all trained and run by the same code. One file per method."""

from __future__ import annotations

from ..errors import UsageError
from .base import Method
from .calm import Calm
from .d3 import D3
from .full import Full
from .hsd import HSD
from .multi_exit import MultiExit
from .scratch import Scratch
from .skipdecode import SkipDecode
from .static import Static
from .unified import Unified

METHODS: dict[str, Method] = {
    method.name: method
    for method in (Full(), SkipDecode(), MultiExit(), Calm(), Unified(), D3(), HSD(), Static(), Scratch())
}


def get_method(name: str) -> Method:
    """The method called ``name``. Raises UsageError for a name that is none."""
    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}; known are {', '.join(METHODS)}")
    return METHODS[name]


__all__ = ["METHODS", "Method", "get_method"]
