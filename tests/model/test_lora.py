"""LoRA acts at positions that skip layers, and merged weights compute what it computes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from helpers.families import FORMS, LAYERS, TOP, build, distance, prompts, run
from skipdecode import Schedule, attach
from skipdecode.loading.int8 import optimize
from skipdecode.model.adapter import Adapter
from skipdecode.model.config import bind
from skipdecode.model.inspect import decoder_layers, text_config
from skipdecode.model.lora import LoRA, linear_modules, linear_sizes

CONSTANT = Schedule(LAYERS, 4, 4, horizon=1, decay="constant", warmup=2)


def adapter_for(model: Any, schedule: Schedule = CONSTANT, rank: int = 3) -> Adapter:
    """An adapter whose LoRA changes what a layer computes."""
    adapter = Adapter(text_config(model.config).hidden_size, 4, {2.0: schedule}, linear_sizes(model), rank)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return adapter


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_a_merged_weight_computes_the_sum(kind: Any) -> None:
    """torch's linear module and GPT-2's, whose weight is transposed; the module stays, and shares its bias."""
    module, lora = (nn.Linear(6, 10) if kind is nn.Linear else Conv1D(10, 6)), LoRA(6, 10, 2)
    nn.init.normal_(lora.lora_B)
    before, x = deepcopy(module.state_dict()), torch.randn(2, 5, 6)
    merged: Any = lora.merged(module)
    torch.testing.assert_close(merged(x), module(x) + lora(x))
    assert all(torch.equal(before[name], each) for name, each in module.state_dict().items())
    assert merged.bias is module.bias


def test_a_new_lora_changes_nothing() -> None:
    assert LoRA(6, 10, 2)(torch.randn(3, 6)).count_nonzero() == 0


def test_all_linear_modules_above_the_first_gap_have_lora() -> None:
    """Of layers that some speed runs; those below see what the full model sees, and need none."""
    model = build("llama")
    adapter = adapter_for(model)
    layers = {int(name.partition(".")[0]) for name in adapter.loras}
    assert layers == {6, 7}
    assert adapter.loras.keys() == {name for name in linear_modules(model) if int(name.partition(".")[0]) in layers}


@pytest.mark.parametrize("name", [*FORMS, "gpt2", "mixtral"])
def test_merged_or_not_the_same_is_generated(name: str) -> None:
    """The model's own weights stay, so that the full model is the same to the bit; private copies cost no FLOPs."""
    model, inputs = build(name), prompts()
    stock = run(model, inputs)
    plan = bind(TOP, model.config)
    adapter = adapter_for(model, plan)
    unmerged = torch.stack(run(attach(model, adapter=adapter), inputs, TOP).logits, 1)
    running = plan.layers(plan.min_depth)
    flops = adapter.flops(sorted(running))
    adapter.merge(model)
    merged = torch.stack(run(model, inputs, TOP).logits, 1)
    assert adapter.private.keys() == adapter.loras.keys()
    assert distance(merged, unmerged) < 1e-5
    assert adapter.flops(sorted(running)) < flops
    assert all(map(torch.equal, run(model, inputs).logits, stock.logits))


def test_it_matters() -> None:
    model, inputs = build("llama"), prompts()
    adapter = adapter_for(model)
    with_lora = torch.stack(run(attach(model, adapter=adapter), inputs, CONSTANT).logits, 1)
    for lora in adapter.loras.values():
        nn.init.zeros_(lora.lora_B)
    assert distance(torch.stack(run(model, inputs, CONSTANT).logits, 1), with_lora) > 0.01


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_peft_first(tmp_path: Any) -> None:
    """PEFT's LoRA acts at all positions, ours on top of it; merging leaves PEFT's modules alone."""
    model, inputs = build("llama"), prompts()
    adapter = adapter_for(model)
    expected = torch.stack(run(attach(deepcopy(model), adapter=adapter), inputs, CONSTANT).logits, 1)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    again = adapter_for(build("llama"))
    attach(wrapped, adapter=again)
    again.merge(wrapped)
    assert len(again.private) == len(again.loras) - 2  # q_proj of two layers
    assert distance(torch.stack(run(wrapped, inputs, CONSTANT).logits, 1), expected) < 1e-5


def test_private_weights_are_prepacked_too() -> None:
    model, inputs = build("llama"), prompts()
    adapter = adapter_for(model)
    expected = torch.stack(run(attach(deepcopy(model), adapter=adapter), inputs, CONSTANT).logits, 1)
    adapter.merge(model)
    packed = attach(optimize(model, prepack=True, private=adapter.private), adapter=adapter)
    assert not any(type(module) is nn.Linear for module in adapter.private.values())
    assert distance(torch.stack(run(packed, inputs, CONSTANT).logits, 1), expected) < 1e-5


def test_a_layer_that_fails_leaves_nothing_behind() -> None:
    """A pass that runs all layers afterwards is the model's, to the bit."""
    model, inputs = build("llama"), prompts()
    stock = run(model, inputs)
    attach(model, adapter=adapter_for(model))
    layer: Any = decoder_layers(model)[-1]
    hook = layer.mlp.register_forward_hook(lambda module, args, output: 1 / (args[0].shape[1] - 1))
    with pytest.raises(ZeroDivisionError):
        run(model, inputs, CONSTANT)
    hook.remove()
    assert all(map(torch.equal, run(model, inputs).logits, stock.logits))
