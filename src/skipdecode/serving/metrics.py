"""Counts layer-tokens (one token in one layer) for responses, Prometheus and the log. Imports no vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .depths import Table
from .gate import Plan
from .policy import Load


@dataclass(frozen=True)
class Work:
    """The work of one request: tokens that passed through the model, and layers that they ran.

    The last generated token is not fed back, so ``n`` tokens take ``n - 1`` decode steps. Tokens from the prefix cache
    do not count, and tokens computed again after a preemption count once.
    """

    prompt_tokens: int
    prompt_layer_tokens: int
    decode_steps: int
    decode_layer_tokens: int

    @classmethod
    def of(cls, table: Table, prompt: int, cached: int, new: int) -> Work:
        """Compute the work of one request.

        Args:
            table: the table of its schedule.
            prompt: number of prompt tokens.
            cached: how many prompt tokens came from the prefix cache.
            new: number of generated tokens.
        """
        steps = np.arange(min(cached, prompt) - prompt, max(new - 1, 0))
        layers = table.runs.sum(axis=1)[table.rows(steps)]
        inside = steps < 0
        return cls(int(inside.sum()), int(layers[inside].sum()), int((~inside).sum()), int(layers[~inside].sum()))

    def summary(self, speedup: float, num_layers: int) -> dict[str, Any]:
        """Return the fields for a response; ``of`` is what full depth would have run."""
        return {
            "speedup": speedup,
            "prompt_tokens": self.prompt_tokens,
            "prompt_layer_tokens": {"run": self.prompt_layer_tokens, "of": self.prompt_tokens * num_layers},
            "decode_steps": self.decode_steps,
            "decode_layer_tokens": {"run": self.decode_layer_tokens, "of": self.decode_steps * num_layers},
        }


class LayerLog:
    """Logs periodically what share of full depth the steps ran, as vLLM logs its own figures.

    Args:
        plan: holds the counters.
        seconds: least time between two lines. Without steps nothing is logged.
        write: receives each line.
        clock: monotonic time in seconds.
    """

    def __init__(
        self, plan: Plan, seconds: float, write: Callable[[str], Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._plan, self._seconds, self._write, self._clock = plan, seconds, write, clock
        self._since, self._before = clock(), plan.counted()

    def step(self) -> None:
        """Log a line at the end of a step, if it is time."""
        now = self._clock()
        if now - self._since < self._seconds:
            return
        counted = self._plan.counted()
        new = {name: value - self._before[name] for name, value in counted.items()}
        layers = new["steps"] * self._plan.num_layers
        self._write(
            f"skipdecode: {new['run'] / new['full']:.1%} of full depth's layer-tokens run, "
            f"{new['needed'] / new['full']:.1%} needed; steps entered {new['entered'] / layers:.1%} of the layers "
            f"(last {now - self._since:.0f} s, {new['steps']} steps)"
        )
        self._since, self._before = now, counted


class Counters:
    """Prometheus counters by speed-up; like vLLM's, they work with several API servers."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    def finished(self, speedup: float, reason: str, moved: bool, work: Work, num_layers: int, new: int) -> None:
        """Count one request that ended, for any reason."""
        made, labels = _collectors(), (self.model_name, f"{speedup:g}")
        made["requests"].labels(*labels, reason).inc()
        made["tokens"].labels(*labels).inc(new)
        if moved:
            made["moved"].labels(*labels).inc()
        for phase, run, tokens in (
            ("prompt", work.prompt_layer_tokens, work.prompt_tokens),
            ("decode", work.decode_layer_tokens, work.decode_steps),
        ):
            made["layer_tokens"].labels(*labels, phase).inc(run)
            made["full_layer_tokens"].labels(*labels, phase).inc(tokens * num_layers)

    def load(self, load: Load) -> None:
        """Set the gauges to what the load policy measures."""
        _collectors()["token_ms"].labels(self.model_name).set(load.token_ms())  # refresh may reset it
        _collectors()["load"].labels(self.model_name).set(load.refresh())


@cache
def _collectors() -> dict[str, Any]:
    """Make the collectors once per process, after vLLM has set where several API servers merge their metrics."""
    from prometheus_client import Counter, Gauge

    labels = ("model_name", "speedup")
    return {
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
