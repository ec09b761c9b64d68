"""The command line: ``skipdecode VERB MODEL --option``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from .cli_evaluate import calibrate, evaluate
from .cli_generate import generate
from .cli_inspect import check, demo, schedule
from .cli_train import train
from .errors import SkipDecodeError, UsageError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def skipdecode() -> None:
    """Faster generation with language models by running fewer layers."""


def _in_range(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb, with numbers that no option can mean refused before it starts: NaN, infinities, over 2**31."""

    @wraps(verb)
    def checked(**values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)) and not abs(value) < 2**31:
                raise UsageError(f"--{name.replace('_', '-')} must be a number between -2**31 and 2**31, not {value}")
        verb(**values)

    return checked


for verb in (demo, generate, train, calibrate, evaluate, check, schedule):
    app.command()(_in_range(verb))


def main() -> None:
    """Entry point.

    What the user can mend (a SkipDecodeError, or what the operating system refuses) ends with one line and exit code
    2, an interrupt with one line and 130. Everything else is a fault of ours and keeps its traceback;
    ``SKIPDECODE_DEBUG=1`` shows all of them.
    """
    # The hub's retries are its own affair; ours is the one line that says the model is not there.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    try:
        app()
    except (SkipDecodeError, OSError) as error:
        system = isinstance(error, OSError) and error.errno is not None
        if os.environ.get("SKIPDECODE_DEBUG") or not (system or isinstance(error, SkipDecodeError)):
            raise
        print(f"skipdecode: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
