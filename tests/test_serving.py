"""What of serving needs no vLLM: which speed-ups a server offers, which tokens run which layers, what gates do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from skipdecode import Schedule
from skipdecode.errors import ScheduleError, UnsupportedModel
from skipdecode.model.adapter import Adapter
from skipdecode.serving.configure import choose_worker, serving_of
from skipdecode.serving.gate import add_gates, cut
from skipdecode.serving.release import require_tested
from skipdecode.serving.requests import assign_speedup, block_keys, ends_of, speedup_of
from skipdecode.serving.settings import Serving
from skipdecode.serving.steps import Part, Step, Tables

LAYERS = 8
SCHEDULES = {
    1.0: Schedule.full(LAYERS),
    2.0: Schedule(LAYERS, 6, 2, horizon=9),
    3.0: Schedule(LAYERS, 3, 2, horizon=4, prompt_decay=3, order="bottom"),
    4.0: Schedule(LAYERS, 2, 2, horizon=1, decay="constant", prompt_layers="max", order=(3, 1, 0, 2, 4, 5, 6, 7)),
}


class Config(SimpleNamespace):
    """A model's config, as far as schedules ask."""

    def get_text_config(self, decoder: bool = False) -> Config:
        """Itself: no multimodal parts."""
        return self


def config(**entry: Any) -> Config:
    """A config of eight layers with this entry."""
    return Config(num_hidden_layers=LAYERS, skipdecode=entry or None)


REQUEST = st.tuples(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 12), st.integers(0, 30), st.integers(1, 14))


def plan(requests: list[tuple[float, int, int, int]], adapter: Adapter | None = None) -> Step:
    """The step of requests (speed-up, prompt length, tokens before, tokens in the step)."""
    speedups, prompts, computed, counts = zip(*requests, strict=True)
    arrays = [np.array(values, dtype=np.int64) for values in (counts, computed, prompts)]
    tables = Tables(SCHEDULES, adapter)
    return tables.step([tables.of(speedup) for speedup in speedups], *arrays)


@given(st.lists(REQUEST, min_size=1, max_size=6))
def test_a_tokens_layers_depend_on_its_place_alone(requests: list[tuple[float, int, int, int]]) -> None:
    """Whatever else is in the step and wherever chunks begin, layers are those of the schedule."""
    step = plan(requests)
    at = 0
    for speedup, prompt, computed, count in requests:
        counts = SCHEDULES[speedup].positions_per_layer(prompt, computed + count)
        for position in range(computed, computed + count):
            assert step.runs[at].tolist() == [position < inside for inside in counts]
            at += 1
    assert at == step.tokens


@given(st.lists(REQUEST, min_size=1, max_size=6))
def test_a_part_is_a_prefix_of_each_request(requests: list[tuple[float, int, int, int]]) -> None:
    """So attention over a part ends ``dropped`` tokens earlier, and nothing in the middle is missing."""
    step = plan(requests)
    for layer in range(LAYERS):
        part = step.part(layer)
        assert part.tokens.tolist() == np.flatnonzero(step.runs[:, layer]).tolist()
        ranges = [step.starts[r] + np.arange(n) for r, n in zip(part.requests, part.counts, strict=True)]
        assert part.tokens.tolist() == (np.concatenate(ranges).tolist() if ranges else [])
        whole = np.diff(step.starts)[part.requests]
        assert (part.counts + part.dropped).tolist() == whole.tolist()


def test_layers_of_the_same_tokens_share_their_part() -> None:
    """Attention's metadata is made once for all of them."""
    step = plan([(2.0, 3, 20, 1), (1.0, 3, 20, 1)])
    partial = [layer for layer in range(LAYERS) if 0 < step.counts[layer] < step.tokens]
    assert len(partial) > 1
    assert len({id(step.part(layer)) for layer in partial}) == 1


@given(st.lists(REQUEST, min_size=1, max_size=4), st.booleans())
def test_graphs_are_kept_for_steps_whose_tokens_run_the_same_layers(
    requests: list[tuple[float, int, int, int]], decoding: bool
) -> None:
    """A step of a kind runs that kind's layers; a decode step whose rows run the same layers is of a kind."""
    if decoding:
        requests = [(speedup, prompt, prompt + computed, 1) for speedup, prompt, computed, _ in requests]
    step = plan(requests)
    if step.kind is not None:
        assert (Tables(SCHEDULES).alike(step.kind, step.tokens).runs == step.runs).all()
    assert (step.kind == 0) == step.is_full
    if decoding:
        assert (step.kind is not None) == (step.runs == step.runs[0]).all()


class Native(nn.Module):
    """A layer as vLLM's own: positions first, a residual beside the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add, then transform."""
        assert len(positions) == len(hidden_states)
        residual = hidden_states if residual is None else hidden_states + residual
        return torch.tanh(self.mix(residual)) * positions[:, None], residual


class Adding(nn.Module):
    """Native too, but adds by itself and hands no residual on: MiniCPM, Gemma 4."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Transform, then add."""
        return hidden_states + torch.tanh(self.mix(hidden_states)) * positions[:, None], None


class Naming(Adding):
    """Native too: hands its input on as a residual that nothing adds: Cohere, Exaone 4, PhiMoE."""

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Transform, then add."""
        return super().forward(positions, hidden_states, None)[0], hidden_states


class Plain(nn.Module):
    """A layer of the Transformers backend: hidden states with a batch of one, rotations by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
        """Rotate, transform, add."""
        cos, sin = position_embeddings
        assert cos.shape[1] == ids.shape[1] == hidden_states.shape[1]
        return hidden_states + torch.tanh(self.mix(hidden_states * cos + sin)) * ids[..., None]


def native(model: nn.ModuleList, tokens: int) -> Tensor:
    """A pass as vLLM's models make one."""
    hidden, residual = torch.arange(tokens * 4.0).reshape(tokens, 4).sin(), None
    for layer in model:
        hidden, residual = layer.forward(torch.arange(1, tokens + 1), hidden, residual)
    return hidden + residual  # type: ignore[operator]


def adding(model: nn.ModuleList, tokens: int) -> Tensor:
    """A pass as those of vLLM's models make one whose layers add by themselves."""
    hidden, residual = torch.arange(tokens * 4.0).reshape(tokens, 4).sin(), None
    for layer in model:
        hidden, residual = layer.forward(torch.arange(1, tokens + 1), hidden, residual)
    return hidden


def plain(model: nn.ModuleList, tokens: int) -> Tensor:
    """A pass as the Transformers backend makes one."""
    hidden = torch.arange(tokens * 4.0).reshape(1, tokens, 4).sin()
    rotations = torch.full((1, tokens, 4), 0.5), torch.linspace(0, 1, tokens)[None, :, None].expand(1, tokens, 4)
    for layer in model:
        hidden = layer.forward(hidden, position_embeddings=rotations, ids=torch.arange(1, tokens + 1)[None])
    return hidden[0]


class Changing(nn.Module):
    """What an adapter changes before a layer, as if it were a layer of the same kind itself."""

    def __init__(self, change: nn.Module, kind: type[nn.Module]) -> None:
        super().__init__()
        self.change, self.kind = change, kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Change the hidden states, and pass them on as the layer would."""
        if self.kind is Plain:
            return self.change(args[0])
        _, hidden, residual = args
        if self.kind is not Native:
            return self.change(hidden), residual
        return self.change(hidden if residual is None else hidden + residual), torch.zeros_like(hidden)


@contextmanager
def nothing(part: Part) -> Iterator[Tensor]:
    """Layers without attention: nothing to narrow."""
    yield torch.from_numpy(part.tokens)


@pytest.mark.parametrize(("layer", "run"), [(Native, native), (Plain, plain), (Adding, adding), (Naming, adding)])
def test_each_token_passes_its_own_layers(layer: type[nn.Module], run: Any) -> None:
    """Rows of a step are those of a model that has each token's layers alone; a layer that none needs is not called."""
    step = plan([(2.0, 3, 0, 5), (1.0, 2, 9, 1), (4.0, 5, 3, 4), (3.0, 4, 2, 6)])
    layers = nn.ModuleList(layer() for _ in range(LAYERS))
    stock = [run(nn.ModuleList(layers[i] for i in np.flatnonzero(row).tolist()), step.tokens) for row in step.runs]
    gates = add_gates(nn.ModuleDict({"layers": layers}), LAYERS)
    full = run(layers, step.tokens)
    with gates.following(step, nothing):
        found = run(layers, step.tokens)
    for token, expected in enumerate(stock):
        torch.testing.assert_close(found[token], expected[token])
    torch.testing.assert_close(run(layers, step.tokens), full)
    assert gates.run_tokens == gates.needed_tokens == step.runs.sum() < gates.full_tokens


@pytest.mark.parametrize(
    "requests", [[(2.0, 3, 0, 5), (1.0, 2, 9, 1), (4.0, 5, 3, 4), (3.0, 4, 2, 6)], [(4.0, 3, 9, 1)]]
)
@pytest.mark.parametrize(("layer", "run"), [(Native, native), (Plain, plain), (Adding, adding), (Naming, adding)])
def test_each_token_gets_its_own_changes(layer: type[nn.Module], run: Any, requests: Any) -> None:
    """With an adapter, a token's row is what its layers and what the adapter has for them make of it, one by one."""
    adapter = Adapter(4, 3, SCHEDULES)
    generator = torch.Generator().manual_seed(0)
    for weight in adapter.parameters():
        nn.init.normal_(weight, std=0.5, generator=generator)
    step = plan(requests, adapter)
    layers = nn.ModuleList(layer() for _ in range(LAYERS))
    expected = []
    for token, row in enumerate(step.runs):
        running = tuple(np.flatnonzero(row).tolist())
        changes = adapter.changes(running)
        one: list[nn.Module] = []
        for index, each in enumerate(layers):
            one += [Changing(changes[index], layer)] if index in changes else []
            one += [each] if index in running else []
        expected.append(run(nn.ModuleList(one), step.tokens)[token])
    gates = add_gates(nn.ModuleDict({"layers": layers}), LAYERS)
    gates.adds_residual = layer is Native
    with torch.no_grad(), gates.following(step, nothing):
        found = run(layers, step.tokens)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_layers_that_are_called_past_their_gates_are_noticed() -> None:
    """As in a compiled graph, which holds the depth at which it was traced."""
    step = plan([(2.0, 3, 30, 1), (4.0, 3, 30, 1)])
    layers = nn.ModuleList(Native() for _ in range(LAYERS))
    gates = add_gates(nn.ModuleDict({"layers": layers}), LAYERS)
    with gates.following(step, nothing):
        native(layers, step.tokens)
    with pytest.raises(RuntimeError, match="layers past them"), gates.following(step, nothing):
        pass


def test_a_layer_that_no_token_needs_is_not_called() -> None:
    """That is where the time goes."""
    step = plan([(2.0, 3, 30, 1), (4.0, 3, 30, 1)])
    layers = nn.ModuleList(Native() for _ in range(LAYERS))
    called: list[int] = []
    for index, layer in enumerate(layers):
        cast(Native, layer).mix.register_forward_hook(lambda *_, index=index: called.append(index))
    gates = add_gates(nn.ModuleDict({"layers": layers}), LAYERS)
    with gates.following(step, nothing):
        native(layers, step.tokens)
    assert called == [layer for layer in range(LAYERS) if step.counts[layer]]
    assert len(called) < LAYERS


def test_two_stacks_are_refused() -> None:
    """Which of them to skip cannot be told."""
    stacks = {name: nn.ModuleList(Native() for _ in range(LAYERS)) for name in ("one", "two")}
    with pytest.raises(UnsupportedModel, match="one stack of 8 decoder layers; 2 were found"):
        add_gates(nn.ModuleDict(stacks), LAYERS)


def test_cut_takes_tokens_wherever_they_are() -> None:
    """Positions have them last, hidden states before the size; what has none stays."""

    def first_and_last(value: Any) -> Any:
        return cut(value, torch.tensor([0, 2]), 3)

    assert first_and_last(torch.arange(3)).tolist() == [0, 2]
    assert first_and_last(torch.arange(9).reshape(3, 3)).tolist() == [[0, 2], [3, 5], [6, 8]]
    assert first_and_last(torch.zeros(3, 7)).shape == (2, 7)
    assert first_and_last((torch.zeros(1, 3, 7), {"a": torch.zeros(5)}))[0].shape == (1, 2, 7)
    assert first_and_last({"a": torch.zeros(5), "b": None})["a"].shape == (5,)


# --- settings


def test_a_stock_model_is_left_alone() -> None:
    """Without schedules and without options the plugin does nothing."""
    assert serving_of(vllm_config(additional_config={})) is None
    assert serving_of(vllm_config()) is not None
    for name in ("skip_decode", "SkipDecode", "speedup"):
        with pytest.raises(UnsupportedModel, match=f"additional-config has {name}"):
            serving_of(vllm_config(additional_config={name: {"adapter": "fast"}}))


def test_a_server_of_a_stock_model_has_flat_schedules() -> None:
    """Rows of a server do not start together: a falling depth would cost nearly its greatest one."""
    serving = Serving(config(), {"speedup": 2})
    assert serving.default == 2
    assert serving.schedules[2.0].distinct_depths == (4,)
    assert serving.schedules[1.0].is_full
    assert list(serving.schedules) == [1, 2, 3, 5]
    assert Serving(config()).default == 1
    assert Serving(config(), {"speedups": [4, 2]}).default == 2


def test_stored_schedules_are_served_as_they_are() -> None:
    """And the fastest of them that is offered is the default, as for every other verb."""
    stored = {str(k): s.to_dict() for k, s in SCHEDULES.items()}
    serving = Serving(config(method="skipdecode", schedules=stored))
    assert serving.schedules == {speedup: each for speedup, each in SCHEDULES.items() if speedup > 1}
    assert serving.default == 4
    listed = Serving(config(method="skipdecode", schedules=stored), {"speedups": [*SCHEDULES]})
    assert listed.schedules == SCHEDULES  # full depth too, where it is asked for
    serving = Serving(config(method="skipdecode", schedules=stored), {"speedups": [1, 2, 2.5]})
    assert serving.default == 2
    assert serving.schedules[2.5].horizon == SCHEDULES[4.0].horizon
    shallow = Serving(config(method="skipdecode", schedules=stored), {"prompt_layers": "max"})
    assert shallow.schedules[2.0].deepest == 6


def test_a_slower_speed_than_those_stored_runs_prompts_as_deep_as_its_steps() -> None:
    """A number of layers that was stored for a fast schedule may be fewer than a slow one's first step runs."""
    stored = {"4.0": Schedule(LAYERS, 2, 2, horizon=1, decay="constant", prompt_layers=3).to_dict()}
    slow = Serving(config(method="skipdecode", schedules=stored), {"speedups": [1.25, 4]})
    assert (slow.schedules[4.0].deepest, slow.schedules[4.0].max_depth) == (3, 2)
    assert slow.schedules[1.25].deepest == slow.schedules[1.25].max_depth > 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_speedup": 2}, "unknown options of skipdecode: max_speedup; known are"),
        ({"speedup": 2, "speedups": [1, 3]}, "speedup must be one of 1, 3, not 2"),
        ({"speedup": 2, "speedups": [3]}, "speedup must be 3, not 2"),
        ({"speedups": []}, "speedups must be a list of numbers"),
        ({"speedups": 3}, "speedups must be a list of numbers"),
        ({"speedups": [1, 9]}, "speedup must be a number from 1 to 8, not 9"),
        ({"speedups": [1, True]}, "speedup must be a number from 1 to 8, not True"),
        ({"speedup": "3"}, "speedup must be a number from 1 to 8, not '3'"),
        ({"speedup": 2, "prompt_layers": 99}, "99"),
        ({"speedup": 2, "prompt_layers": 0}, "prompt_layers is 'max' or a number of layers, not '0'"),
        ({"speedup": 2, "prompt_layers": True}, "prompt_layers is"),
        ([2], "a JSON object, not"),
    ],
)
def test_bad_options_are_refused_at_the_start(options: dict[str, Any], message: str) -> None:
    """Before weights are loaded, not at the first request."""
    with pytest.raises(ScheduleError, match=message):
        Serving(config(), options)


# --- configs of vLLM


def vllm_config(**changes: Any) -> Any:
    """A config as vLLM's, as far as the plugin asks; changes by ``part__field``."""
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=config(),
            runner_type="generate",
            is_encoder_decoder=False,
            is_moe=False,
            uses_mrope=False,
            dtype=torch.bfloat16,
            head_dtype=torch.bfloat16,
        ),
        parallel_config=SimpleNamespace(
            worker_cls="vllm.v1.worker.cpu_worker.CPUWorker",
            pipeline_parallel_size=1,
            data_parallel_size=1,
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_dbo=False,
        ),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False, kv_offloading_size=None),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=False),
        compilation_config=SimpleNamespace(mode=None),
        additional_config={"skipdecode": {}},
        speculative_config=None,
        kv_transfer_config=None,
        lora_config=None,
        weight_transfer_config=None,
    )
    for name, value in changes.items():
        *parts, field = name.split("__")
        setattr(getattr(made, parts[0]) if parts else made, field, value)
    return made


def choose(made: Any) -> None:
    """Choose a worker, as the plugin does of a config for which it acts."""
    serving = serving_of(made)
    assert serving is not None
    choose_worker(made, serving)


def test_the_plugin_chooses_its_worker_twice_alike() -> None:
    """vLLM checks a config where it is made, and again where it is copied."""
    made = vllm_config()
    for _ in range(2):
        choose(made)
        assert made.parallel_config.worker_cls == "skipdecode.serving.cpu_worker.SkipCPUWorker"


@pytest.mark.parametrize(
    ("entry", "options", "dtype", "said"),
    [
        (None, {}, torch.float32, ["not trained to skip layers"]),
        (None, {"speedups": [1]}, torch.float32, []),
        (SCHEDULES[2.0], {}, torch.float32, []),
        (SCHEDULES[2.0], {}, torch.bfloat16, ["float32 and runs in bfloat16"]),
    ],
)
def test_what_an_operator_may_not_expect_is_said_once(
    entry: Schedule | None, options: dict[str, Any], dtype: Any, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """An untrained model, and a type that is not the checkpoint's."""
    stored: dict[str, Any] = {"method": "skipdecode", "schedules": {"2.0": entry.to_dict()}} if entry else {}
    its = config(**stored)
    its.dtype = torch.float32
    changes = {"model_config__hf_config": its, "model_config__dtype": dtype}
    made = vllm_config(additional_config={"skipdecode": options}, **changes)
    for _ in range(2):
        choose(made)
    assert len(caplog.messages) == len(said)
    assert all(text in line for text, line in zip(said, caplog.messages, strict=True))


def test_a_stock_model_keeps_vllms_worker_whatever_is_asked() -> None:
    """Without a schedule nothing is refused and nothing changes."""
    made = vllm_config(additional_config={}, speculative_config=object())
    assert serving_of(made) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_config__runner_type": "pooling"}, "only models that generate"),
        ({"parallel_config__worker_cls": "vllm.v1.worker.gpu_worker.Worker"}, "GPUs were tried once"),
        ({"parallel_config__worker_cls": "another.Worker"}, "no adapter for the worker another"),
        ({"compilation_config__mode": SimpleNamespace(name="STOCK_TORCH_COMPILE")}, "stock torch.compile"),
        ({"speculative_config": object()}, "speculation"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline"),
        ({"parallel_config__data_parallel_size": 2, "model_config__is_moe": True}, "data parallel"),
        ({"parallel_config__enable_dbo": True}, "dual batch"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "context parallelism"),
        ({"kv_transfer_config": object()}, "KV connectors"),
        ({"lora_config": object()}, "LoRA"),
        ({"model_config__is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_config__uses_mrope": True}, "multimodal"),
        ({"cache_config__kv_sharing_fast_prefill": True}, "fast-prefill"),
        ({"cache_config__kv_offloading_size": 1.0}, "--kv-offloading-size"),
        ({"aux_output_config__enable_return_routed_experts": True}, "--enable-return-routed-experts"),
    ],
)
def test_what_was_not_shown_to_be_exact_is_refused(change: dict[str, Any], message: str) -> None:
    """At the start, with the reason."""
    with pytest.raises(UnsupportedModel, match=message):
        choose(vllm_config(**change))


def test_vllms_rust_frontend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never asks the plugin what a request wants."""
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "0")
    choose(vllm_config())
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(UnsupportedModel, match="unset VLLM_USE_RUST_FRONTEND"):
        choose(vllm_config())


def test_untested_releases_of_vllm_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never unpatched in silence; a word in the environment allows them."""
    require_tested("0.32.0+cpu")
    with pytest.raises(UnsupportedModel, match=r"not with 0\.33\.1"):
        require_tested("0.33.1")
    monkeypatch.setenv("SKIPDECODE_ALLOW_UNTESTED_VLLM", "1")
    require_tested("0.33.1")


def test_an_engine_may_have_a_config_of_another_kind() -> None:
    """``additional_config`` may be any object of another plugin's."""
    assert serving_of(vllm_config(additional_config=object())) is None


# --- requests


def request(speedup: float | None, prompt: int, serving: Serving) -> Any:
    """A request as the scheduler has it."""
    params = SimpleNamespace(extra_args=None if speedup is None else {"speedup": speedup, "other": 1})
    assign_speedup(params, serving)
    return SimpleNamespace(sampling_params=params, num_prompt_tokens=prompt)


def serving(**options: Any) -> Serving:
    """A server of the schedules above."""
    entry = {str(k): s.to_dict() for k, s in SCHEDULES.items()}
    return Serving(config(method="skipdecode", schedules=entry), {"speedups": [*SCHEDULES]} | options)


def test_a_request_without_a_speedup_gets_the_servers() -> None:
    """Every process then reads the same number; other extra arguments stay."""
    assert speedup_of(request(None, 5, serving(speedup=2)).sampling_params) == 2
    found = request(3, 5, serving()).sampling_params
    assert speedup_of(found) == 3
    assert found.extra_args["other"] == 1
    assert speedup_of(SimpleNamespace(extra_args=None)) is None  # vLLM's own trial requests


def test_a_clients_own_identity_is_refused() -> None:
    """It decides which blocks are shared."""
    with pytest.raises(ScheduleError, match="no argument of a request"):
        assign_speedup(SimpleNamespace(extra_args={"skipdecode": {"prompt": ""}}), serving())


@pytest.mark.parametrize("forged", [1, "x", [1, 2]])
def test_an_argument_of_our_name_does_not_hurt_a_stock_server(forged: Any) -> None:
    """There nothing refuses it, and the scheduler asks for every request's block keys."""
    params = SimpleNamespace(extra_args={"skipdecode": forged, "speedup": "fast"})
    stock = SimpleNamespace(sampling_params=params, num_prompt_tokens=5)
    assert block_keys(stock, 0, 16) == []
    assert ends_of(stock) is None
    assert speedup_of(params) is None


@given(
    st.sampled_from([2.0, 4.0, 3.0, 1.0]), st.sampled_from([2.0, 4.0, 3.0, 1.0]), st.integers(1, 40), st.integers(1, 40)
)
@settings(max_examples=200)
def test_blocks_are_shared_only_where_every_position_ran_the_same_layers(
    one: float, other: float, prompt: int, other_prompt: int
) -> None:
    """Of two requests with the same tokens: equal keys of all blocks so far mean equal layers at each position."""
    block = 4
    requests = [request(s, p, serving()) for s, p in ((one, prompt), (other, other_prompt))]
    for end in range(block, 48, block):
        keys = [[tuple(block_keys(r, start, start + block)) for start in range(0, end, block)] for r in requests]
        if keys[0] == keys[1]:
            rows = [SCHEDULES[s].positions_per_layer(p, end) for s, p in ((one, prompt), (other, other_prompt))]
            assert rows[0] == rows[1]


def test_prompts_at_full_depth_are_shared_by_all_speeds() -> None:
    """Prompt blocks of 1x and 2x have no key of ours; 1x publishes what it writes, too."""
    assert block_keys(request(1, 8, serving()), 0, 32) == []
    assert block_keys(request(2, 8, serving()), 0, 8) == []
    assert block_keys(request(2, 8, serving()), 0, 9) != []
    assert block_keys(request(4, 8, serving()), 0, 8) != []
