"""Messages, tables and progress bars for all verbs."""

import sys
from collections.abc import Container, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

#: Results go to standard output, messages and progress to standard error.
out = Console(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)
#: Seconds between two drawings of a progress bar where standard error is no terminal.
INTERVAL = 30


def say(message: str) -> None:
    """Print a message to standard error."""
    print(message, file=sys.stderr, flush=True)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], bold: Container[int] = ()) -> None:
    """Print a table whose first column is text and whose others are numbers. Rows in ``bold`` stand out."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(header[0], overflow="fold")
    for name in header[1:]:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        table.add_row(*map(Text, row), style="bold" if number in bold else None)
    out.print(table)


class Bar(tqdm):
    """A progress bar on standard error, from the first :meth:`show` on."""

    def __init__(self) -> None:
        super().__init__(mininterval=0.1 if sys.stderr.isatty() else INTERVAL, delay=0.1)

    def show(self, what: str, done: int, total: int) -> None:
        """Show the current work, and how much of it is done."""
        if self.desc != f"{what}: ":
            self.set_description(what, refresh=False)
            self.reset(total)
        self.update(done - self.n)

    def advance(self, count: int = 1, rate: str = "") -> None:
        """Add ``count`` to what is done, and show ``rate``."""
        self.set_postfix_str(rate, refresh=False)
        self.update(count)
