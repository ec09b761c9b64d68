"""The command line: ``skipdecode VERB MODEL --option``."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer  # transformers requires it

from .. import __version__
from ..errors import SkipDecodeError, UntrainedWarning, UsageError
from ..files import is_stream
from .chat import chat
from .check import check
from .console import drop_output
from .demo import demo
from .distill import distill
from .evaluate import evaluate
from .generate import generate
from .plan import plan
from .play import play
from .probe import probe
from .push import push
from .serve import serve
from .train import train

#: The extra of skipdecode that installs a library.
EXTRAS = {
    "matplotlib": "cli",
    "httpx": "cli",
    "accelerate": "train",
    "datasets": "train",
    "peft": "lora",
    "gradio": "web",
}

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"skipdecode {__version__}")
        raise typer.Exit


@app.callback()
def skipdecode(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Faster generation with language models by running fewer layers."""


class Stopped(BaseException):
    """Raised on SIGINT and SIGTERM; not a KeyboardInterrupt, because libraries catch that."""

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name
        self.code = 128 + number
        self.goes_on = False


def _run(verb: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command: refuse NaN, infinities and numbers from 2**31; note in Stopped whether the command can resume."""

    @wraps(verb)
    def checked(**values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)) and not abs(value) < 2**31:
                raise UsageError(f"--{name.replace('_', '-')} must be a number between -2**31 and 2**31, not {value}")
        try:
            verb(**values)
        except Stopped as stop:
            resumes = verb in (generate, distill, train, evaluate) or bool(values.get("search"))
            output = str(values.get("output"))
            stop.goes_on = resumes and not values.get("no_resume") and output != "-" and not is_stream(output)
            raise

    return checked


for verb in (
    demo,
    distill,
    generate,
    chat,
    play,
    probe,
    train,
    evaluate,
    check,
    plan,
    push,
):
    app.command()(_run(verb))
# Unknown options go to vLLM.
app.command(context_settings={"ignore_unknown_options": True})(_run(serve))


def main() -> None:
    """Run the command line.

    Errors that a user can fix (SkipDecodeError, a missing extra, an error of the operating system) print one line and
    exit with 2; SIGINT and SIGTERM print one line and exit with 130 or 143. Other exceptions are bugs and show their
    traceback. ``SKIPDECODE_DEBUG=1`` shows all tracebacks but those of signals.
    """
    # Hide the hub's warnings about retries: one line of ours says that the model is missing.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if sys.stderr is None:  # print would use standard output instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    with _signals(), warnings.catch_warnings():
        warnings.showwarning = partial(_show_warning, warnings.showwarning)
        # Commands that generate texts print their own message; the others only measure.
        warnings.simplefilter("ignore", UntrainedWarning)
        try:
            try:
                app()
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
        except (SkipDecodeError, OSError, ModuleNotFoundError) as error:
            line = _line(error)
            if line is None or os.environ.get("SKIPDECODE_DEBUG"):
                raise
            _end(line, 2)
        except Stopped as stop:
            _end(f"stopped by {stop.name}" + "; the same command goes on from what is saved" * stop.goes_on, stop.code)


def _line(error: Exception) -> str | None:
    """Return the message to print for an error that the user can fix; None for a bug."""
    if isinstance(error, SkipDecodeError) or (isinstance(error, OSError) and error.errno is not None):
        return str(error)
    library = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"{library} is not installed: pip install 'skipdecode[{EXTRAS[library]}]'" if library in EXTRAS else None


def _end(line: str, code: int) -> NoReturn:
    print(f"skipdecode: {line}", file=sys.stderr)
    drop_output()
    raise SystemExit(code) from None


def _show_warning(before: Any, message: Any, category: Any, filename: str, *rest: Any, **named: Any) -> None:
    """Print a warning of skipdecode as one line, without its place in the code; pass others to ``before``."""
    if Path(__file__).parent.parent in Path(filename).parents:
        print(f"skipdecode: {message}", file=sys.stderr)
    else:
        before(message, category, filename, *rest, **named)


@contextmanager
def _signals() -> Iterator[None]:
    """Raise :class:`Stopped` on SIGINT and SIGTERM, so that files are closed and locks released."""

    def stop(number: int, _: object) -> NoReturn:
        raise Stopped(number)

    # Only the main thread may set handlers.
    main_thread = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main_thread else ()
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
