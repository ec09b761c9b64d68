"""The GPU script in small, on a CPU: a model of random weights beside transformers' own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from learn import Batch, Form, Text, batches, compare, divergence, layers_of, measure
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from model import Decoder, Model, loop_ends, norm

PARTS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
PARTS |= {f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"}
PARTS |= {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 12, "vocab_size": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True, "initializer_range": 0.08}
    rope = {"rope_type": "default", "rope_theta": 1e5}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, rope_parameters=rope, rms_norm_eps=1e-5)).eval()


@pytest.fixture(scope="module")
def model(llama: LlamaForCausalLM) -> Model:
    def gguf(name: str, weight: Tensor) -> Tensor:
        turned = name in ("attn_q", "attn_k")
        return weight.view(-1, 2, 32, 128).transpose(1, 2).reshape(weight.shape) if turned else weight

    layers = {
        f"blk.{number}.{name}.weight": gguf(name, layer.get_parameter(f"{theirs}.weight").detach())
        for number, layer in enumerate(llama.model.layers)
        for name, theirs in PARTS.items()
    }
    ends = {"token_embd": llama.model.embed_tokens, "output_norm": llama.model.norm}
    return Model(layers | {f"{name}.weight": each.weight.detach() for name, each in ends.items()}, torch.float32)


@pytest.fixture(scope="module")
def texts(model: Model) -> list[Text]:
    prompts = [np.random.default_rng(size).integers(3, 256, 4 + size % 8) for size in range(20)]
    return list(zip(prompts, Decoder(model, 20, 64).write(prompts, 20, 1.0), strict=True))


def test_logits_are_those_of_transformers(model: Model, llama: LlamaForCausalLM) -> None:
    ids = torch.randint(0, 256, (3, 20))
    with torch.no_grad():
        ours = norm(model.states(ids)[-1], model.norm) @ model.embedding.T
        torch.testing.assert_close(ours, llama(ids).logits, rtol=0, atol=1e-4)


def test_decode_steps_write_what_a_cached_loop_writes(model: Model, llama: LlamaForCausalLM) -> None:
    prompts = [np.arange(3, 3 + size) * 7 % 256 for size in (9, 2, 30)]
    written = Decoder(model, rows=4, length=100).write(prompts, 40, whole=True)
    for prompt, text in zip(prompts, written, strict=True):
        ids = torch.from_numpy(prompt)[None]
        options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
        theirs = llama.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert text.tolist() == theirs[0, len(prompt) :].tolist()


def test_a_text_ends_where_it_loops() -> None:
    texts = torch.stack([torch.arange(60), torch.arange(60) % 7])
    assert loop_ends(texts).tolist() == [60, 6 + 4 * 7]


def test_forms_skip_nested_layers() -> None:
    for name, kept in (("lora", [*range(3, 5), *range(11, 30)]), ("late", [*range(3, 12), *range(18, 30)])):
        assert layers_of(name, 1.25, 30) == tuple(kept)
    slow, middle, fast = (set(layers_of("spread", speed, 30)) for speed in (1.25, 1.5, 2.0))
    assert (len(slow), len(middle), len(fast)) == (21, 17, 12)
    assert slow > middle > fast


def test_gradient_is_that_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learn.CHUNK", 3)
    students, teacher, head = torch.randn(2, 7, 8, requires_grad=True), torch.randn(7, 8), torch.randn(50, 8)
    kl, _, gradient = divergence(students.detach(), teacher, head, compare)
    q, p = (students @ head.T).log_softmax(-1), (teacher @ head.T).log_softmax(-1)
    plain = (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(kl, plain)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain.sum(), students)[0])


@pytest.mark.parametrize("kind", ["lora4", "all"])
def test_private_layers_change_nothing_at_first(kind: str, model: Model, texts: list[Text]) -> None:
    batch = Batch(model, texts[:4])
    start = Form("maps", model, {}).weights
    first, second = (Form(each, model, start).distance(batch)[0] for each in ("maps", kind))
    assert torch.equal(first, second)


def test_a_saved_state_goes_on(
    tmp_path: Path, model: Model, texts: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learn.FILE_BYTES", 200_000)
    form = Form("lora4", model, {})
    stream = batches(texts[4:], 512, np.random.default_rng(0))
    form.fit([Batch(model, next(stream))])
    before = measure(form, texts[:4])
    for _ in range(5):
        form.step(Batch(model, next(stream)), 1.0)
    assert all(measure(form, texts[:4])[speed][0] < before[speed][0] for speed in before)
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:  # the second is written by the form that the first one gives
        folder.mkdir()
        form.save(folder)
        form = Form.read("lora4", model, folder)
    forms = [Form.read("lora4", model, folder) for folder in folders]
    assert len([*folders[0].iterdir()]) > 1
    assert forms[0].tokens == form.tokens > 0
    batch = Batch(model, next(stream))
    assert torch.equal(*(each.step(batch, 1.0) for each in forms))
    assert all(torch.equal(weight, forms[1].weights[name]) for name, weight in forms[0].weights.items())
