"""Decides under load which new requests get a faster schedule. No vLLM here; tests bring a clock of their own.

One checkpoint serves every speed, so a server need not turn anybody away or load a smaller model: while its limits are
passed, requests that *begin* take fewer layers. What runs already keeps the schedule that it began with.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Seconds over which the time per token is averaged.
WINDOW = 5.0
#: Load ends when both figures are down to this share of their limits, so that it does not come and go.
RELEASE = 0.5


@dataclass(frozen=True)
class Limits:
    """What an operator sets.

    Attributes:
        speedup: what new requests get under load, unless they are faster anyway.
        waiting: load begins when more requests than this wait for their first token; None: they do not count.
        token_ms: load begins when tokens come further apart than this, in milliseconds; None: that does not count.
        everyone: requests that asked for a speed-up of their own are made faster too.
    """

    speedup: float
    waiting: float | None = None
    token_ms: float | None = None
    everyone: bool = False


class Load:
    """Whether a server is under load, and which speed-up a new request gets.

    Args:
        limits: the operator's.
        requests: how many requests wait for their first token now, and how many have it.
        clock: seconds that only grow.
    """

    def __init__(
        self, limits: Limits, requests: Callable[[], tuple[int, int]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits
        self.is_high = False
        self._requests = requests
        self._clock = clock
        self._gaps: deque[tuple[float, float, int]] = deque()  # (when, sum of seconds, how many)

    def tokens(self, gaps: Sequence[float]) -> None:
        """One step brought tokens, so many seconds after their requests' last ones."""
        if gaps:
            self._gaps.append((self._clock(), sum(gaps), len(gaps)))
            self._forget()

    def token_ms(self) -> float:
        """Mean time between a request's tokens over the last seconds; 0 before any. The newest step counts however old
        it is: a server that stands still is not idle."""
        self._forget()
        gaps = tuple(self._gaps)  # steps go on meanwhile
        count = sum(count for _, _, count in gaps)
        return 1000 * sum(seconds for _, seconds, _ in gaps) / count if count else 0.0

    def refresh(self) -> bool:
        """Whether the server is under load now."""
        waiting, writing = self._requests()
        if not waiting and not writing:
            self._gaps.clear()
        pairs = [(waiting, self.limits.waiting), (self.token_ms(), self.limits.token_ms)]
        limited = [(value, limit) for value, limit in pairs if limit is not None]
        if self.is_high:
            self.is_high = any(value > limit * RELEASE for value, limit in limited)
        else:
            self.is_high = any(value > limit for value, limit in limited)
        return self.is_high

    def choose(self, speedup: float, asked: bool) -> float:
        """The speed-up of a request that begins now: ``speedup``, or under load the operator's if that is faster.

        Args:
            speedup: what holds without load.
            asked: whether the request itself named it.
        """
        if not self.refresh() or (asked and not self.limits.everyone):
            return speedup
        return max(speedup, self.limits.speedup)

    def _forget(self) -> None:
        now = self._clock()
        while len(self._gaps) > 1 and self._gaps[0][0] < now - WINDOW:
            self._gaps.popleft()
