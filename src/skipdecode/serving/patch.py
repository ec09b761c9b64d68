"""Replaces a function of vLLM by one of ours that calls it. Imports no vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def patch(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Make ``owner.name(…)`` call ``ours(original, …)``, once, however often this is called.

    Args:
        owner: a module, class or instance.
        name: of its function or method. Of a class, the arguments after ``original`` begin with ``self``.
        ours: the function that is called instead.
    """
    original = getattr(owner, name)
    if getattr(original, "skipdecode", False) and name in vars(owner):
        return

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    patched.skipdecode = True  # type: ignore[attr-defined]
    setattr(owner, name, patched)
