"""Weights laid out once: the same numbers as before, and refused where they could be others."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import PreTrainedModel

import skipdecode
from helpers.families import FAMILIES, SCHEDULES, TOP, build, distance, prompts, run
from helpers.tiny import run as command
from skipdecode import attach, detach
from skipdecode.core.stack import decoder_layers
from skipdecode.errors import ModelError, SkipDecodeError, UnsupportedModel, UsageError
from skipdecode.generation.jobs import GenerationJob
from skipdecode.weights.device import cpu_capabilities
from skipdecode.weights.faster import make_faster
from skipdecode.weights.linear import DecodingLinear
from skipdecode.weights.loading import load
from skipdecode.weights.prepack import PackedLinear, check_packable, check_prepack

CPU = SimpleNamespace(dtype=torch.bfloat16)
#: As many rows as F.linear needs to take oneDNN's product for weights as small as these: below it has one of its own.
ROWS = (9, 5, 2) * 8
#: Jamba multiplies with a module's weight itself.
PACKED = [name for name in FAMILIES if name != "jamba"]


def _can(dtype: torch.dtype) -> bool:
    try:
        check_prepack("tiny", CPU, dtype, "cpu")
    except ModelError:
        return False
    return True


needs = pytest.mark.skipif(not _can(torch.float32), reason="no oneDNN")
needs_int8 = pytest.mark.skipif(
    not any(have is True and "vnni" in key for key, have in cpu_capabilities().items()), reason="no VNNI"
)
needs_bfloat16 = pytest.mark.skipif(not _can(torch.bfloat16), reason="no bfloat16 products")


# --- numbers


@needs_bfloat16
@pytest.mark.parametrize("name", PACKED)
def test_in_bfloat16_bits_stay(name: str) -> None:
    """At falling depths, at a constant one and without a schedule; rows are padded on the left."""
    plain = build(name).to(torch.bfloat16)
    packed = make_faster(copy.deepcopy(plain), prepack=True)
    plain, inputs = make_faster(plain), prompts(ROWS)
    assert any(isinstance(part, PackedLinear) for part in decoder_layers(packed).modules())
    for schedule in (None, TOP, SCHEDULES["constant"]):
        expected, found = (run(model, inputs, schedule, max_new_tokens=8) for model in (plain, packed))
        assert all(map(torch.equal, found.logits, expected.logits)), schedule


@needs
@pytest.mark.parametrize("name", PACKED)
def test_in_float32_tokens_stay(name: str) -> None:
    """The product is another one: logits are near, and greedy tokens equal."""
    plain = build(name)
    packed = make_faster(copy.deepcopy(plain), prepack=True)
    for schedule in (None, TOP):
        expected, found = (run(model, prompts(), schedule) for model in (plain, packed))
        assert torch.equal(found.sequences, expected.sequences)
        assert distance(torch.stack(found.logits), torch.stack(expected.logits)) < 1e-4


@needs
@pytest.mark.parametrize("shape", [(48,), (1, 48), (2, 3, 48), (0, 48), (2, 0, 48)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_module_takes_what_a_linear_module_takes(shape: tuple[int, ...], bias: bool) -> None:
    """Rows of any number, none included, and views; other types and widths are refused as they were."""
    linear = nn.Linear(48, 24, bias=bias).requires_grad_(False)
    packed, x = PackedLinear(linear.weight, linear.bias), torch.randn(shape)
    assert packed(x).shape == linear(x).shape
    assert torch.allclose(packed(x), linear(x), atol=1e-5)
    view = torch.randn(5, 48).expand(3, 5, 48)[:, -1:]
    assert torch.allclose(packed(view), linear(view), atol=1e-5)
    for wrong in (x.double(), x.bfloat16(), torch.zeros(*shape[:-1], 47)) if x.numel() else ():
        with pytest.raises(RuntimeError):
            packed(wrong)


@needs
def test_beams_and_samples_are_those_of_the_plain_model() -> None:
    """Whatever generate does with the logits."""
    plain = build("llama")
    packed = make_faster(copy.deepcopy(plain), prepack=True)
    for habit in ({"num_beams": 3}, {"do_sample": True, "top_k": 9}):
        texts = []
        for model in (plain, packed):
            torch.manual_seed(3)
            texts.append(run(model, prompts(), TOP, **habit).sequences)
        assert torch.equal(*texts)


@needs
def test_threads_share_packed_weights() -> None:
    """Each writes what it writes alone."""
    model, batches = (
        attach(make_faster(build("llama"), prepack=True)),
        [prompts((9, 5)), prompts((3, 7)), prompts((4,))],
    )
    expected = [run(model, inputs, TOP).sequences for inputs in batches]
    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(lambda inputs: run(model, inputs, TOP).sequences, batches)]
    assert all(map(torch.equal, found, expected))


# --- what is packed


def _bytes(model: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in {*model.parameters(), *model.buffers()})


@needs
def test_plain_weights_are_gone() -> None:
    """Nothing holds them: of the layers' weights there is one copy, as each is laid out."""
    model = build("llama")
    linear = [part for part in decoder_layers(model).modules() if isinstance(part, nn.Linear)]
    before, weights = _bytes(decoder_layers(model)), [weakref.ref(part.weight) for part in linear]
    del linear
    held: list[int] = []
    found = PackedLinear.__init__

    def counted(self: PackedLinear, weight: Tensor, bias: Tensor | None) -> None:
        held.append(sum(reference() is not None for reference in weights))
        found(self, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedLinear, "__init__", counted)
        make_faster(model, prepack=True)
    most, *layers = held[: len(weights) + 1]  # the first is the check's
    assert layers == list(range(most, 0, -1)), "each is freed before the next is made"
    assert not any(type(part) is nn.Linear for part in decoder_layers(model).modules())
    assert _bytes(decoder_layers(model)) == before


@needs
def test_a_tied_heads_embedding_stays() -> None:
    """The head has weights of its own; the embedding embeds as before."""
    model = build("opt")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    before = model.get_input_embeddings().weight.clone()
    make_faster(model, prepack=True)
    assert torch.equal(model.get_input_embeddings()(torch.arange(128)), before)
    head = model.get_output_embeddings()
    assert isinstance(head, PackedLinear)
    assert torch.equal(head.packed_weight.to_dense(), before)


class _Other(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def _up(model: PreTrainedModel) -> Any:
    layer: Any = decoder_layers(model)[1]
    return layer.mlp.up_proj


def _subclass(model: PreTrainedModel) -> None:
    _up(model).__class__ = _Other


def _hook(model: PreTrainedModel) -> None:
    _up(model).register_forward_hook(lambda module, args, y: y + 1)


def _computed(model: PreTrainedModel) -> None:
    parametrizations.weight_norm(_up(model))


def _shadowed(model: PreTrainedModel) -> None:
    up = _up(model)
    stock = up.forward
    up.forward = lambda x: stock(x) + 1


@needs
@pytest.mark.parametrize("change", [_subclass, _hook, _computed, _shadowed])
def test_what_is_more_than_linear_stays(change: Callable[[PreTrainedModel], None]) -> None:
    """Its work is done as before."""
    model, untouched = build("llama"), build("llama")
    expected = run(untouched, prompts(), TOP).sequences
    change(model)
    changed = run(attach(model), prompts(), TOP)
    if change is not _computed:
        assert not torch.equal(changed.sequences, expected)
    make_faster(detach(model), prepack=True)
    assert not isinstance(_up(model), PackedLinear)
    layers: Any = decoder_layers(model)
    assert isinstance(layers[0].mlp.up_proj, PackedLinear)
    assert torch.equal(run(model, prompts(), TOP).sequences, changed.sequences)


@needs
def test_a_module_in_two_places_is_packed_once() -> None:
    """And is one module still."""
    model = build("llama")
    layers: Any = decoder_layers(model)
    layers[2].mlp.up_proj = layers[1].mlp.up_proj
    expected = run(model, prompts(), TOP).sequences
    make_faster(detach(model), prepack=True)
    assert layers[2].mlp.up_proj is layers[1].mlp.up_proj
    assert torch.equal(run(model, prompts(), TOP).sequences, expected)


@needs
def test_packing_twice_is_once_and_a_copy_has_weights_of_its_own() -> None:
    """Also after make_faster without it, which puts a hook on the head."""
    model = make_faster(make_faster(make_faster(build("opt")), prepack=True), prepack=True)
    head: Any = model.get_output_embeddings()
    assert isinstance(head, PackedLinear)
    assert len(head._forward_pre_hooks) == 1
    expected = run(model, prompts(), TOP)
    twin = copy.deepcopy(model)
    mine = {id(part.packed_weight) for part in model.modules() if isinstance(part, PackedLinear)}
    assert not mine & {id(part.packed_weight) for part in twin.modules() if isinstance(part, PackedLinear)}
    del model
    assert torch.equal(run(twin, prompts(), TOP).sequences, expected.sequences)


# --- together with others


@needs
def test_batches_that_fit_are_measured_with_packed_weights(checkpoint: Path) -> None:
    """Weights without an address are no new memory."""
    options: dict[str, Any] = {"speedup": 2, "max_new_tokens": 6, "eos_token_id": None}
    texts = ["the cat sat", "a dog"]
    packed, plain = (load(str(checkpoint), dtype="float32", prepack=on) for on in (True, False))
    found = skipdecode.generate(*packed, texts, batch_size="auto", **options)
    assert found.completions == skipdecode.generate(*plain, texts, **options).completions


@needs
def test_jobs_take_the_option_and_do_not_mix_with_others(checkpoint: Path, tmp_path: Path) -> None:
    """The command writes with packed weights; a job with plain ones does not go on with its batches."""
    job = GenerationJob(
        str(checkpoint),
        ["the cat", "a dog"],
        tmp_path / "texts.jsonl",
        batch_size=1,
        prepack=True,
        options={"max_new_tokens": 4},
    )

    def stop(cost: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(on_batch=stop)
    with pytest.raises(SkipDecodeError, match="another"):
        replace(job, prepack=False).run()
    assert job.run().summary["rows"] == 2
    done = command("generate", checkpoint, "--prompt", "the cat", "--max-new-tokens", 4, "--prepack", "--json")
    assert done.returncode == 0, done.stderr


@needs
def test_benchmarks_take_the_option(tmp_path: Path) -> None:
    """A profile says that it was measured so, and is refused for plain weights."""
    file = tmp_path / "tiny.json"
    sizes = ("--shape", "tiny", "--batch", 1, "--dtype", "float32")
    done = command("profile", *sizes, "--context", "8,32", "--repeats", 1, "--prepack", "--output", file)
    assert done.returncode == 0, done.stderr
    assert '"prepack": true' in file.read_text()
    short = (
        "--prompt-tokens",
        8,
        "--new-tokens",
        6,
        "--repeats",
        1,
        "--speedups",
        2,
        "--profile",
        file,
        "--clock",
        "step",
    )
    assert command("bench", *sizes, *short, "--prepack").returncode == 0


# --- refusals


@pytest.mark.parametrize(
    ("config", "dtype", "device", "message"),
    [
        (CPU, "bfloat16", "cuda", "is for CPUs"),
        (SimpleNamespace(quantization_config={"quant_method": "gptq"}), "bfloat16", "cpu", "is quantized"),
        (CPU, "float16", "cpu", "bfloat16 or float32, not torch.float16"),
    ],
    ids=["gpu", "quantized", "float16"],
)
def test_what_cannot_be_packed_is_refused(config: Any, dtype: str, device: str, message: str) -> None:
    """With its reason, from the config and the machine alone."""
    with pytest.raises(ModelError, match=message):
        check_prepack("tiny", config, dtype, device)


def test_a_torch_without_the_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One built without oneDNN, and a CPU for which oneDNN has none."""

    def none(*_: Any) -> Tensor:
        raise RuntimeError("needs the cpu support avx512bw")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", none)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    with pytest.raises(ModelError, match=r"no prepacked products of torch.bfloat16 .*avx512bw"):
        check_prepack("tiny", CPU, "auto", "cpu")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ModelError, match="built with oneDNN"):
        check_prepack("tiny", CPU, "auto", "cpu")


def test_layers_without_linear_modules_are_refused() -> None:
    """Nothing would be faster but the head. Experts are left, and what is beside them is packed."""
    model = build("llama")
    for layer in decoder_layers(model):
        for name, part in list(layer.named_modules()):
            if isinstance(part, nn.Linear):
                layer.set_submodule(name, _Other(part.in_features, part.out_features))
    with pytest.raises(UnsupportedModel, match="elsewhere than in linear modules"):
        check_packable(model)
    check_packable(build("mixtral"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prepack": True, "quantization": "int8"}, "leave one of quantization and prepack out"),
        ({"prepack": True, "offload": "disk"}, "layers that wait elsewhere take no prepack"),
        ({"prepack": True, "dtype": "float16"}, "not torch.float16"),
    ],
    ids=["int8", "offload", "float16"],
)
def test_options_that_contradict_prepack_are_refused_before_weights_are_read(
    options: dict[str, Any], message: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By load, and so by every verb."""
    monkeypatch.setattr("skipdecode.weights.loading.read_weights", None)
    monkeypatch.setattr("skipdecode.weights.faster.check_int8", lambda *_: None)
    with pytest.raises((UsageError, ModelError), match=message):
        load(str(checkpoint), device="cpu", **options)


@needs
def test_packed_and_int8_weights_are_not_mixed() -> None:
    """In one call or one after the other."""
    with pytest.raises(UsageError, match="leave one of"):
        make_faster(build("opt"), prepack=True, quantization="int8")
    model = make_faster(build("opt"), prepack=True)
    with pytest.raises(ModelError, match="are those of prepack: load it anew"):
        make_faster(model, quantization="int8")


@needs
def test_packed_weights_are_neither_saved_pickled_filled_moved_nor_trained(tmp_path: Path) -> None:
    """Each would go wrong without a word, or far from here."""
    plain, ids = build("opt"), prompts()["input_ids"]
    model = make_faster(copy.deepcopy(plain), prepack=True)
    with pytest.raises(ModelError, match="not saved: load it without"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ModelError, match="not saved: load it without"):
        model.state_dict()
    with pytest.raises(ModelError, match="not pickled"):
        pickle.dumps(model)
    with pytest.raises(ModelError, match="load it anew"):
        model.load_state_dict(plain.state_dict(), strict=False)
    with pytest.raises(ModelError, match="keep their device and type"):
        model.to(torch.bfloat16)
    model = make_faster(copy.deepcopy(plain), prepack=True)
    assert not model(ids).logits.requires_grad
    with pytest.raises(ModelError, match="are not trained"):
        model.requires_grad_(True)(ids)
    assert isinstance(model.to("cpu").get_output_embeddings(), DecodingLinear)


@pytest.mark.parametrize(
    "options",
    [pytest.param({"quantization": "int8"}, marks=needs_int8), pytest.param({"prepack": True}, marks=needs)],
    ids=["int8", "prepack"],
)
@pytest.mark.parametrize("tied", [True, False])
def test_other_weights_keep_their_type_and_size(options: dict[str, Any], tied: bool) -> None:
    """Under autocast a float32 product would stay one; a tied head of the old size would write old tokens alone."""
    plain = build("opt")
    if not tied:
        plain.config.tie_word_embeddings, plain._tied_weights_keys = False, None
        plain.lm_head.weight = nn.Parameter(plain.lm_head.weight.detach().clone())
    model = make_faster(plain, **options)
    for wanted in (model, copy.deepcopy(model)):
        with pytest.raises(ModelError, match=r"leave torch\.autocast out"), torch.autocast("cpu"), torch.no_grad():
            wanted(**prompts())
        with pytest.raises(ModelError, match="keep their size: resize and save the model without"):
            wanted.resize_token_embeddings(160)
        assert wanted(**prompts()).logits.shape[-1] == wanted.get_input_embeddings().weight.shape[0]


@needs
def test_a_weight_that_is_read_past_its_module_is_refused() -> None:
    """By a pass of two tokens, when the weights are made."""
    with pytest.raises(UnsupportedModel, match=r"JambaForCausalLM reads .* past their modules: leave prepack out"):
        make_faster(build("jamba"), prepack=True)
