"""Messages, tables and progress bars for all verbs."""

from __future__ import annotations

import sys
import time
from collections.abc import Container, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

#: Results go to standard output, messages and progress to standard error.
out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)
#: Seconds between two progress lines where standard error is no terminal.
INTERVAL = 30


def say(message: str) -> None:
    """Print a message to standard error."""
    print(message, file=sys.stderr, flush=True)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], bold: Container[int] = ()) -> None:
    """Print a table whose first column is text and whose others are numbers. Rows in ``bold`` stand out."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(header):
        if number == 0:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        table.add_row(*map(Text, row), style="bold" if number in bold else None)
    out.print(table)


class Bar:
    """A progress bar on standard error; where that is no terminal, a line each half minute.

    It appears at the first call of :meth:`show`.
    """

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=err)
        self._start = self._printed = time.monotonic()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress.task_ids:
            self._progress.stop()

    def show(self, what: str, done: int, total: int) -> None:
        """Show the current work, and how much of it is done."""
        if not self._progress.task_ids:
            if err.is_terminal:
                self._progress.start()
            self._progress.add_task(what, rate="")
        task = self._progress.task_ids[0]
        if self._progress.tasks[0].description != what:
            self._progress.reset(task)
            self._start = time.monotonic()
        self._progress.update(task, description=what, completed=done, total=total)
        self._print_line()

    def advance(self, count: int = 1, rate: str = "") -> None:
        """Add ``count`` to what is done, and show ``rate``."""
        self._progress.update(self._progress.task_ids[0], advance=count, rate=rate)
        self._print_line()

    def _print_line(self) -> None:
        now = time.monotonic()
        if err.is_terminal or now - self._printed < INTERVAL:
            return
        self._printed = now
        task = self._progress.tasks[0]
        left = ""
        if task.completed and task.total:
            seconds = (now - self._start) * (task.total - task.completed) / task.completed
            left = f", about {seconds / 60:.0f} minutes left"
        say(f"{task.description}: {task.completed:g} of {task.total:g} {task.fields['rate']}{left}")
