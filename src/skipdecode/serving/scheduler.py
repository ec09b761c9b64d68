"""vLLM's scheduler, told when to let new requests in, and which rows may leave a step out.

``schedule()`` is vLLM's own: what it should not see in a step is out of its sight while it is called.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from .admission import Admission
from .configure import serving_of
from .requests import speedup_of
from .step_costs import StepCosts
from .turns import Turns

#: Below vLLM's own, so that it shows where and as theirs do.
logger = logging.getLogger("vllm.skipdecode.scheduler")

#: Steps between two looks at what they cost.
EVERY = 32


class SkipScheduler(Scheduler):
    """Holds waiting requests until a group can come in, and deep rows until their turn; keeps the time of steps."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        serving = serving_of(vllm_config)
        assert serving is not None
        self._pause_state: PauseState
        self.running: list[Request]
        self.skip_serving = serving
        self.share(serving.admit_together, serving.max_wait, serving.max_slowdown)
        #: Steps that left rows out.
        self.partial_steps = 0
        self._depths: set[int] = set()  # of the rows of the step at hand
        self._stuck = False  # waiting requests were offered free slots, and found no memory
        # When each step under way began, its depths, decode rows, prompt tokens, requests that had ended, and whether
        # rows are left out: such a step is shallower than others, which is no matter of rows.
        self._under_way: deque[tuple[float, set[int], int, int, int, bool]] = deque()
        self._ended = 0.0

    def share(self, admit_together: int | str, max_wait: float, max_slowdown: float) -> None:
        """Let requests share steps as these settings say, and forget what steps have taken so far."""
        self.costs = StepCosts() if admit_together == "auto" else None
        together = 1 if isinstance(admit_together, str) else min(admit_together, self.max_num_running_reqs)
        self.admission = Admission(together, max_wait)
        self.turns = Turns(max_slowdown) if max_slowdown > 1 else None
        self._steps = 0
        self._ends = 0  # of requests, since a step was counted

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, of the rows and with the new requests whose turn it is."""
        began, before = time.monotonic(), self.partial_steps
        if self._pause_state == PauseState.UNPAUSED:
            output = self._schedule(began, args, kwargs)
        else:
            self._depths = set()
            output = super().schedule(*args, **kwargs)
        rows = prompt_tokens = 0
        for name, count in output.num_scheduled_tokens.items():
            request = self.requests[name]  # with the step's tokens counted as computed
            if count == 1 and request.num_computed_tokens > request.num_prompt_tokens:
                rows += 1
            else:
                prompt_tokens += count
        partial = self.partial_steps > before
        self._under_way.append((began, self._depths, rows, prompt_tokens, len(output.finished_req_ids), partial))
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; the oldest step under way has ended."""
        now = time.monotonic()
        began, depths, rows, prompt_tokens, ended, partial = self._under_way.popleft()
        seconds = now - max(began, self._ended)  # where steps overlap, one begins when the other ends
        self._ended = now
        if self.turns is not None and rows + prompt_tokens:
            self.turns.ran(depths, None if prompt_tokens else seconds, now)
        self._ends += ended
        if self.costs is not None and rows + prompt_tokens and not partial:
            self.costs.add(seconds, rows, prompt_tokens, self._ends)
            self._ends = 0
            self._steps += 1
            if self._steps % EVERY == 0:
                self._choose_group(self.costs)
        return super().update_from_output(*args, **kwargs)

    def _choose_group(self, costs: StepCosts) -> None:
        chosen = costs.group(self.max_num_running_reqs, self.admission.together)
        if chosen != self.admission.together:
            before, self.admission.together = self.admission.together, chosen
            logger.info("skipdecode: new requests are let in by groups of %d, no longer %d: %s", chosen, before, costs)

    def _schedule(self, now: float, args: Any, kwargs: Any) -> Any:
        if self.finished_req_ids:
            self._stuck = False
        held = self._holds(now)
        found, rows = self.running, self._rows(held, now)
        partial = len(rows) < len(found)
        if not held and not partial:
            output = super().schedule(*args, **kwargs)
            entered = output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids
            self._stuck = bool(self.waiting) and not entered
            return output
        self._pause_state = PauseState.PAUSED_NEW  # set_pause_state would log each step
        if partial:
            self.partial_steps += 1
            self.running = rows
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self._pause_state = PauseState.UNPAUSED  # or the waiting ones would not count as unfinished
            if partial:  # in their order, which says whom vLLM preempts first
                self.running = [request for request in found if request.status == RequestStatus.RUNNING]

    def _holds(self, now: float) -> bool:
        """Whether the waiting requests stay where they are, to come in as a group."""
        if self.waiting and self.waiting.peek_request().status == RequestStatus.PREEMPTED:
            return False  # it has begun already
        free = self.max_num_running_reqs - len(self.running)
        return self.admission.holds(free, len(self.waiting), now)

    def _rows(self, held: bool, now: float) -> list[Request]:
        """The running requests that are in the next step."""
        self._depths = set()
        if self.turns is None or not self.running:
            return self.running
        depths = [self._depth(request) for request in self.running]
        free = self.max_num_running_reqs - len(self.running)
        enters = bool(self.waiting) and free > 0 and not held and not self._stuck
        # A prompt mostly runs as deep as any row: then nobody gains by leaving its steps out.
        prompt = enters or any(request.is_prefill_chunk for request in self.running)
        depth = max(depths) if prompt or self.kv_holding_waiting else self.turns.depth(set(depths), now)
        rows = [request for request, its in zip(self.running, depths, strict=True) if its <= depth]
        # Each row may need one more block for its token. Where blocks are short vLLM preempts, and has to see all rows.
        blocks = len(rows) * len(self.kv_cache_manager.coordinator.single_type_managers)
        if len(rows) < len(self.running) and blocks > self.kv_cache_manager.block_pool.get_num_free_blocks():
            rows, depth = self.running, max(depths)
        self._depths = {its for its in depths if its <= depth}
        return rows

    def _depth(self, request: Request) -> int:
        """The most layers that a row of the request's schedule runs."""
        return self.skip_serving.schedule(speedup_of(request.sampling_params)).max_depth
