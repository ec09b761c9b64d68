"""Errors that the user can fix. The command line prints their message and exits with code 2, without a traceback."""


class SkipDecodeError(ValueError):
    """An error that the user can fix; the message says what is wrong and what to do."""


class UsageError(SkipDecodeError):
    """Options or arguments contradict each other or are out of range."""


class ScheduleError(SkipDecodeError):
    """A schedule contradicts itself or does not fit the model."""


class CacheError(SkipDecodeError, RuntimeError):
    """A cache is used in a way that would change the text of its schedule."""


class ModelError(SkipDecodeError):
    """A model does not exist, is damaged, or cannot skip layers exactly."""


#: What to say where logits are NaN or infinite. Their argmax is token 0: a text, and no error.
NOT_FINITE = "the model's logits are NaN or infinite: a lower speed-up, or float32 or bfloat16, may help"


class UnsupportedModel(ModelError):
    """A model's architecture cannot skip layers exactly."""


class DataError(SkipDecodeError):
    """Data that is missing, cannot be read, or is not in the task's format."""


class FileError(SkipDecodeError):
    """A file cannot be read or written, is damaged, or was not written by SkipDecode and may not be replaced."""


class DivergedError(SkipDecodeError):
    """The loss or weights of a training run are no longer finite."""


class MissingExtra(SkipDecodeError, ImportError):
    """A library of one of the extras is not installed."""


class UntrainedWarning(UserWarning):
    """A schedule skips layers of a model that was never trained to skip them."""
