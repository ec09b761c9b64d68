"""Faster generation with language models by running fewer layers (SkipDecode, arXiv 2307.02628)."""

from .cache import SkipCache
from .gate import attach, detach, teacher_forced
from .generation import generate
from .loading import load
from .schedule import Schedule, ScheduleError

__version__ = "0.1.0"
__all__ = ["Schedule", "ScheduleError", "SkipCache", "attach", "detach", "generate", "load", "teacher_forced"]
