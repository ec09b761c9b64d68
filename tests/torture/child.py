"""What runs in a forked process: the command line, with everything it needs already imported."""

from __future__ import annotations

import io
import os
import resource
import sys
import traceback
from importlib import import_module
from pathlib import Path

import torch
import transformers

from helpers import tiny
from skipdecode.cli.main import main

# What the verbs import when they run, once for all processes.
for name in "accelerate datasets peft sacrebleu rouge_score.rouge_scorer matplotlib.pyplot".split():
    import_module(name)
for name in (
    "evaluation.calibration evaluation.check evaluation.evaluate evaluation.plots evaluation.report generation.jobs "
    "training.trainer"
).split():
    import_module(f"skipdecode.{name}")
for name in "OPTForCausalLM PreTrainedTokenizerFast Trainer".split():
    getattr(transformers, name)
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
tiny.run("schedule", "--layers", 2)  # typer imports the rest when it first runs


def run(arguments: list[str], folder: Path, streams: Path, stdin: bytes, most: int | None) -> None:
    """The command line in ``folder``, with the streams in ``streams``; no file may grow above ``most`` bytes."""
    os.chdir(folder)
    (streams / "0").write_bytes(stdin)
    for number, flags in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        os.dup2(os.open(streams / str(number), flags), number)
    sys.stdin = io.TextIOWrapper(os.fdopen(0, "rb", closefd=False))
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False))
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), errors="backslashreplace")
    # A runaway allocation is a find, not the end of the machine.
    resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
    if most is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    sys.argv, code = ["skipdecode", *arguments], 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # as the interpreter would
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
