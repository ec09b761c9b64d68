"""Decoder layers, layers that share KV, and models that cannot skip exactly: from configs alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GlmMoeDsaConfig,
    MiniMaxConfig,
    PreTrainedConfig,
    RwkvConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from skipdecode import attach
from skipdecode.errors import ModelError, UnsupportedModel
from skipdecode.model.cache_name import CACHE
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


SHARED = {"kv_sharing_modes": ["store", None, "store", "reuse", "reuse"], "num_hidden_layers": 5}


KINDS = ["full", "full", "sliding", "full", "sliding"]


def test_a_borrower_reads_the_last_lender_of_its_kind() -> None:
    """Or the layer that the config names."""
    assert kv_shared_layers(config(**SHARED, layer_types=KINDS)) == {3: 0, 4: 2}
    assert kv_shared_layers(config(**SHARED, layer_types=KINDS, kv_source_layers=[0, 1, 2, 2, 0])) == {3: 2, 4: 0}
    assert kv_shared_layers(config(layer_types=KINDS)) == kv_shared_layers(config(num_kv_shared_layers=0)) == {}
    with pytest.raises(ModelError, match="does not say which layers share"):
        kv_shared_layers(config(num_kv_shared_layers=2))


# --- models that cannot skip exactly


TINY = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 4}


REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "a state in no cache": (RwkvConfig(**TINY, attention_hidden_size=32), f"takes no {CACHE}"),
    "a cache of its own": (
        MiniMaxConfig(**TINY, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32, head_dim=8),
        "cache of its own",
    ),
    "layers that reuse what others selected": (
        GlmMoeDsaConfig(
            **TINY,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=32,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
            head_dim=4,
            n_routed_experts=4,
            moe_intermediate_size=16,
            indexer_types=["full", "shared", "full", "shared"],
        ),
        "reuse what the layer below selected",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_skip_exactly_is_refused_by_what_it_is(kind: str) -> None:
    """Before anything runs, with the reason; and it is left as it was."""
    values, reason = REFUSED[kind]
    model = AutoModelForCausalLM.from_config(values)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(UnsupportedModel, match=reason):
        attach(model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_what_is_no_causal_lm_is_refused() -> None:
    """Only decoder-only causal LMs have one stack to skip in; without a config there is nothing to go by."""
    config = T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4)
    with pytest.raises(UnsupportedModel, match=r"encoder-decoder.*decoder-only"):
        attach(T5ForConditionalGeneration(config))
    with pytest.raises(UnsupportedModel, match=r"no config.*causal LMs"):
        attach(torch.nn.Linear(2, 2))
