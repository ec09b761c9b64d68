"""vLLM's scheduler, letting new requests in by groups: fewer steps carry prompts, for whose layers all rows wait.

Pays where a step costs the layers that any of its rows runs (weights bind: GPUs and AMX at small batch), not where
rows cost. Off unless ``admit_together`` asks for it.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from .configure import serving_of


class GroupScheduler(Scheduler):
    """Holds waiting requests until as many slots are free as a group has, or one has waited for too long."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._pause_state: PauseState
        self.skip_serving = serving_of(vllm_config)
        #: Steps that held requests back.
        self.held_steps = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, with the waiting ones out of its sight while they are held."""
        if self._pause_state != PauseState.UNPAUSED or not self._hold():
            return super().schedule(*args, **kwargs)
        self.held_steps += 1
        self._pause_state = PauseState.PAUSED_NEW  # set_pause_state would log each step
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self._pause_state = PauseState.UNPAUSED  # or the waiting ones would not count as unfinished

    def _hold(self) -> bool:
        serving = self.skip_serving
        if serving is None or serving.admit_together < 2 or not self.waiting or not self.running:
            return False
        free = self.max_num_running_reqs - len(self.running)
        if free >= min(serving.admit_together, len(self.waiting)):
            return False
        return time.time() - self.waiting.peek_request().arrival_time < serving.max_wait
