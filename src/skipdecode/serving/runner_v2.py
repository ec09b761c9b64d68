"""vLLM's model runner V2, adapted: what it has prepared for a step, read where its model state hears of it.

The runner calls the model by itself, or replays a CUDA graph of it. So the plan begins where the model's ``forward``
is called; a graph, which knows no depths, would not call it, and is an error (configure.py turns them off).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from .depths import Table
from .narrow import Prepared
from .requests import speedup_of
from .runner import Skipping


class SkippingV2(Skipping):
    """Stands before a runner of interface V2."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As of both runners; then the model state tells us of requests and of steps."""
        super().load_model(*args, **kwargs)
        self.skip_requests: dict[str, Table] = {}
        self.skip_batch: tuple[Any, Any] | None = None  # of the step that the model is to run next
        state = self.model_state
        state.add_request = _then(state.add_request, self._add_table)
        state.remove_request = _then(state.remove_request, self._remove_table)
        state.preprocess_state = _then(state.preprocess_state, self._keep)  # of requests' steps; not of dry runs
        self.model.forward = self._planned_forward(self.model.forward)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's. Raises RuntimeError if the step was run by something that does not know its plan."""
        output = super().execute_model(*args, **kwargs)
        if self.skip_batch is not None:
            raise RuntimeError("the step did not call the model: depths need --compilation-config.cudagraph_mode=NONE")
        return output

    def _add_table(self, index: int, request: Any) -> None:
        self.skip_requests[request.req_id] = self.skip_tables.of(speedup_of(request.sampling_params))

    def _remove_table(self, name: str) -> None:
        self.skip_requests.pop(name, None)

    def _keep(self, batch: Any, block_tables: Any, *_: Any) -> None:
        self.skip_batch = batch, block_tables

    def _planned_forward(self, original: Any) -> Any:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.skip_batch is None:
                return original(*args, **kwargs)
            (batch, block_tables), self.skip_batch = self.skip_batch, None
            step = self.planned(
                [self.skip_requests[name] for name in batch.req_ids],
                batch.num_scheduled_tokens.astype(np.int64),
                batch.num_computed_tokens_np.astype(np.int64),
                self.req_states.prompt_len.np[batch.idx_mapping_np].astype(np.int64),
                batch.positions,
            )
            with self.following(step, lambda: self._prepared(batch, block_tables)):
                return original(*args, **kwargs)

        return forward

    def _prepared(self, batch: Any, block_tables: Any) -> Prepared:
        count = batch.num_reqs
        return Prepared(
            groups=self.attn_groups,
            block_table=lambda place: block_tables[place][:count],
            lengths=batch.seq_lens[:count],
            lengths_cpu=batch.seq_lens_cpu_upper_bound[:count],
            prefilling=torch.from_numpy(batch.is_prefilling_np),
            positions=batch.positions,
        )


def _then(original: Any, then: Any) -> Any:
    @functools.wraps(original)
    def both(*args: Any) -> Any:
        output = original(*args)
        then(*args)
        return output

    return both
