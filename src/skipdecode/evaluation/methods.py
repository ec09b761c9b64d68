"""SkipDecode and its baselines, which the same code trains and runs.

To add a method, write a subclass of :class:`Method` in ``skipdecode/baselines``, and add it to METHODS and MethodName.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Literal

from ..errors import UsageError
from .methods_base import Method

MethodName = Literal["full", "skipdecode", "multi_exit"]

#: Module and class of each method, by name; :func:`get_method` imports the module.
METHODS: dict[str, tuple[str, str]] = {
    "full": ("evaluation.methods_base", "Full"),
    "skipdecode": ("evaluation.methods_base", "SkipDecode"),
    "multi_exit": ("evaluation.methods_base", "MultiExit"),
}


@cache
def get_method(name: str) -> Method:
    """Return the method called ``name``. Raises UsageError if there is none."""
    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}; known are {', '.join(METHODS)}")
    file, method = METHODS[name]
    return getattr(import_module(f"skipdecode.{file}"), method)()


__all__ = ["METHODS", "Method", "MethodName", "get_method"]
