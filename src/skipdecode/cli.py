"""The command line: ``skipdecode VERB MODEL --option``."""

from __future__ import annotations

import os
import sys

import typer

from .cli_evaluate import calibrate, evaluate
from .cli_generate import generate
from .cli_inspect import check, demo, schedule
from .cli_train import train

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def skipdecode() -> None:
    """Faster generation with language models by running fewer layers."""


for verb in (demo, generate, train, calibrate, evaluate, check, schedule):
    app.command()(verb)


def main() -> None:
    """Entry point: what the user can put right ends with one line and exit code 2."""
    # The hub's retries are its own affair; ours is the one line that says the model is not there.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        print(f"skipdecode: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
