"""Which rows step, where requests of several depths run at once: the decision alone, without vLLM.

A step that holds a deep row runs its layers; where weights bind, shallow rows wait for them and deep rows gain nothing
by it. So shallow rows are in every step (in a deep one they cost nothing), and deep rows leave some steps out: as many
as keep their time per token within a limit. Stretch, or slowdown, is the scheduling literature's name for that limit.
"""

from __future__ import annotations

from collections.abc import Collection

#: How much the newest step counts in the mean of its kind.
NEWEST = 0.2


class Turns:
    """Takes turns between depths.

    Args:
        max_slowdown: a row gets its next token after so many times the seconds of a step as deep as it, at most, and
            one shallower step. 1: all rows are in every step.
    """

    def __init__(self, max_slowdown: float) -> None:
        self.max_slowdown = max_slowdown
        self._seconds: dict[int, float] = {}
        self._last: dict[int, float] = {}

    def depth(self, depths: Collection[int], now: float) -> int:
        """The depth of the next step: the deepest whose rows have waited for long enough, or the shallowest.

        Args:
            depths: of all rows, at least one.
            now: seconds, on a clock that only grows.
        """
        return max((depth for depth in depths if self._is_due(depth, now)), default=min(depths))

    def _is_due(self, depth: int, now: float) -> bool:
        if depth not in self._seconds or depth not in self._last:
            return True
        return now - self._last[depth] >= (self.max_slowdown - 1) * self._seconds[depth]

    def ran(self, depths: Collection[int], seconds: float | None, now: float) -> None:
        """A step ended.

        Args:
            depths: of its rows.
            seconds: that it took; None where it held more than these rows, so that its time says nothing of them.
            now: as for :meth:`depth`.
        """
        for depth in depths:
            self._last[depth] = now
        if depths and seconds is not None:
            before = self._seconds.get(max(depths), seconds)
            self._seconds[max(depths)] = before + NEWEST * (seconds - before)
