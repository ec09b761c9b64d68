"""Faster generation with language models by running fewer layers (SkipDecode, arXiv 2307.02628)."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import ScheduleError as ScheduleError
    from .errors import SkipDecodeError as SkipDecodeError
    from .generation.generate import generate as generate
    from .loading.load import load as load
    from .model.attach import attach as attach
    from .model.attach import detach as detach
    from .model.attach import teacher_forced as teacher_forced
    from .model.cache import SkipCache as SkipCache
    from .schedule import Schedule as Schedule
    from .training.callback import Skipping as Skipping

__version__ = version("skipdecode")
_MODULES = {
    "Schedule": "schedule",
    "ScheduleError": "errors",
    "SkipCache": "model.cache",
    "SkipDecodeError": "errors",
    "Skipping": "training.callback",
    "attach": "model.attach",
    "detach": "model.attach",
    "generate": "generation.generate",
    "load": "loading.load",
    "teacher_forced": "model.attach",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: help texts need no torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
