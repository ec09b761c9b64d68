"""Replaces a function of vLLM by one of ours that calls it. Imports no vLLM."""

import functools
from collections.abc import Callable
from typing import Any


def patch(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Make ``owner.name(…)``, of a module, class or instance, call ``ours(original, …)``; once is enough."""
    original = getattr(owner, name)
    if hasattr(original, "skipdecode") and name in vars(owner):
        return
    patched: Any = functools.wraps(original)(lambda *args, **kwargs: ours(original, *args, **kwargs))
    patched.skipdecode = True
    setattr(owner, name, patched)
