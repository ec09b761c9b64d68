"""Print results, messages and progress for all commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Sequence
from contextlib import suppress

from rich.console import Console

#: Results go to standard output, messages and progress to standard error. A model's :x: is no emoji.
out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)


def say(message: str) -> None:
    """Print a message to standard error."""
    print(message, file=sys.stderr)


def drop_output() -> None:
    """Discard buffered standard output, because Python would fail to flush it once more at exit."""
    with suppress(OSError, ValueError, AttributeError):  # standard output is closed or not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_table(heads: Sequence[str], cells: Sequence[Sequence[str]], bold: Container[int] = ()) -> None:
    """Print a table whose first column may wrap on a narrow terminal, while its numbers are never cut.

    Rows whose numbers are among ``bold`` stand out. Cells are printed as they are, brackets included.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, head in enumerate(heads):
        widest = max(len(line) for row in cells for line in row[number].splitlines() or [""])
        if number == 0:
            table.add_column(head, overflow="fold", min_width=min(widest, 10))
        else:
            table.add_column(head.replace(" ", "\n"), justify="right", no_wrap=True, min_width=widest)
    for number, row in enumerate(cells):
        table.add_row(*map(Text, row), style="bold" if number in bold else None)
    out.print(table)


class Bar:
    """A progress bar on standard error with the current work, units done, a rate and the remaining time.

    It appears at the first call of :meth:`show`, so that errors before any work are printed without it.
    """

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        described, rate = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[rate]}")
        self._progress = Progress(
            described, BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn(), console=err
        )

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress.task_ids:
            self._progress.stop()

    def show(self, what: str, done: int, total: int) -> None:
        """Show the name of the current work, and how many of ``total`` units are done."""
        if not self._progress.task_ids:
            self._progress.start()
            self._progress.add_task(what, rate="")
        task = self._progress.task_ids[0]
        if self._progress.tasks[0].description != what:
            self._progress.reset(task)
        self._progress.update(task, description=what, completed=done, total=total)

    def advance(self, count: int = 1, rate: str = "") -> None:
        """Add ``count`` to the units done, and show the text ``rate``."""
        self._progress.update(self._progress.task_ids[0], advance=count, rate=rate)
