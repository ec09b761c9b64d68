"""What every verb of the command line shares: errors that end with exit code 2, and where words go."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console

from ..errors import UsageError

#: Results go to standard output, everything said about them to standard error.
out = Console()
err = Console(stderr=True, highlight=False)


def say(message: str) -> None:
    """One line to standard error."""
    print(message, file=sys.stderr)


def drop_output() -> None:
    """What standard output still holds back goes nowhere: Python would try, and fail, once more at its end."""
    with suppress(OSError, ValueError, AttributeError):  # closed, or no real file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse_numbers(text: str) -> tuple[float, ...]:
    """``"1,2.5,5"`` as numbers. Raises UsageError."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(map(math.isfinite, values)):
        raise UsageError(f"numbers with commas between are wanted, like 1,2,3, not {text!r}")
    return values


def parse_speedups(text: str) -> tuple[float, ...]:
    """Distinct speed-ups of at least 1. Raises UsageError."""
    values = parse_numbers(text)
    if not values or min(values) < 1 or len(set(values)) < len(values):
        raise UsageError(f"speed-ups are distinct numbers of at least 1, not {text!r}")
    return values


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error. Yields what to call with (what is under way, how much of it is done, of how much)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=err, transient=True)

    def show(what: str, done: int, total: int) -> None:
        progress.start()  # here, so that what is refused before any work stands alone
        bar = progress.task_ids[0] if progress.task_ids else progress.add_task(what)
        progress.update(bar, description=what, completed=done, total=total)

    try:
        yield show
    finally:
        if progress.task_ids:
            progress.stop()
