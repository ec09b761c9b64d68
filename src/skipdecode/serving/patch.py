"""Replaces a function of vLLM by one of ours that calls it. Imports no vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def patch(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Make ``owner.name(…)`` call ``ours(original, …)``; a second call changes nothing.

    Args:
        owner: a module, class or instance.
        name: of its function or method. Of a class, the arguments after ``original`` begin with ``self``.
        ours: the function that is called instead.
    """
    original = getattr(owner, name)
    if hasattr(original, "skipdecode") and name in vars(owner):
        return
    patched: Any = functools.wraps(original)(lambda *args, **kwargs: ours(original, *args, **kwargs))
    patched.skipdecode = True
    setattr(owner, name, patched)
