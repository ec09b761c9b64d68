"""The checkpoint that is served, and the options that every part of this benchmark has."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from checkpoint import describe, make
from model_shapes import shape_config
from peers.engines.vllm_int8 import write_int8
from skipdecode.errors import UsageError
from skipdecode.loading.device import machine
from skipdecode.loading.load import identity_of, read_config, resolve
from skipdecode.provenance import fingerprint

#: Of checkpoints with random weights; w8a8: int8 weights by row, and activations rounded to int8 by token as they come.
PRECISIONS = ("bfloat16", "w8a8")


def options(program: str, doc: str | None) -> argparse.ArgumentParser:
    """What offline runs and servers have in common."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=program, description=doc, formatter_class=form)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", help="a folder, or demo (the embedded checkpoint)")
    what.add_argument("--shape", help="random weights, as skipdecode bench --shape has them")
    parser.add_argument("--layers", type=int, help="of a shape: only so many")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16", help="of a shape")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64, help="of a request, on average")
    parser.add_argument("--kv-gib", type=int, default=2, help="for keys and values, of each engine")
    parser.add_argument("--eager", action="store_true", help="no torch.compile: loads faster")
    parser.add_argument("--engine", type=json.loads, default={}, help='options of both: \'{"quantization": "fp8"}\'')
    parser.add_argument("--serving", type=json.loads, default={}, help="the plugin's: '{\"prompt_layers\": 8}'")
    parser.add_argument("--smoke", action="store_true", help="in a minute or two, whether it works: no figures")
    parser.add_argument("--python", default=".venv-vllm/bin/python", help="of the environment that has vLLM")
    parser.add_argument("--work", type=Path, default=Path("runs/serving"), help="checkpoints and logs")
    parser.add_argument("--output", type=Path, default=Path("runs/serving/results"))
    return parser


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str], usual: dict[str, Any], smoke: dict[str, Any]
) -> argparse.Namespace:
    """The options, where these are the defaults. Raises UsageError for options that exclude each other."""
    defaults = usual | smoke if parser.parse_known_args(arguments)[0].smoke else usual
    checkpoint = {name: defaults.get(name) for name in ("model", "shape", "layers")}
    parser.set_defaults(**{name: value for name, value in defaults.items() if name not in checkpoint})
    given = parser.parse_args(arguments)
    if not given.model and not given.shape:
        vars(given).update({name: value for name, value in checkpoint.items() if getattr(given, name) is None})
    if given.model and (given.layers or given.precision != PRECISIONS[0]):
        raise UsageError("--layers and --precision are of a --shape; a --model is what it is")
    if not Path(given.python).exists():
        raise UsageError(f"there is no {given.python}: make .venv-vllm/installed, or --python names another")
    given.command = f"python {parser.prog} {shlex.join(arguments)}"
    return given


def longest(given: argparse.Namespace) -> int:
    """Tokens of the longest request."""
    return int(given.prompt_tokens + given.new_tokens * 3 // 2 + 8)


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """What rounds must share to be rounds of the same thing."""
    names = ("prompt_tokens", "new_tokens", "slots", "kv_gib", "eager")
    engine = {"engine": json.dumps(given.engine)} if given.engine else {}
    adapter = getattr(given, "adapter", None)
    files = {"files": fingerprint(identity_of(given.model, adapter))} if given.model else {}
    found = {"model": label(given), "machine": machine()} | {name: getattr(given, name) for name in names}
    return found | engine | files


def label(given: argparse.Namespace) -> str:
    """The checkpoint's name, for folders and tables."""
    if given.model:
        return Path(given.model).name
    layers = f"-{given.layers}-layers" if given.layers else ""
    return f"{given.shape}{layers}-{given.precision}"


def config_of(given: argparse.Namespace) -> Any:
    """Of the checkpoint, before it is written. Raises UsageError or ModelError if there is none."""
    if given.model:
        return read_config(resolve(given.model))
    config = shape_config(given.shape)
    config.num_hidden_layers = given.layers or config.num_hidden_layers
    return config


def prepare(given: argparse.Namespace) -> Path:
    """The checkpoint's folder; random weights are written once, and rounded to int8 where that is asked."""
    if given.model:
        return Path(resolve(given.model)).absolute()
    folder: Path = given.work / label(given)
    if given.engine.get("load_format") == "dummy":  # the engine makes the weights
        describe(config_of(given), folder, torch.bfloat16)
        return folder.absolute()
    plain = folder.with_name(folder.name.removesuffix(given.precision) + "bfloat16")
    if not any(plain.glob("*.safetensors")):
        print(f"writing {plain}", flush=True)
        make(config_of(given), unfinished := plain.with_name(f"{plain.name}.part"), torch.bfloat16)
        unfinished.rename(plain)
    if given.precision == "w8a8":
        write_int8(plain, folder)
    return folder.absolute()
