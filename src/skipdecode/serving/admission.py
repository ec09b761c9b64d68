"""When waiting requests are let in: by groups, none held for longer than a limit. The decision alone, without vLLM."""

from __future__ import annotations


class Admission:
    """A gate before free slots.

    It closes where a whole group waits and fewer slots are free; opens when they are enough, when fewer wait than a
    group has (then it is not slots that are short), or after ``max_wait`` seconds; and stays open until every slot is
    taken or nobody waits any more.

    Args:
        together: requests of a group; may be changed at any time.
        max_wait: seconds that a slot stays free, at most, while somebody waits.
    """

    def __init__(self, together: int, max_wait: float) -> None:
        self.together = together
        self.max_wait = max_wait
        #: Steps that held requests back.
        self.held_steps = 0
        self._closed_since: float | None = None
        self._open = False

    def holds(self, free: int, waiting: int, now: float) -> bool:
        """Whether nobody is let in now.

        Args:
            free: slots.
            waiting: requests.
            now: seconds, on a clock that only grows.
        """
        if free <= 0 or not waiting:
            self._open, self._closed_since = False, None
            return False
        if self._closed_since is None:
            self._closed_since = now
        waited = now - self._closed_since
        enough = free >= self.together or waiting < self.together
        self._open = self._open or enough or waited >= self.max_wait
        self.held_steps += not self._open
        return not self._open
