"""SkipDecode and what it is compared with, all trained and run by the same code. One file per method.

To add a method, write ``methods/NAME.py`` with a subclass of :class:`Method`, and add a line to METHODS.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from ..errors import UsageError
from .base import Method

#: Name -> class, in the file of that name, imported on first use: help texts and choices need no torch.
METHODS = {
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


__all__ = ["METHODS", "Method", "get_method"]
