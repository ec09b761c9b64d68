"""Real servers, each in processes of its own, and what they say of the requests that they had."""

from __future__ import annotations

import argparse
import os
import re
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipdecode.errors import UsageError

from .models import longest
from .processes import PLUGIN, Running, awake, running, variables
from .rounds import STOCK

#: Of the slots: more requests than this share wait for their first token, and the load policy makes new ones faster.
WAITING = 0.25
#: Of the time per token that counts as good: beyond this share, it does too.
TOKEN = 0.8
#: The longest that a server may take to start, in seconds.
PATIENCE = 1200


def plugin_options(name: str, slots: int, token_ms: float) -> list[str]:
    """Of ``skipdecode serve``, from a server's name.

    Args:
        name: ``3`` (that speed-up for every request), or ``1-5`` (5 for requests that begin under load).
        slots: of the server.
        token_ms: what counts as a good time per token.

    Raises:
        UsageError: no such form.
    """
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?", name)):
        raise UsageError(f"a server is a speed-up (3), or one and that under load (1-5), not {name!r}")
    speedup, under_load = found.groups()
    if under_load is None:
        return ["--speedup", speedup]
    limits = ["--load-waiting", str(int(slots * WAITING)), "--load-token-ms", f"{token_ms * TOKEN:.2f}"]
    return ["--speedup", speedup, "--load-speedup", under_load, *limits]


def words(options: dict[str, Any]) -> list[str]:
    """Options of the plugin as words of a command line."""
    found: list[str] = []
    for name, value in options.items():
        found += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return found


@dataclass(frozen=True)
class Server:
    """A server that answers; asleep unless it is asked within ``awake``."""

    name: str
    running: Running
    model: str = "model"

    def awake(self) -> AbstractContextManager[None]:
        """Asleep afterwards."""
        return awake(self.running.process)


@contextmanager
def started(given: argparse.Namespace, name: str, model: Path, token_ms: float = 0) -> Iterator[Server]:
    """A server, until the end.

    Args:
        given: the options of the benchmark.
        name: ``stock``, or of which :func:`plugin_options` speaks.
        model: the checkpoint's folder.
        token_ms: for the load policy.
    """
    command = [given.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--enable-per-request-metrics"]  # as the plugin's servers have them
    if name != STOCK:
        own = [*plugin_options(name, given.slots, token_ms), *words(given.serving)]
        command = [given.python, "-m", "skipdecode", "serve", str(model), *own]
    command += ["--served-model-name", Server.model, "--max-num-seqs", str(given.slots)]
    command += ["--max-model-len", str(longest(given)), "--max-num-batched-tokens", str(max(2048, longest(given)))]
    command += ["--kv-cache-memory-bytes", str(given.kv_gib << 30), "--no-enable-prefix-caching"]
    command += ["--disable-uvicorn-access-log", *(["--enforce-eager"] if given.eager else [])]
    log = given.work / "logs" / f"server-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with running(command, log, variables("" if name == STOCK else PLUGIN), PATIENCE) as one:
        with awake(one.process):
            pass
        try:
            yield Server(name, one)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGCONT)  # so that it can end


def had(before: str, after: str) -> dict[str, float]:
    """From two readings of ``/metrics``: ``mean_speedup``, ``moved`` requests, ``decode_layer_ratio``; {} of stock."""

    def grown(name: str, **labels: str) -> dict[float, float]:
        totals: dict[float, float] = {}
        for page, sign in ((before, -1), (after, 1)):
            for speedup, value in _series(page, name, labels):
                totals[speedup] = totals.get(speedup, 0) + sign * value
        return totals

    requests = grown("skipdecode_requests_total")
    if not (count := sum(requests.values())):
        return {}
    full, run = (
        sum(grown(f"skipdecode_{name}_total", phase="decode").values())
        for name in ("full_layer_tokens", "layer_tokens")
    )
    return {
        "mean_speedup": sum(speedup * n for speedup, n in requests.items()) / count,
        "moved": sum(grown("skipdecode_moved_requests_total").values()),
        "decode_layer_ratio": full / run,
    }


def _series(page: str, name: str, labels: dict[str, str]) -> Iterator[tuple[float, float]]:
    """(speed-up, value) of a metric's lines that have these labels."""
    for found, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", page, re.MULTILINE):
        its = dict(re.findall(r'(\w+)="([^"]*)"', found))
        if labels.items() <= its.items():
            yield float(its["speedup"]), float(value)
