"""Counts layer-tokens (one token in one layer) of requests, for responses and Prometheus. Imports no vLLM."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from .load_policy import Load
from .steps import Table


def work(table: Table, prompt: int, cached: int, new: int) -> dict[str, Any]:
    """Return what one request ran, as responses report it; ``of`` is what full depth would have run.

    The last generated token is not fed back, so ``n`` tokens take ``n - 1`` decode steps. Tokens from the prefix cache
    do not count, and tokens computed again after a preemption count once.

    Args:
        table: the table of its schedule.
        prompt: number of prompt tokens.
        cached: how many prompt tokens came from the prefix cache.
        new: number of generated tokens.
    """
    steps = np.arange(min(cached, prompt) - prompt, max(new - 1, 0))
    layers = table.runs.sum(axis=1)[table.rows(steps)]
    made: dict[str, Any] = {}
    for tokens, phase, chosen in (("prompt_tokens", "prompt", steps < 0), ("decode_steps", "decode", steps >= 0)):
        made[tokens] = count = int(chosen.sum())
        made[f"{phase}_layer_tokens"] = {"run": int(layers[chosen].sum()), "of": count * table.runs.shape[1]}
    return made


def count_finished(model_name: str, summary: dict[str, Any], reason: str, new: int) -> None:
    """Add one request that ended, for any reason, to the Prometheus counters.

    Args:
        model_name: the name that the server gives the model.
        summary: of :func:`work`, with ``speedup`` and ``moved``.
        reason: why the request ended.
        new: number of generated tokens.
    """
    made, labels = _collectors(), (model_name, f"{summary['speedup']:g}")
    made["requests"].labels(*labels, reason).inc()
    made["tokens"].labels(*labels).inc(new)
    if summary["moved"]:
        made["moved"].labels(*labels).inc()
    for phase in ("prompt", "decode"):
        layer_tokens = summary[f"{phase}_layer_tokens"]
        made["layer_tokens"].labels(*labels, phase).inc(layer_tokens["run"])
        made["full_layer_tokens"].labels(*labels, phase).inc(layer_tokens["of"])


def observe_times(model_name: str, speedup: float, first: float, between: float | None) -> None:
    """Add one request's times, in seconds, to the Prometheus histograms.

    Args:
        model_name: the name that the server gives the model.
        speedup: the request's.
        first: from its arrival to its first token.
        between: from a token to the next, on average; None: it has one token.
    """
    made, labels = _collectors(), (model_name, f"{speedup:g}")
    made["first"].labels(*labels).observe(first)
    if between is not None:
        made["between"].labels(*labels).observe(between)


def show_load(model_name: str, load: Load) -> None:
    """Set the Prometheus gauges to what the load policy measures."""
    _collectors()["token_ms"].labels(model_name).set(load.token_ms())  # refresh may reset it
    _collectors()["load"].labels(model_name).set(load.refresh())


@cache
def _collectors() -> dict[str, Any]:
    """Return the collectors by name, made once per process, after vLLM has set where several servers merge theirs."""
    from prometheus_client import Counter, Gauge, Histogram

    labels = ("model_name", "speedup")
    first = Histogram(
        "skipdecode_time_to_first_token_seconds",
        "Of texts that ended.",
        labels,
        buckets=[0.01 * 2**i for i in range(14)],
    )
    between = Histogram(
        "skipdecode_inter_token_seconds",
        "Mean over each text that ended.",
        labels,
        buckets=[0.002 * 1.5**i for i in range(18)],
    )
    return {
        "first": first,
        "between": between,
        "requests": Counter("skipdecode_requests", "Texts that ended, by why.", (*labels, "finished_reason")),
        "tokens": Counter("skipdecode_generation_tokens", "Tokens of texts that ended.", labels),
        "moved": Counter("skipdecode_moved_requests", "Texts that the load policy made faster.", labels),
        "layer_tokens": Counter("skipdecode_layer_tokens", "Tokens times layers that ran.", (*labels, "phase")),
        "full_layer_tokens": Counter(
            "skipdecode_full_layer_tokens", "Tokens times layers at full depth.", (*labels, "phase")
        ),
        "load": Gauge("skipdecode_under_load", "API servers under load.", ("model_name",), multiprocess_mode="livesum"),
        "token_ms": Gauge(
            "skipdecode_token_milliseconds",
            "Mean time between a request's tokens, as the load policy sees it.",
            ("model_name",),
            multiprocess_mode="livemax",
        ),
    }
