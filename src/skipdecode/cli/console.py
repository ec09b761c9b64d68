"""What every verb of the command line shares: where words go, and how progress is shown."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from rich.console import Console

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


class Bar:
    """A progress bar on standard error with a count, a rate and the time left. It shows once it is started.

    Args:
        name: what is going on.
        unit: of the rate; none is shown without one.
    """

    def __init__(self, name: str, unit: str = "") -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        rate = [TextColumn("{task.fields[rate]}")] if unit else []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *rate, TimeRemainingColumn())
        self._progress = Progress(*columns, console=err)
        self._name = name
        self._unit = unit
        self._task: Any = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, total: int, done: int = 0) -> None:
        """So many in all, so many of them done before."""
        self._task = self._progress.add_task(self._name, total=total, completed=done, rate="")
        self._progress.start()

    def advance(self, count: int = 1, rate: float = 0.0) -> None:
        """So many more are done."""
        self._progress.update(self._task, advance=count, rate=f"{rate:,.0f} {self._unit}")

    def describe(self, name: str) -> None:
        """What is going on now."""
        self._progress.update(self._task, description=name)
