"""Which list of modules is the stack, who lends keys to whom, and where a layer's positions are: from configs alone."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helpers.families import LAYERS, TOP, build
from skipdecode import Schedule
from skipdecode.errors import CacheError, ModelError, ScheduleError, UnsupportedModel
from skipdecode.model.config import bind
from skipdecode.model.gate import PositionSlice, packed
from skipdecode.model.inspect import decoder_layers, kv_shared_layers


def config(**values: Any) -> SimpleNamespace:
    """A config of which only these values are known."""
    made = SimpleNamespace(**{"num_hidden_layers": 4, "is_encoder_decoder": False} | values)
    made.get_text_config = lambda decoder: made if decoder else None
    return made


class Layer(nn.Module):
    """Takes hidden states first, and may hold a list of as many parts as the stack has layers."""

    def __init__(self, parts: int = 0) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Layer() for _ in range(parts))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class Other(nn.Module):
    """No decoder layer: takes something else first."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens


class Model(nn.Module):
    """Holds the lists it is given."""

    def __init__(self, *lists: list[nn.Module], **values: Any) -> None:
        super().__init__()
        self.config = config(**values)
        self.lists = nn.ModuleList(nn.ModuleList(each) for each in lists)


def test_the_stack_is_the_one_list_of_layers_that_take_hidden_states() -> None:
    """Not a list of another length, of other modules, or inside a layer."""
    model = Model([Layer(4) for _ in range(4)], [Layer() for _ in range(3)], [Other() for _ in range(4)])
    assert decoder_layers(model) is model.lists[0]
    mixed = Model([Layer(), Layer(), Layer(), Other()])
    for wrong, found in ((Model([Layer() for _ in range(3)]), 0), (mixed, 0), (Model([Layer()] * 4, [Layer()] * 4), 2)):
        with pytest.raises(UnsupportedModel, match=f"one stack of 4 decoder layers.*{found} were found"):
            decoder_layers(wrong)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        decoder_layers(Model([Layer() for _ in range(4)], is_encoder_decoder=True))


# --- lenders


SHARED = {"kv_sharing_modes": ["store", None, "store", "reuse", "reuse"], "num_hidden_layers": 5}
KINDS = ["full", "full", "sliding", "full", "sliding"]


def test_a_borrower_reads_the_last_lender_of_its_kind() -> None:
    """Or the layer that the config names."""
    assert kv_shared_layers(config(**SHARED, layer_types=KINDS)) == {3: 0, 4: 2}
    assert kv_shared_layers(config(**SHARED, layer_types=KINDS, kv_source_layers=[0, 1, 2, 2, 0])) == {3: 2, 4: 0}
    assert kv_shared_layers(config(layer_types=KINDS)) == kv_shared_layers(config(num_kv_shared_layers=0)) == {}
    with pytest.raises(ModelError, match="newer transformers"):
        kv_shared_layers(config(num_kv_shared_layers=2))


def test_a_schedule_is_fitted_by_moving_lenders_up_alone() -> None:
    """The depths stay; a schedule that needs no moving is itself."""
    shared = config(**SHARED, layer_types=KINDS)
    plan = Schedule(5, 4, 2, 6, order=(4, 3, 1, 0, 2))
    moved = bind(plan, shared)
    assert moved == plan.replace(order=(2, 4, 0, 3, 1))
    assert bind(moved, shared) is moved
    assert bind(TOP, build("opt").config) is TOP
    with pytest.raises(ScheduleError, match="for 8 layers, the model has 5"):
        bind(Schedule.full(LAYERS), shared)


# --- what a layer is given


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "expected"),
    [
        # The last 4 of 9 positions, of which it runs 3: it sees the keys of the 5 before them as well.
        ("hidden_states", (2, 4, 32), torch.float32, (2, 3, 32)),
        ("attention_mask", (2, 1, 4, 9), torch.float32, (2, 1, 3, 8)),
        ("attention_mask", (2, 9), torch.int64, (2, 8)),
        ("attention_mask", (2, 9), torch.float32, (2, 8)),
        ("attention_mask", (2, 7), torch.int64, (2, 7)),
        ("alibi", (8, 1, 9), torch.float32, (8, 1, 8)),
        ("position_bias", (1, 8, 4, 9), torch.float32, (1, 8, 3, 8)),
        ("position_ids", (2, 9), torch.int64, (2, 8)),
        ("position_ids", (3, 2, 4), torch.int64, (3, 2, 3)),
        ("position_ids", (3, 2, 5), torch.int64, (3, 2, 5)),
        ("position_embeddings", (4, 16), torch.float32, (3, 16)),
        ("position_embeddings", (1, 4, 8), torch.float32, (1, 3, 8)),
        ("scale", (), torch.float32, ()),
        ("slopes", (4,), torch.float32, (4,)),
        ("scales", (2, 4), torch.float32, (2, 3)),
        ("frequencies", (4, 9), torch.complex64, (3, 9)),
        ("frequencies", (4, 9), torch.float32, (3, 9)),
        ("per_layer_input", (2, 4, 4, 8), torch.float32, (2, 3, 4, 8)),
        ("per_layer_input", (2, 4, 5, 8), torch.float32, (2, 3, 5, 8)),
    ],
)
def test_a_prefix_of_the_last_positions_sees_the_keys_before_them(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, expected: tuple[int, ...]
) -> None:
    """Where a model drops positions that upper layers need not compute, queries and keys have widths of their own."""
    given = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    (), cut = PositionSlice(4, 3, 9).of_call(lambda **kwargs: None, (), {name: given})
    assert tuple(cut[name].shape) == expected
    assert torch.equal(cut[name], given[tuple(slice(0, size) for size in expected)]), "the first ones, of every axis"


def test_a_mask_of_two_positions_is_cut_as_any_other() -> None:
    """A row for each query; one row for all of them stays."""
    rows = {"mask": torch.zeros(3, 1, 2, 5), "attention_mask": torch.zeros(3, 1, 1, 5)}
    (), cut = PositionSlice(2, 1, 5).of_call(lambda **kwargs: None, (), rows)
    assert {name: tuple(each.shape) for name, each in cut.items()} == dict.fromkeys(rows, (3, 1, 1, 4))


def test_arguments_by_position_are_cut_by_their_names() -> None:
    """Tuples, lists and dicts inside too; what is no tensor passes."""

    def forward(hidden_states: Any, mask: Any = None, *more: Any) -> None: ...

    x, mask = torch.zeros(2, 4, 8), torch.zeros(2, 9)
    args, kwargs = PositionSlice(4, 3, 9).of_call(
        forward, (x, mask, [x, "text"]), {"pair": (x, x), "by": {"mask": x}, "n": 4}
    )
    assert [tuple(args[0].shape), tuple(args[1].shape), tuple(args[2][0].shape)] == [(2, 3, 8), (2, 8), (2, 3, 8)]
    assert type(args[2]) is list
    assert type(kwargs["pair"]) is tuple
    assert [tuple(y.shape) for y in kwargs["pair"]] == [(2, 3, 8)] * 2
    assert tuple(kwargs["by"]["mask"].shape) == (2, 3, 8)
    assert (args[2][1], kwargs["n"]) == ("text", 4)
    with pytest.raises(CacheError, match="does not show its 9 positions"):
        PositionSlice(4, 3, 9).of_call(forward, (x, torch.zeros(2, 1, 5, 9)), {})


def test_streams_beside_hidden_states_are_left_whole() -> None:
    """Where hidden states have their positions on another axis, what has no streams keeps its own."""
    given = {"hidden_states": torch.zeros(4, 4, 4, 8), "position_embeddings": torch.zeros(2, 4, 4)}
    (), cut = PositionSlice(4, 3, 9, hidden_axis=2).of_call(lambda **kwargs: None, (), given)
    assert tuple(cut["hidden_states"].shape) == (4, 4, 3, 8)
    assert tuple(cut["position_embeddings"].shape) == (2, 3, 4)


def test_lent_keys_are_read_as_a_prefix_and_written_whole() -> None:
    """Lenders write through to what all layers share; moving it to a device or dtype moves the original."""
    shared: UserDict[int, tuple[torch.Tensor, ...]] = UserDict()
    (), cut = PositionSlice(4, 3, 9).of_call(lambda **kwargs: None, (), {"shared_kv_states": shared})
    cut["shared_kv_states"][0] = (torch.zeros(2, 1, 9, 8), torch.zeros(2, 1, 9, 8))
    assert [tuple(x.shape) for x in shared[0]] == [(2, 1, 9, 8)] * 2
    moved = cut["shared_kv_states"].to(torch.float16)
    assert [tuple(x.shape) for x in moved[0]] == [(2, 1, 8, 8)] * 2
    assert {x.dtype for x in shared[0]} == {torch.float16}


# --- packing


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_a_row_is_packed_if_it_holds_several_texts_of_two_tokens(
    texts: list[int], left: int, right: int, beside: bool
) -> None:
    """Padding is zeros at either end; one packed row among others is enough."""
    row = [0] * left + [i for text in texts for i in range(text)] + [0] * right
    rows = [[*range(len(row))], row] if beside else [row]
    assert packed({"position_ids": torch.tensor(rows)}) == (sum(text > 1 for text in texts) > 1)


def test_packing_is_told_by_lengths_too() -> None:
    """An argument that is None says nothing; nor do positions in sections."""
    assert packed({"cu_seq_lens_q": torch.tensor([0, 4])})
    assert not packed({"cu_seq_lens_q": None, "position_ids": None})
    assert not packed({})
    assert not packed({"position_ids": torch.tensor([[[0], [1], [0], [1]]])})
    assert packed({"position_ids": torch.tensor([[3, 0, 1, 0, 1]])}), "the first text may begin before the row"
