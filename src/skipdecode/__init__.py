"""Faster generation with language models by running fewer layers (SkipDecode, arXiv 2307.02628)."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import ScheduleError, SkipDecodeError
    from .generation.generate import generate
    from .loading.load import load
    from .model.attach import attach, detach, teacher_forced
    from .model.cache import SkipCache
    from .schedule import Schedule
    from .training.callback import Skipping

__version__ = version("skipdecode")
__all__ = [
    "Schedule",
    "ScheduleError",
    "SkipCache",
    "SkipDecodeError",
    "Skipping",
    "attach",
    "detach",
    "generate",
    "load",
    "teacher_forced",
]

_HOMES = {
    "SkipCache": "model.cache",
    "Skipping": "training.callback",
    "attach": "model.attach",
    "detach": "model.attach",
    "teacher_forced": "model.attach",
    "generate": "generation.generate",
    "load": "loading.load",
    "Schedule": "schedule",
    "ScheduleError": "errors",
    "SkipDecodeError": "errors",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, since schedules and help texts need no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
