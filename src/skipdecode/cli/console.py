"""What every verb of the command line shares: where words go, and how progress is shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console

#: Results go to standard output, everything said about them to standard error.
out = Console()
err = Console(stderr=True, highlight=False)


def say(message: str) -> None:
    """One line to standard error."""
    print(message, file=sys.stderr)


def drop_output() -> None:
    """Discard what standard output still holds back: Python would try to write it, and fail, once more at its end."""
    with suppress(OSError, ValueError, AttributeError):  # closed, or no real file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_table(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Print a table of which a narrow terminal wraps the words and never cuts a number."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, head in enumerate(heads):
        widest = max(len(line) for row in cells for line in row[number].splitlines() or [""])
        if number == 0:
            table.add_column(head, overflow="fold", min_width=min(widest, 10))
        else:
            table.add_column(head.replace(" ", "\n"), justify="right", no_wrap=True, min_width=widest)
    for row in cells:
        table.add_row(*row)
    out.print(table, highlight=False)


class Bar:
    """A progress bar on standard error: what is under way, how much of it is done, a rate, the time left.

    It appears with the first call of :meth:`show`, so that what is refused before any work stands alone.
    """

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        described, rate = TextColumn("{task.description}"), TextColumn("{task.fields[rate]}")
        self._progress = Progress(
            described, BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn(), console=err
        )

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress.task_ids:
            self._progress.stop()

    def show(self, what: str, done: int, total: int, rate: str = "") -> None:
        """Show what is under way, and how much of ``total`` is done."""
        if not self._progress.task_ids:
            self._progress.start()
            self._progress.add_task(what, rate=rate)
        task = self._progress.task_ids[0]
        if self._progress.tasks[0].description != what:
            self._progress.reset(task)
        self._progress.update(task, description=what, completed=done, total=total, rate=rate)

    def advance(self, count: int = 1, rate: str = "") -> None:
        """Add to what is done."""
        self._progress.update(self._progress.task_ids[0], advance=count, rate=rate)
