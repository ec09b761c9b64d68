"""Adapts vLLM's model runner V1: reads its prepared inputs where it calls the model."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.forward_context import get_forward_context

from .attention import Prepared
from .requests import speedup_of
from .runner import Skipping


class SkippingV1(Skipping):
    """The adapter for runners with interface V1."""

    def _model_forward(self, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not get_forward_context().attn_metadata:  # a dry run, for memory or compilation, runs all layers
            return super()._model_forward(input_ids, positions, *args, **kwargs)
        batch = self.input_batch
        count = batch.num_reqs
        tables = [self.skip_tables.of(speedup_of(self.requests[name].sampling_params)) for name in batch.req_ids]
        counts = np.diff(self.query_start_loc.np[: count + 1])
        computed, prompts = batch.num_computed_tokens_cpu[:count], batch.num_prompt_tokens[:count]
        step = self.skip_tables.step(tables, counts, computed, prompts)
        with self.following(step, positions, self._prepared):
            return super()._model_forward(input_ids, positions, *args, **kwargs)

    def dry_run(self, tokens: int) -> None:
        """Run the model on as many tokens of no text."""
        self._dummy_run(tokens)

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        """Sample as vLLM does, but without the random generators of requests whose prompt is not complete.

        vLLM discards such a request's sample and rewinds its generator. CPU generators cannot rewind: vLLM would crash.
        """
        generators = self.input_batch.generators
        thrown_away = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs]).tolist()
        self.skip_generators = {row: generators.pop(row) for row in thrown_away if row in generators}
        return super()._sample(*args, **kwargs)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Run vLLM's bookkeeping, then give the requests their generators back."""
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators.update(self.skip_generators)

    def _prepared(self) -> Prepared:
        batch = self.input_batch
        count = batch.num_reqs
        return Prepared(
            groups=self.attn_groups,
            block_table=lambda place: batch.block_table[place].get_device_tensor(count),
            lengths=self.seq_lens[:count],
            lengths_cpu=self.optimistic_seq_lens_cpu[:count],
            prefilling=batch.num_computed_tokens_cpu_tensor[:count] < batch.num_prompt_tokens_cpu_tensor[:count],
            positions=self.positions,
        )
