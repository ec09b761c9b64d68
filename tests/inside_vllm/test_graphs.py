"""CUDA graphs of steps that skip. On a CPU the model is called again where a GPU replays a graph.

Which graph a step takes, the layers at its capture, and what is counted are the plugin's, and tested so. On a GPU the
graphs are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm-v2")

from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager, ModelCudaGraphManager

from helpers.engine import Reference, Request, check_layers, engine, runner, serve
from helpers.interpreted import GPU, V2

pytestmark = pytest.mark.skipif(not V2, reason="model runner V2's: make test-vllm-v2")

SPEEDUPS = (1.0, 3.0, 5.0)
LINES = (
    "name Zizzi, food English",
    "name Aromi, area riverside",
    "name Strada",
    "name Cotto, price range cheap, near Ranch",
)


@dataclass
class Graph:
    """What a graph holds: the layers and the number of tokens of its capture."""

    runner: Any
    layer_set: int
    tokens: int

    def replay(self) -> None:
        """Run these layers on what lies in the runner's buffers now."""
        ours, buffers = self.runner, self.runner.input_buffers
        ours.skip_step = ours.skip_tables.uniform_step(self.layer_set, self.tokens)
        metadata, slots = ours.prepared_attention
        with set_forward_context(metadata, ours.vllm_config, num_tokens=self.tokens, slot_mapping=slots):
            hidden = ours.model(
                input_ids=buffers.input_ids[: self.tokens],
                positions=buffers.positions[: self.tokens],
                inputs_embeds=None,
                intermediate_tensors=None,
            )
        ours.cudagraph_manager.hidden_states[: self.tokens] = hidden


@pytest.fixture(scope="module")
def made() -> Iterator[Any]:
    """An engine with graphs for each layer set."""
    if GPU:
        with engine(max_num_seqs=4, max_num_batched_tokens=256, enforce_eager=False) as made:
            yield made
        return
    with engine(max_num_seqs=4, max_num_batched_tokens=256) as made, pytest.MonkeyPatch.context() as patch:
        ours = runner(made)
        patch.setattr(type(current_platform), "get_global_graph_pool", lambda self: None, raising=False)
        patch.setattr(CudaGraphManager, "capture", capture)
        config = ours.vllm_config.compilation_config
        config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = [1, 2, 4], 4
        manager = ModelCudaGraphManager(
            ours.vllm_config, ours.device, CUDAGraphMode.FULL_DECODE_ONLY, 1, ours.lora_capture_cases
        )
        manager.runner = ours
        ours.cudagraph_manager = manager
        ours.patch_graphs()
        keep_attention(ours, patch)
        inputs = ours.model, ours.model_state, ours.input_buffers, None
        manager.capture(*inputs, ours.block_tables, ours.attn_groups, ours.kv_cache_config)
        yield made


def capture(self: Any, create: Callable[..., Callable[[Any], None]], progress_bar_desc: str = "") -> None:
    """vLLM's, with :class:`Graph` for a CUDA graph."""
    for desc in self._capture_descs[CUDAGraphMode.FULL]:
        create(desc, warmup=True)(CUDAGraphMode.NONE)
        create(desc, warmup=False)(CUDAGraphMode.NONE)
        self.graphs[desc] = Graph(self.runner, desc.num_active_loras, desc.num_tokens)
    self._graphs_captured = True


def keep_attention(ours: Any, patch: pytest.MonkeyPatch) -> None:
    """Keep what attention is given in a step: on a GPU it lies in buffers that graphs read."""
    prepare = ours.model_state.prepare_attn

    def keep(batch: Any, mode: Any, tables: Any, slots: Any, groups: Any, config: Any, **kwargs: Any) -> Any:
        made = prepare(batch, mode, tables, slots, groups, config, **kwargs)
        ours.prepared_attention = made, build_slot_mappings_by_layer(slots, config)
        return made

    patch.setattr(ours.model_state, "prepare_attn", keep)


def test_texts_are_those_of_generate(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows of one speed, which graphs write, and of several, which they do not; with prompts between them."""
    manager = runner(made).cudagraph_manager
    replay = manager.run_fullgraph
    replayed = []

    def counted(graph: Any) -> Any:
        replayed.append(graph.num_active_loras)
        return replay(graph)

    monkeypatch.setattr(manager, "run_fullgraph", counted)
    reference = Reference()
    ids = [tuple(reference.tokenizer(f"{line} ->")["input_ids"]) for line in LINES]
    uniform = [Request(prompt, speedup, 12) for speedup in SPEEDUPS for prompt in ids[:3]]
    mixed = [Request(prompt, speedup, 8) for prompt, speedup in zip(ids, (1.0, 5.0, 3.0, 5.0), strict=True)]
    for requests in (uniform[:3], uniform[3:6], uniform[6:], mixed):
        assert serve(made, requests, arrive=lambda step: 1 + step % 2).texts() == reference.texts(requests)
    check_layers(made)
    assert len({*replayed}) > 3  # full depth's, and those of the depths between which speeds fall


def test_a_graph_of_other_layers_is_an_error(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If vLLM took another graph than it was told to: nothing is written."""
    manager = runner(made).cudagraph_manager
    full = next(desc for desc in manager.graphs if desc.num_active_loras == 0 and desc.num_tokens == 1)

    def dispatch(requests: int, tokens: int, *_: Any, **__: Any) -> BatchExecutionDescriptor:
        return full if tokens == 1 else BatchExecutionDescriptor(CUDAGraphMode.NONE, tokens, requests)

    monkeypatch.setattr(manager, "dispatch", dispatch)
    with pytest.raises(AssertionError, match="a graph of other layers"):
        serve(made, [Request((5, 6, 7), 5.0, 4)])
