"""Speed-ups of new requests under load. Imports no vLLM.

One checkpoint serves every speed-up, so a server under load need not reject requests: while a limit is exceeded, *new*
requests that name no speed-up run fewer layers. Running requests keep their schedules.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

#: Seconds over which the time per token is averaged.
WINDOW = 5.0
#: Load ends when both measures are at most this share of their limits, so that it does not flip back and forth.
RELEASE = 0.5


class Load:
    """Load of a server, and the speed-up of new requests under it.

    Args:
        requests: returns how many requests wait for their first token now, and how many have it.
        speedup: of new requests under load, unless theirs is higher.
        waiting: load begins when more requests than this wait for their first token; None: no limit.
        token_ms: load begins when the mean time between tokens exceeds this, in milliseconds; None: no limit.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        requests: Callable[[], tuple[int, int]],
        speedup: float,
        waiting: float | None = None,
        token_ms: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_high = False
        self._requests = requests
        self._speedup = speedup
        self._limits = (waiting, token_ms)
        self._clock = clock
        self._steps: deque[tuple[float, float, int]] = deque()  # time, sum of seconds, number of tokens

    def record(self, seconds: Sequence[float]) -> None:
        """Record one step: for each new token, the seconds since the previous token of its request."""
        if not seconds:
            return
        now = self._clock()
        steps = self._steps  # another thread may put a new one in its place
        steps.append((now, sum(seconds), len(seconds)))
        while steps[0][0] < now - WINDOW:
            steps.popleft()

    def token_ms(self) -> float:
        """Mean milliseconds between tokens over the ``WINDOW`` seconds before the newest; 0 before any."""
        steps = tuple(self._steps)  # a copy: another thread may record steps meanwhile
        count = sum(tokens for _, _, tokens in steps)
        return 1000 * sum(seconds for _, seconds, _ in steps) / count if count else 0.0

    def refresh(self) -> bool:
        """Update and return whether the server is under load."""
        waiting, running = self._requests()
        if not waiting and not running:
            self._steps = deque()
        share = RELEASE if self.is_high else 1.0
        measured = zip((waiting, self.token_ms()), self._limits, strict=True)
        self.is_high = any(limit is not None and value > limit * share for value, limit in measured)
        return self.is_high

    def choose(self, speedup: float) -> float:
        """Speed-up of a request that named none: ``speedup``, or under load the policy's if higher."""
        return max(speedup, self._speedup) if self.refresh() else speedup
