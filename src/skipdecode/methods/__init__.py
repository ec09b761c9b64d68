"""SkipDecode and what it is compared with, all trained and run by the same code. One file per method.

To add a method, write ``methods/NAME.py`` with a subclass of :class:`Method`, and add its name to METHODS and
MethodName.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Literal

from ..errors import UsageError
from .base import Method

#: For command lines, which need the names and no torch.
MethodName = Literal["full", "skipdecode", "multi_exit", "calm", "unified", "d3", "hsd", "static", "scratch"]

#: Name -> class, in the file of that name, which is imported on first use.
METHODS: dict[str, str] = {
    "full": "Full",
    "skipdecode": "SkipDecode",
    "multi_exit": "MultiExit",
    "calm": "Calm",
    "unified": "Unified",
    "d3": "D3",
    "hsd": "HSD",
    "static": "Static",
    "scratch": "Scratch",
}


@cache
def get_method(name: str) -> Method:
    """The method called ``name``. Raises UsageError for a name that is none."""
    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}; known are {', '.join(METHODS)}")
    return getattr(import_module(f".{name}", __name__), METHODS[name])()


__all__ = ["METHODS", "Method", "MethodName", "get_method"]
