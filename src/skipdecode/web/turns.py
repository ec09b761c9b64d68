"""Let one model write several texts in turn, so that each one's clock runs only while it computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterable


class Turns:
    """Turns of threads that share a model: the next is always the one whose clock has run least.

    So all clocks go on alike, as if each thread had the machine alone, and a faster one gets more done.

    Args:
        threads: a key for each. All must come: none goes on before the first has begun.
        machine: held during a turn; shared with other ``Turns`` on the same machine.

    Attributes:
        seconds: how long each thread has computed.
    """

    def __init__(self, threads: Iterable[Hashable], machine: threading.Lock) -> None:
        self.seconds = dict.fromkeys(threads, 0.0)
        self._live = list(self.seconds)
        self._machine = machine
        self._changed = threading.Condition()
        self._since = 0.0

    def begin(self, thread: Hashable) -> None:
        """Wait for the thread's turn."""
        with self._changed:
            self._changed.wait_for(lambda: min(self._live, key=self.seconds.__getitem__) == thread)
        self._machine.acquire()
        self._since = time.perf_counter()

    def end(self, thread: Hashable, *, last: bool = False) -> None:
        """End the thread's turn; after its ``last`` one, the others no longer wait for it."""
        took = time.perf_counter() - self._since
        self._machine.release()
        with self._changed:
            self.seconds[thread] += took
            if last:
                self._live.remove(thread)
            self._changed.notify_all()
