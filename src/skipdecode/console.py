"""What every verb of the command line shares: errors that end with exit code 2, and where words go."""

from __future__ import annotations

import math
import sys

from rich.console import Console

from .errors import UsageError

#: Results go to standard output, everything said about them to standard error.
out = Console()
err = Console(stderr=True, highlight=False)


def say(message: str) -> None:
    """One line to standard error."""
    print(message, file=sys.stderr)


def numbers(text: str) -> tuple[float, ...]:
    """``"1,2.5,5"`` as numbers. Raises UsageError."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(map(math.isfinite, values)):
        raise UsageError(f"numbers with commas between are wanted, like 1,2,3, not {text!r}")
    return values


def budgets(text: str) -> tuple[float, ...]:
    """Distinct speed-ups of at least 1. Raises UsageError."""
    values = numbers(text)
    if not values or min(values) < 1 or len(set(values)) < len(values):
        raise UsageError(f"speed-ups are distinct numbers of at least 1, not {text!r}")
    return values
