"""Decides which new requests get a faster schedule under load. Imports no vLLM.

One checkpoint serves every speed-up, so a server under load need not reject requests or load a smaller model: while
its limits are exceeded, *new* requests run fewer layers. Running requests keep their schedules.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Seconds over which the time per token is averaged.
WINDOW = 5.0
#: Load ends when both measures are at most this share of their limits, so that it does not flip back and forth.
RELEASE = 0.5


@dataclass(frozen=True)
class Limits:
    """The load policy that an operator sets.

    Attributes:
        speedup: what new requests get under load, unless theirs is higher.
        waiting: load begins when more requests than this wait for their first token; None: no limit.
        token_ms: load begins when the mean time between tokens exceeds this, in milliseconds; None: no limit.
    """

    speedup: float
    waiting: float | None = None
    token_ms: float | None = None


class Load:
    """Measures a server's load and chooses the speed-up of new requests.

    Args:
        limits: set by the operator.
        requests: returns how many requests wait for their first token now, and how many have it.
        clock: monotonic time in seconds.
    """

    def __init__(
        self, limits: Limits, requests: Callable[[], tuple[int, int]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits
        self.is_high = False
        self._requests = requests
        self._clock = clock
        self._gaps: deque[tuple[float, float, int]] = deque()  # (time, sum of seconds, number of gaps)

    def tokens(self, gaps: Sequence[float]) -> None:
        """Record one step: for each new token, the seconds since the previous token of its request."""
        if gaps:
            self._gaps.append((self._clock(), sum(gaps), len(gaps)))
            self._forget()

    def token_ms(self) -> float:
        """Return the mean time between tokens over ``WINDOW`` seconds, and at least the newest step; 0 before any."""
        self._forget()
        gaps = tuple(self._gaps)  # a copy: another thread may record steps meanwhile
        count = sum(count for _, _, count in gaps)
        return 1000 * sum(seconds for _, seconds, _ in gaps) / count if count else 0.0

    def refresh(self) -> bool:
        """Update and return whether the server is under load."""
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

    def choose(self, speedup: float) -> float:
        """Return the speed-up of a new request that named none: ``speedup``, or under load the operator's if higher."""
        return max(speedup, self.limits.speedup) if self.refresh() else speedup

    def _forget(self) -> None:
        now = self._clock()
        while len(self._gaps) > 1 and self._gaps[0][0] < now - WINDOW:
            self._gaps.popleft()
