"""What the user can mend. The command line ends these with one line and exit code 2; all else keeps its traceback."""

from __future__ import annotations


class SkipDecodeError(ValueError):
    """Something the user can mend; the message says what was wrong and what to do."""


class UsageError(SkipDecodeError):
    """Options or arguments that contradict each other or are out of range."""


class ScheduleError(SkipDecodeError):
    """A schedule that contradicts itself or does not fit the model."""


class CacheError(SkipDecodeError, RuntimeError):
    """A cache that is used in a way that would give other text than its schedule's."""


class ModelError(SkipDecodeError):
    """A model that is not there, is damaged, or cannot skip layers exactly."""


class UnsupportedModel(ModelError):
    """A model that cannot skip layers exactly, because of what it is."""


class TaskError(SkipDecodeError):
    """Data that is missing, cannot be read, or is not in the task's form."""


class FileError(SkipDecodeError):
    """A file that cannot be read or written, is damaged, or is not ours to replace."""


class JobError(SkipDecodeError):
    """An output or a run that belongs to another job, or to another process."""


class DivergedError(SkipDecodeError):
    """Training whose loss or weights are no longer finite."""


class MissingExtra(SkipDecodeError, ImportError):
    """A library of one of the extras is not installed."""


class UntrainedWarning(UserWarning):
    """Layers are about to be skipped in a model that was never trained to skip them."""
