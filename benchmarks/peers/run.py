"""The command: which engines, shapes and batch sizes, and where the report goes."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from skipdecode.errors import SkipDecodeError, UsageError
from skipdecode.loading.device import cpu_capabilities

from . import checkpoint
from .catalogue import ENGINES, choose, installed
from .measure import Places, Settings, measure
from .report import markdown, save, summaries

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        cells = run(options)
    except SkipDecodeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    notes = _notes(options, cells)
    save(cells, notes, output(options))
    print(markdown(cells, notes))
    return 0


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells that the options ask for. Raises SkipDecodeError."""
    places = Places(options.work, options.environments, output(options))
    settings = Settings(
        "", options.prompt_tokens, options.new_tokens, options.rounds, options.threads, options.precision
    )
    batches, shapes = sorted(set(options.batch)), options.shape or ["opt-1.3b", "llama-1.3b"]
    if options.smoke:
        settings = replace(settings, prompt_tokens=16, new_tokens=16, rounds=1, precision="float32")
        batches, shapes = [1, 4], options.shape or ["llama-tiny"]
    engines = choose(options.engines or (installed(places.environments) if options.smoke else ["all"]))
    if unknown := set(shapes) - set(checkpoint.SHAPES):
        raise UsageError(f"there is no shape {unknown.pop()!r}: choose from {', '.join(checkpoint.SHAPES)}")
    rows = []
    for shape in shapes:
        checkpoint.write(shape, places.work / shape)
        for start in range(0, len(engines), options.together):
            group = engines[start : start + options.together]
            for row in measure(replace(settings, shape=shape), group, batches, places, _say, again=options.smoke):
                rows.append(row)
                if "failed" in row:
                    _say(f"{shape}, batch {row['batch']}: {row['engine']} was not run: {row['failed']}")
    return summaries(rows)


def output(options: argparse.Namespace) -> Path:
    """Folder of the report: a smoke test's figures mean nothing, and replace no others."""
    return options.output or (options.work / "smoke" if options.smoke else ROOT / "results" / "peers")


def _parser() -> argparse.ArgumentParser:
    def words(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [positive(part) for part in text.split(",")]

    def positive(text: str) -> int:
        if (number := int(text)) < 1:
            raise ValueError(text)
        return number

    def new_tokens(text: str) -> int:
        if (number := int(text)) < 2:  # the first comes with the prompt, decoding is the rest
            raise ValueError(text)
        return number

    parser = argparse.ArgumentParser(prog="python benchmarks/peers", description=__doc__)
    parser.add_argument("--engines", type=words, help=f"all, or some of {', '.join(ENGINES)}")
    parser.add_argument("--shape", type=words, help=f"some of {', '.join(checkpoint.SHAPES)} (default: those of 1.3b)")
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32], help="rows: 1,8,32")
    parser.add_argument("--prompt-tokens", type=positive, default=64, help="of every row")
    parser.add_argument("--new-tokens", type=new_tokens, default=64, help="of every row; end-of-sequence is off")
    parser.add_argument("--rounds", type=positive, default=3, help="timed ones, after one that warms up")
    parser.add_argument("--together", type=positive, default=1, help="engines alive at once, beside the baseline")
    parser.add_argument("--precision", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="of every engine")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, short texts, one round, float32")
    parser.add_argument("--output", type=Path, help="folder of the report (default: results/peers)")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "peers", help="folder of the checkpoints")
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers", help="what environments.sh made")
    return parser


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _command(options: argparse.Namespace) -> str:
    """What was asked for, without the folders, which say nothing to others."""
    words = ["python", "benchmarks/peers"]
    left_out = {"work", "output", "environments"}
    if options.smoke:  # which has lengths of its own
        left_out |= {"batch", "prompt_tokens", "new_tokens", "rounds", "precision"}
    for name, value in vars(options).items():
        if name not in left_out and value not in (None, False):
            shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [shown])]
    return shlex.join(words)


def _notes(options: argparse.Namespace, cells: Sequence[dict[str, Any]]) -> dict[str, str]:
    """What must stand below the tables."""
    versions = {(key.removesuffix(" version"), cell[key]) for cell in cells for key in cell if key.endswith(" version")}
    cpu = cpu_capabilities().get("cpu_name") or platform.machine()
    return {
        "ratios": "in brackets, how many times faster than transformers with its dynamic cache, timed in the same "
        "rounds (the baseline's seconds over the engine's, medians)",
        "layers": "the model's layers over those that a decode step runs on average; 1x is full depth",
        "method": "each engine in its own process; in every round the baseline, then each call; decoding is the whole "
        "job's seconds less those of a call with one new token; end-of-sequence off, greedy",
        "machine": f"{cpu}, {os.cpu_count()} cores, {platform.system()}",
        "versions": ", ".join(f"{name} {number}" for name, number in sorted(versions)),
        "command": _command(options),
    }
