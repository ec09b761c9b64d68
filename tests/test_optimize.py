"""Linear layers in int8 or prepacked, and the head's input: the same numbers, with schedules, and what is refused."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import PreTrainedModel

from helpers.families import (
    FAMILIES,
    FORMS,
    LAYERS,
    LENGTHS,
    SCHEDULES,
    TOP,
    build,
    distance,
    new_token_logits,
    prompts,
    run,
)
from helpers.tiny import run as command
from skipdecode import Schedule, attach, detach
from skipdecode.errors import ModelError, SkipDecodeError, UnsupportedModel, UsageError
from skipdecode.generation.job import GenerationJob
from skipdecode.loading.int8 import Int8Linear
from skipdecode.loading.linear import DecodingLinear, check_linear
from skipdecode.loading.load import load, read_weights
from skipdecode.loading.optimize import check_optimizations, linear_kind, optimize
from skipdecode.loading.prepack import PackedLinear
from skipdecode.model.inspect import decoder_layers

CPU = SimpleNamespace(dtype=torch.bfloat16)
#: As many rows as F.linear needs to take oneDNN's product for weights as small as these: below it has one of its own.
ROWS = (9, 5, 2) * 8
#: Jamba multiplies with a module's weight itself.
PACKED = [name for name in FAMILIES if name != "jamba"]
KINDS: tuple[dict[str, Any], ...] = ({"quantization": "int8"}, {"prepack": True})


def _can(kind: type[DecodingLinear], dtype: torch.dtype = torch.float32) -> bool:
    try:
        kind.check_products(dtype)
    except ModelError:
        return False
    return True


needs = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")
needs_bfloat16 = pytest.mark.skipif(not _can(PackedLinear, torch.bfloat16), reason="no bfloat16 products")
needs_int8 = pytest.mark.skipif(not _can(Int8Linear), reason="no exact int8 products")


@pytest.fixture(params=KINDS, ids=["int8", "prepack"])
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Each way to replace linear modules, for what holds however exact this CPU's products are."""
    kind = linear_kind(**request.param)
    assert kind is not None
    monkeypatch.setattr(kind, "check_products", lambda dtype: None)
    try:
        kind(torch.zeros(16, 16), None)(torch.zeros(1, 16))
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"this torch has no such products: {error}")
    return dict(request.param)


# --- the head


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_head_reads_the_prompts_last_column_from_memory_of_its_own(checkpoint: Path, dtype: str) -> None:
    """In half precision, where a view would have its weight copied for each row; in float32 bits stay as they are."""
    model, _ = load(str(checkpoint), dtype=dtype)
    seen: list[Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda head, args: seen.append(args[0]))
    run(model, prompts(), TOP)
    assert len(seen) > 2
    assert seen[0].shape[:2] == (len(LENGTHS), 1)
    assert seen[0].is_contiguous() == (dtype == "bfloat16")


def test_in_float32_a_loaded_model_is_the_stock_model(checkpoint: Path) -> None:
    """Bit for bit, with the full schedule and without one."""
    model, _ = load(str(checkpoint), dtype="float32")
    stock = read_weights(str(checkpoint)).eval()
    expected = run(stock, prompts())
    for schedule in (None, Schedule.full(LAYERS)):
        assert all(map(torch.equal, run(model, prompts(), schedule).logits, expected.logits))


# --- int8


@needs_int8
@pytest.mark.parametrize("bias", [True, False])
def test_int8_products_are_those_of_the_rounded_numbers(bias: bool) -> None:
    """Exact sums of whole numbers from -127 to 127, times the scales of output and row; a row of zeros stays one."""
    linear = nn.Linear(48, 24, bias=bias)
    x = torch.randn(2, 3, 48) * torch.tensor([0.01, 1.0, 50.0])[:, None]
    x[0, 0] = 0
    with torch.no_grad():
        got = Int8Linear(linear.weight, linear.bias)(x)
    weight, rows = linear.weight.detach().double(), x.double()
    w_scale, x_scale = weight.abs().amax(1, keepdim=True) / 127, rows.abs().amax(-1, keepdim=True) / 127
    rounded = (rows / x_scale.clamp_min(1e-30)).round() * x_scale
    expected = rounded @ ((weight / w_scale).round() * w_scale).t()
    if bias:
        expected += linear.bias.detach().double()
    assert got.shape == (2, 3, 24)
    assert distance(got.double(), expected) < 1e-2, "a half may be rounded either way in float32"
    assert (got - linear(x)).abs().max() < 0.02 * linear(x).abs().max()
    assert torch.equal(got[0, 0], linear.bias.detach() if bias else torch.zeros(24))


@needs_int8
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_int8_sums_do_not_saturate(rows: int) -> None:
    """The largest sums that rounded numbers can have, exactly; 16 bits would hold two of their products."""
    weight = torch.full((40, 4096), 1.0)
    weight[::3] = -1
    with torch.no_grad():
        got = Int8Linear(weight, None)(torch.full((rows, 4096), -127.0))
    assert torch.equal(got, (-127.0 * 4096 * weight[:, 0]).expand(rows, 40)), "scales are 1 and 1/127"


@needs_int8
def test_int8_of_a_row_that_is_not_finite_is_not_finite() -> None:
    """And the other rows are what they were."""
    module, x = Int8Linear(torch.randn(24, 48), None), torch.randn(3, 48)
    expected = module(x)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x[1, 5] = bad
        got = module(x)
        assert not got[1].isfinite().any()
        assert torch.equal(got[::2], expected[::2])


@needs_int8
@pytest.mark.parametrize("name", ["opt", "gpt2", "gemma3", "llama"])
@pytest.mark.parametrize("schedule", ["top", "prompt-wide"])
def test_int8_layers_follow_schedules(name: str, schedule: str) -> None:
    """Step by step as in one pass; near the logits of the model it was made of; a row is alone in its batch."""
    plain = build(name)
    model, plan = attach(optimize(copy.deepcopy(plain), quantization="int8")), SCHEDULES[schedule]
    assert isinstance(model.get_output_embeddings(), Int8Linear)
    assert not any(type(part).__name__ in ("Linear", "Conv1D") for part in decoder_layers(model).modules())
    out = run(model, prompts(), plan)
    logits = torch.stack(out.logits, dim=1)
    again = new_token_logits(model, plan, out.sequences, prompts()["attention_mask"])
    assert distance(logits, again) < 0.1, "a rounding to 8 bits may fall to the other side"
    float_logits = new_token_logits(attach(plain), plan, out.sequences, prompts()["attention_mask"])
    assert 0 < distance(again, float_logits) < 0.35


# --- numbers


@needs_bfloat16
@pytest.mark.parametrize("name", PACKED)
def test_in_bfloat16_only_roundings_differ(name: str) -> None:
    """At falling depths and at a constant one; rows are padded on the left. With AMX some products of many rows do."""
    plain = build(name).to(torch.bfloat16)
    packed = attach(optimize(copy.deepcopy(plain), prepack=True))
    plain, inputs = attach(optimize(plain)), prompts(ROWS)
    assert any(isinstance(part, PackedLinear) for part in decoder_layers(packed).modules())
    for schedule in (Schedule.full(TOP.num_layers), TOP, SCHEDULES["constant"]):
        made = run(plain, inputs, schedule, max_new_tokens=8)
        expected, found = (
            new_token_logits(model, schedule, made.sequences, inputs["attention_mask"]).float()
            for model in (plain, packed)
        )
        assert distance(found, expected) < 0.03, schedule


@needs
@pytest.mark.parametrize("name", PACKED)
def test_in_float32_tokens_stay(name: str) -> None:
    """The product is another one: logits are near, and greedy tokens equal."""
    plain = build(name)
    packed = optimize(copy.deepcopy(plain), prepack=True)
    for schedule in (None, TOP) if name in FORMS else (TOP,):  # whose prompt runs all layers
        expected, found = (run(model, prompts(), schedule, max_new_tokens=6) for model in (plain, packed))
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
    packed = optimize(copy.deepcopy(plain), prepack=True)
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
        attach(optimize(build("llama"), prepack=True)),
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
        optimize(model, prepack=True)
    most, *layers = held[: len(weights) + 1]  # the first is the check's
    assert layers == list(range(most, 0, -1)), "each is freed before the next is made"
    assert not any(type(part) is nn.Linear for part in decoder_layers(model).modules())
    assert _bytes(decoder_layers(model)) == before


def test_a_tied_heads_embedding_stays(options: dict[str, Any]) -> None:
    """The head has weights of its own; the embedding embeds as before."""
    model = build("opt")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    before = model.get_input_embeddings().weight.clone()
    optimize(model, **options)
    assert torch.equal(model.get_input_embeddings()(torch.arange(128)), before)
    head = model.get_output_embeddings()
    assert isinstance(head, DecodingLinear)
    assert not hasattr(head, "weight")


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
    optimize(detach(model), prepack=True)
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
    optimize(detach(model), prepack=True)
    assert layers[2].mlp.up_proj is layers[1].mlp.up_proj
    assert torch.equal(run(model, prompts(), TOP).sequences, expected)


@needs
def test_packing_twice_is_once() -> None:
    """Also after optimize without it, which puts a hook on the head."""
    model = optimize(optimize(optimize(build("opt")), prepack=True), prepack=True)
    head: Any = model.get_output_embeddings()
    assert isinstance(head, PackedLinear)
    assert len(head._forward_pre_hooks) == 1


# --- together with others


def test_jobs_take_the_options_and_do_not_mix_with_others(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """A job with plain weights does not go on with the batches of one with others."""
    rows: dict[str, Any] = {"options": {"max_new_tokens": 4}, "batch_size": 1}
    job = GenerationJob(str(checkpoint), ["the cat", "a dog"], tmp_path / "texts.jsonl", **rows, **options)

    def stop(cost: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(on_batch=stop)
    with pytest.raises(SkipDecodeError, match="another"):
        GenerationJob(str(checkpoint), ["the cat", "a dog"], tmp_path / "texts.jsonl", **rows).run()
    assert job.run().summary["rows"] == 2


@pytest.mark.parametrize(
    "option",
    [
        pytest.param(["--quantization", "int8"], marks=needs_int8, id="int8"),
        pytest.param(["--prepack"], marks=needs, id="prepack"),
    ],
)
def test_the_command_takes_the_options(checkpoint: Path, option: list[str]) -> None:
    """Each writes a text."""
    done = command("generate", checkpoint, "--prompt", "the cat", "--max-new-tokens", 4, *option, "--json")
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
        (CPU, "bfloat16", "cuda", "is for CPUs, not 'cuda'"),
        (SimpleNamespace(quantization_config={"quant_method": "gptq"}), "bfloat16", "cpu", "is quantized already"),
    ],
    ids=["gpu", "quantized"],
)
@pytest.mark.parametrize("option", KINDS, ids=["int8", "prepack"])
def test_devices_and_quantized_checkpoints_are_refused_whatever_the_cpu_can_do(
    option: dict[str, Any], config: Any, dtype: str, device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its reason, from the config and the device alone: the CPU's products are not tried."""
    kind = linear_kind(**option)
    assert kind is not None
    monkeypatch.setattr(kind, "check_products", None)
    with pytest.raises(ModelError, match=message):
        check_optimizations("tiny", config, dtype, device, **option)


def test_a_cpu_without_the_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without them, one without oneDNN, a CPU for which oneDNN has none or whose sums overflow."""

    def none(*_: Any) -> Tensor:
        raise RuntimeError("needs the cpu support avx512bw")

    def overflowing(x: Tensor, *_: Any) -> Tensor:
        return torch.full((len(x), 16), 32767.0)

    for wrong in (none, overflowing):
        monkeypatch.setattr(torch.ops.onednn, "qlinear_prepack", lambda weight, _: weight)
        monkeypatch.setattr(torch.ops.onednn, "qlinear_pointwise", wrong)
        with pytest.raises(ModelError, match=r"needs a CPU with exact int8 products .*leave it out"):
            check_optimizations("tiny", CPU, "auto", "cpu", quantization="int8")
    with pytest.raises(ModelError, match=r"bfloat16 or float32, not torch\.float16"):
        PackedLinear.check_products(torch.float16)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", none)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    with pytest.raises(ModelError, match=r"no prepacked products of torch.bfloat16 .*avx512bw"):
        check_optimizations("tiny", CPU, "auto", "cpu", prepack=True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ModelError, match="built with oneDNN"):
        check_optimizations("tiny", CPU, "auto", "cpu", prepack=True)


@pytest.mark.parametrize("kind", [Int8Linear, PackedLinear])
def test_layers_without_linear_modules_are_refused_on_the_meta_device(kind: type[DecodingLinear]) -> None:
    """Nothing would be faster but the head. Experts are left plain by prepack, and refused by int8."""
    with torch.device("meta"):
        model = type(build("llama"))._from_config(FAMILIES["llama"][0](**FAMILIES["llama"][1]))
    check_linear(model, kind)
    for layer in decoder_layers(model):
        for name, part in list(layer.named_modules()):
            if isinstance(part, nn.Linear):
                layer.set_submodule(name, _Other(part.in_features, part.out_features))
    with pytest.raises(UnsupportedModel, match="only 0% of the weights"):
        check_linear(model, kind)
    for name in ("mixtral", "gpt-oss"):
        if kind is PackedLinear:
            check_linear(build(name), kind)
        else:
            with pytest.raises(UnsupportedModel, match=r"only \d+% of the weights"):
                check_linear(build(name), kind)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quantization": "int4"}, "quantization is int8 or None, not 'int4'"),
        ({"prepack": True, "quantization": "int8"}, "leave one of quantization and prepack out"),
        ({"prepack": True, "offload": "disk"}, "offloaded layers take no prepack"),
        ({"quantization": "int8", "offload": "disk"}, "offloaded layers take no quantization"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused_before_weights_are_read(
    given: dict[str, Any], message: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By load, and so by every verb."""
    monkeypatch.setattr("skipdecode.loading.load.read_weights", None)
    with pytest.raises(UsageError, match=message):
        load(str(checkpoint), device="cpu", **given)


def test_models_that_cannot_be_optimized_are_refused(options: dict[str, Any]) -> None:
    """Gates would stand below what they are to stand above; offloaded weights are not there; other kinds are."""
    with pytest.raises(ModelError, match="before attach"):
        optimize(attach(build("opt")), **options)
    offloaded = build("opt")
    setattr(decoder_layers(offloaded)[0], "_hf_hook", object())  # noqa: B010
    with pytest.raises(ModelError, match="offloaded take no"):
        optimize(offloaded, **options)
    with pytest.raises(UsageError, match="leave one of"):
        optimize(build("opt"), prepack=True, quantization="int8")


@needs
def test_packed_and_int8_weights_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one after the other."""
    monkeypatch.setattr(Int8Linear, "check_products", lambda dtype: None)
    with pytest.raises(ModelError, match="are those of prepack: load it anew"):
        optimize(optimize(build("opt"), prepack=True), quantization="int8")


@pytest.mark.parametrize("name", ["opt", "gpt2"])
def test_replaced_weights_are_neither_saved_copied_loaded_moved_nor_trained(
    name: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Each would go wrong without a word, or far from here."""
    plain, ids = build(name), prompts()["input_ids"]
    model = optimize(copy.deepcopy(plain), **options)
    with pytest.raises(ModelError, match="made when a model is loaded"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ModelError, match="made when a model is loaded"):
        model.state_dict()
    with pytest.raises(ModelError, match="made when a model is loaded"):
        pickle.dumps(model)
    with pytest.raises(ModelError, match="made when a model is loaded"):
        copy.deepcopy(model)
    with pytest.raises(ModelError, match="made when a model is loaded"):
        model.load_state_dict(plain.state_dict(), strict=False)
    with pytest.raises(ModelError, match="keep their device and type"):
        model.to(torch.bfloat16)
    model = optimize(copy.deepcopy(plain), **options)
    assert not model(ids).logits.requires_grad
    with pytest.raises(ModelError, match="are not trained"):
        model.requires_grad_(True)(ids)
    assert isinstance(model.to("cpu").get_output_embeddings(), DecodingLinear)


@pytest.mark.parametrize("tied", [True, False])
def test_replaced_weights_keep_their_type_and_size(options: dict[str, Any], tied: bool) -> None:
    """Under autocast a float32 product would stay one; a tied head of the old size would write old tokens alone."""
    plain = build("opt")
    if not tied:
        plain.config.tie_word_embeddings, plain._tied_weights_keys = False, None
        plain.lm_head.weight = nn.Parameter(plain.lm_head.weight.detach().clone())
    model = optimize(plain, **options)
    with pytest.raises(ModelError, match=r"leave torch\.autocast out"), torch.autocast("cpu"), torch.no_grad():
        model(**prompts())
    with pytest.raises(ModelError, match="resize or change them, load it without"):
        model.resize_token_embeddings(160)
    assert model(**prompts()).logits.shape[-1] == model.get_input_embeddings().weight.shape[0]


def test_a_weight_that_is_read_without_its_module_is_refused(options: dict[str, Any]) -> None:
    """By a pass of two tokens, when the weights are made: Jamba does so."""
    with pytest.raises(UnsupportedModel, match=r"JambaForCausalLM.* leave .* out"):
        optimize(build("jamba"), **options)


def test_a_compiled_model_leaves_its_graph_at_these_products(options: dict[str, Any]) -> None:
    """torch.compile traces none of them: inductor would fail on weights that are no constants."""
    kind = linear_kind(**options)
    traced: list[str] = []
    assert kind is not None
    module, x = kind(torch.randn(16, 16), None), torch.randn(4, 16)

    def backend(graph: Any, _: Any) -> Any:
        traced.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def around(x: Tensor) -> Tensor:
        return module(x + 1) * 2

    assert torch.equal(torch.compile(around, backend=backend)(x), around(x))
    assert traced
    assert not any("linear" in target for target in traced)
    torch._dynamo.reset()
