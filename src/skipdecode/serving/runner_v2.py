"""Adapts vLLM's model runner V2: reads its prepared inputs where it passes them to its model state.

The runner calls the model, or replays a CUDA graph of it, so the plan starts in the model's ``forward``. A replayed
graph would ignore depths without calling ``forward``: that is an error (configure.py turns graphs off).
"""

from __future__ import annotations

from typing import Any

import torch

from .depths import Table
from .narrow import Prepared
from .patch import patch
from .requests import speedup_of
from .runner import Skipping


class SkippingV2(Skipping):
    """The adapter for runners with interface V2."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model with gates, and hook the model state to learn of requests and steps."""
        super().load_model(*args, **kwargs)
        self.skip_requests: dict[str, Table] = {}
        self.skip_batch: tuple[Any, Any] | None = None  # (batch, block tables) of the step that the model runs next
        state = self.model_state
        patch(state, "add_request", self._add_table)
        patch(state, "remove_request", self._remove_table)
        patch(state, "preprocess_state", self._keep)  # dry runs do not call it
        patch(self.model, "forward", self._planned_forward)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step. Raises RuntimeError if it did not call the model's ``forward``, which follows the plan."""
        output = super().execute_model(*args, **kwargs)
        if self.skip_batch is not None:
            raise RuntimeError("the step did not call the model: depths need --compilation-config.cudagraph_mode=NONE")
        return output

    def _add_table(self, original: Any, index: int, request: Any) -> None:
        original(index, request)
        self.skip_requests[request.req_id] = self.skip_tables.of(speedup_of(request.sampling_params))

    def _remove_table(self, original: Any, name: str) -> None:
        original(name)
        self.skip_requests.pop(name, None)

    def _keep(self, original: Any, batch: Any, block_tables: Any, *args: Any) -> Any:
        self.skip_batch = batch, block_tables
        return original(batch, block_tables, *args)

    def _planned_forward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self.skip_batch is None:
            return original(*args, **kwargs)
        (batch, block_tables), self.skip_batch = self.skip_batch, None
        tables = [self.skip_requests[name] for name in batch.req_ids]
        prompts = self.req_states.prompt_len.np[batch.idx_mapping_np]
        requests = batch.num_scheduled_tokens, batch.num_computed_tokens_np, prompts
        with self.following(tables, requests, batch.positions, lambda: self._prepared(batch, block_tables)):
            return original(*args, **kwargs)

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
