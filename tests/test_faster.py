"""Faster layers: the head's input, compiled decode steps, int8 weights. Each with schedules, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

import skipdecode
from helpers.families import (
    FAMILIES,
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
from skipdecode import Schedule, SkipCache, attach, detach
from skipdecode.core.stack import decoder_layers
from skipdecode.errors import ModelError, SkipDecodeError, UnsupportedModel, UsageError
from skipdecode.generation.batch import generate_batch
from skipdecode.generation.jobs import GenerationJob
from skipdecode.weights import faster, int8
from skipdecode.weights.device import cpu_capabilities
from skipdecode.weights.faster import CompiledStep, check_faster, is_compiled, make_faster
from skipdecode.weights.int8 import Int8Linear, check_int8, check_linear, quantize_int8
from skipdecode.weights.loading import load, read_weights

VNNI = {"avx512_vnni": True}
CPU = SimpleNamespace()
needs_int8 = pytest.mark.skipif(
    not any(have is True and "vnni" in key for key, have in cpu_capabilities().items()), reason="no VNNI"
)


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


# --- compiled steps


@pytest.fixture
def _eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch.compile traces and guards, without the minutes of its code generation."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(faster._run, dynamic=True, backend="eager")
    monkeypatch.setattr(faster, "_compiled", lambda: compiled)
    yield
    torch._dynamo.reset()


def _graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.slow
@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("name", ["opt", "llama", "gemma3"])
def test_one_compiled_layer_serves_all_and_every_schedule(name: str) -> None:
    """Falling depths, growing text, other schedules: the tokens are eager's, and no layer is compiled anew."""
    model, inputs = attach(build(name)), prompts()
    expected = {key: run(model, inputs, plan).sequences for key, plan in SCHEDULES.items()}
    attach(make_faster(detach(model), compile=True))
    assert torch.equal(run(model, inputs, TOP).sequences, expected["top"])
    first = _graphs()
    kinds = len(set(getattr(model.config, "layer_types", None) or [""]))
    assert 0 < first <= 4 * kinds, "before attention, attention, after it: not once per layer"
    for key, plan in SCHEDULES.items():
        assert torch.equal(run(model, inputs, plan).sequences, expected[key]), key
    assert _graphs() == first


@pytest.mark.usefixtures("_eager")
def test_steps_are_compiled_and_prompts_are_not() -> None:
    """A prompt of any length compiles nothing; nor does a model without a SkipCache, whose cache knows no gates."""
    model = attach(make_faster(build("opt"), compile=True))
    run(model, prompts(), TOP, max_new_tokens=1)
    run(model, prompts((9, 4)), max_new_tokens=4)
    assert _graphs() == 0
    cache = SkipCache(model, TOP)
    with torch.no_grad():
        model(torch.tensor([[5], [6]]), past_key_values=cache)  # a prompt of one token
    assert _graphs() == 0
    run(model, prompts(), TOP, max_new_tokens=3)
    assert _graphs() > 0


@pytest.mark.usefixtures("_eager")
def test_a_copy_of_a_compiled_model_runs_its_own_weights() -> None:
    """And the original goes on with its own."""
    model = attach(make_faster(build("opt"), compile=True))
    before = run(model, prompts(), TOP).sequences
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in decoder_layers(twin).parameters():
            parameter.mul_(-1.5)
    stock = build("opt")
    stock.load_state_dict(twin.state_dict())
    assert torch.equal(run(twin, prompts(), TOP).sequences, run(attach(stock), prompts(), TOP).sequences)
    assert torch.equal(run(model, prompts(), TOP).sequences, before)


@pytest.mark.usefixtures("_eager")
def test_full_depth_is_compiled_too(checkpoint: Path) -> None:
    """Through the full schedule: a stock cache would have each layer compiled apart."""
    model, tokenizer = load(str(checkpoint), dtype="float32", compile=True)
    assert all(map(is_compiled, decoder_layers(model)))
    ids = [[5, 6, 7, 8], [9, 10]]
    rows, cost = generate_batch(model, tokenizer, ids, None, max_new_tokens=5, min_new_tokens=5)
    assert 0 < _graphs() <= 4
    assert cost.layer_steps == 4 * LAYERS
    plain, stock = load(str(checkpoint), dtype="float32")[0], [*rows]
    assert not is_compiled(decoder_layers(plain)[0])
    assert generate_batch(plain, tokenizer, ids, None, max_new_tokens=5, min_new_tokens=5)[0] == stock


@pytest.mark.slow
@pytest.mark.usefixtures("_eager")
def test_batches_that_fit_are_compiled_too(checkpoint: Path) -> None:
    """What ``batch_size="auto"`` measures is not compiled; what comes after it is."""
    model, tokenizer = load(str(checkpoint), dtype="float32", compile=True)
    options: dict[str, Any] = {"speedup": 2, "max_new_tokens": 6, "eos_token_id": None}
    texts = ["the cat sat", "a dog"]
    found = skipdecode.generate(model, tokenizer, texts, batch_size="auto", **options)
    assert _graphs() > 0
    plain, _ = load(str(checkpoint), dtype="float32")
    assert found.completions == skipdecode.generate(plain, tokenizer, texts, **options).completions


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"prepack": True}, pytest.param({"quantization": "int8"}, marks=needs_int8)],
    ids=["plain", "prepack", "int8"],
)
def test_inductor_writes_what_eager_writes(options: dict[str, Any]) -> None:
    """The real compiler, once."""
    try:
        check_faster("tiny", CPU, "float32", "cpu", {}, compile=True)
    except ModelError as error:
        pytest.skip(str(error))
    model = attach(make_faster(build("llama"), **options))
    expected = run(model, prompts(), TOP).sequences
    attach(make_faster(detach(model), compile=True, **options))
    assert torch.equal(run(model, prompts(), TOP).sequences, expected)
    torch._dynamo.reset()


def test_no_compiler_is_said_before_weights_are_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be an exception of inductor's, in the first step."""
    import torch._inductor.cpp_builder as cpp_builder

    def none() -> str:
        raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    monkeypatch.setattr("skipdecode.weights.loading.read_weights", None)
    with pytest.raises(ModelError, match=r"needs a C\+\+ compiler .*install g\+\+"):
        load(str(checkpoint), device="cpu", compile=True)


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
@pytest.mark.parametrize("name", ["opt", "gpt2"])
def test_int8_weights_are_copied_and_not_changed(name: str) -> None:
    """A copy writes the same; what would change or lose them without a word is refused."""
    model = make_faster(build(name), quantization="int8")
    expected = run(model, prompts(), TOP).sequences
    assert torch.equal(run(copy.deepcopy(model), prompts(), TOP).sequences, expected)
    with pytest.raises(ModelError, match="not saved"):
        model.state_dict()
    with pytest.raises(ModelError, match="are not trained"):
        detach(model).requires_grad_(True)(prompts()["input_ids"])
    with pytest.raises(ModelError, match="keep their device and type"):
        model.bfloat16()


@needs_int8
@pytest.mark.parametrize("name", ["opt", "gpt2", "gemma3", "llama"])
@pytest.mark.parametrize("schedule", ["top", "prompt-wide"])
def test_int8_layers_follow_schedules(name: str, schedule: str) -> None:
    """Step by step as in one pass; near the logits of the model it was made of; a row is alone in its batch."""
    plain = build(name)
    model, plan = attach(make_faster(copy.deepcopy(plain), quantization="int8")), SCHEDULES[schedule]
    assert isinstance(model.get_output_embeddings(), Int8Linear)
    assert not any(type(part).__name__ in ("Linear", "Conv1D") for part in decoder_layers(model).modules())
    out = run(model, prompts(), plan)
    logits = torch.stack(out.logits, dim=1)
    again = new_token_logits(model, plan, out.sequences, prompts()["attention_mask"])
    assert distance(logits, again) < 0.1, "a rounding to 8 bits may fall to the other side"
    float_logits = new_token_logits(attach(plain), plan, out.sequences, prompts()["attention_mask"])
    assert 0 < distance(again, float_logits) < 0.35


@needs_int8
def test_a_tied_heads_embedding_stays() -> None:
    """The head gets int8 weights of its own; the embedding is the float one."""
    model = build("opt")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    before = model.get_input_embeddings().weight.clone()
    quantize_int8(model)
    assert torch.equal(model.get_input_embeddings().weight, before)
    head = model.get_output_embeddings()
    assert isinstance(head, Int8Linear)
    assert head.int8_weight.dtype == torch.int8
    assert not hasattr(head, "weight")


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize(
    "options", [pytest.param({"quantization": "int8"}, marks=needs_int8), {"prepack": True}], ids=["int8", "prepack"]
)
def test_other_weights_and_compiled_steps_write_what_eager_ones_write(
    checkpoint: Path, options: dict[str, Any]
) -> None:
    """Options combine; tokens do not change with the compiler."""
    texts = []
    for compiled in (False, True):
        model, tokenizer = load(str(checkpoint), dtype="float32", compile=compiled, **options)
        result = skipdecode.generate(model, tokenizer, ["the cat sat", "a dog"], speedup=2, max_new_tokens=6)
        texts.append([completion.text for completion in result.completions])
    assert texts[0] == texts[1]
    assert _graphs() > 0


@needs_int8
def test_int8_weights_are_not_saved(checkpoint: Path, tmp_path: Path) -> None:
    """Nobody could read them."""
    model, _ = load(str(checkpoint), quantization="int8")
    with pytest.raises(ModelError, match="not saved: load it without quantization"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "device", "capabilities", "message"),
    [
        (CPU, "cuda", VNNI, "is for CPUs"),
        (SimpleNamespace(quantization_config={"quant_method": "gptq"}), "cpu", VNNI, "quantized already"),
        (CPU, "cpu", {"avx2": True, "avx512_vnni": False}, "needs a CPU that multiplies int8"),
    ],
    ids=["gpu", "quantized", "old"],
)
def test_int8_that_cannot_be_is_refused(config: Any, device: str, capabilities: dict[str, Any], message: str) -> None:
    """With its reason, from the config and the machine alone."""
    with pytest.raises(ModelError, match=message):
        check_int8("tiny", config, device, capabilities)
    check_int8("tiny", CPU, "cpu", VNNI)


@pytest.mark.parametrize(
    ("cpuinfo", "says"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512_vnni\n", None),
        ("flags : fpu amx_int8\n", None),
        ("flags\t\t: fpu avx2 avx512f\n", "needs a CPU that multiplies int8"),
        ("Features\t: fp asimd\n", "needs a CPU that multiplies int8"),
        ("processor : 0\n", r"neither torch .* nor .* says whether"),
        (None, r"neither torch .* nor .* says whether .* leave it out"),
    ],
    ids=["vnni", "amx", "old", "arm", "silent", "none"],
)
def test_int8_where_torch_does_not_know_the_cpu(
    cpuinfo: str | None, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux is asked; what nobody knows is refused, since sums may overflow there."""
    monkeypatch.setattr(int8, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(int8, "_sums_exactly", lambda: True)
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    if says is None:
        check_int8("tiny", CPU, "cpu", {})
        return
    with pytest.raises(ModelError, match=says):
        check_int8("tiny", CPU, "cpu", {})


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_experts_are_refused_on_the_sketch(name: str) -> None:
    """Their weights are in no linear module: int8 would be a few percent of the layers."""
    with torch.device("meta"):
        model = type(build("llama"))._from_config(FAMILIES["llama"][0](**FAMILIES["llama"][1]))
    check_linear(model)
    with pytest.raises(UnsupportedModel, match=r"only \d+% of the weights"):
        check_linear(build(name))


def test_a_weight_that_is_read_past_its_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a pass of two tokens, when the weights are made."""
    model = build("llama")
    attention: Any = type(decoder_layers(model)[0].self_attn)
    found = attention.forward
    monkeypatch.setattr(attention, "forward", lambda self, *a, **k: (self.q_proj.weight, found(self, *a, **k))[1])
    with pytest.raises(UnsupportedModel, match="reads its weights past their modules"):
        quantize_int8(model)


# --- both


def _offloaded(model: PreTrainedModel) -> PreTrainedModel:
    setattr(decoder_layers(model)[0], "_hf_hook", object())  # noqa: B010
    return model


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [(attach, {}, "before attach"), (_offloaded, {"compile": True}, "offloaded")],
    ids=["attached", "offloaded"],
)
def test_models_that_cannot_be_made_faster_are_refused(
    change: Callable[[PreTrainedModel], PreTrainedModel], options: dict[str, Any], message: str
) -> None:
    """Gates would stand below what they are to stand above; weights on a disk are not there to be changed."""
    with pytest.raises(ModelError, match=message):
        make_faster(change(build("opt")), **options)


def test_making_faster_twice_is_once() -> None:
    """One hook on the head, one wrapper on a layer."""
    model = make_faster(make_faster(build("opt"), compile=True), compile=True)
    layer = decoder_layers(model)[0]
    assert isinstance(layer.forward, CompiledStep)
    assert not isinstance(layer.forward.original, CompiledStep)
    assert len(model.get_output_embeddings()._forward_pre_hooks) == 1


def test_an_unknown_quantization_is_refused_before_weights_are_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By load, and so by every verb."""
    monkeypatch.setattr("skipdecode.weights.loading.read_weights", None)
    with pytest.raises(UsageError, match="quantization is int8 or None, not 'int4'"):
        load(str(checkpoint), quantization="int4")


@needs_int8
def test_jobs_take_the_options_and_do_not_mix_with_others(checkpoint: Path, tmp_path: Path) -> None:
    """The command writes with int8; a job in floats does not go on with its batches."""
    output = tmp_path / "texts.jsonl"
    job = GenerationJob(
        str(checkpoint), ["the cat", "a dog"], output, batch_size=1, quantization="int8", options={"max_new_tokens": 4}
    )

    def stop(cost: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(on_batch=stop)
    with pytest.raises(SkipDecodeError, match="another"):
        replace(job, quantization=None).run()
    assert job.run().summary["rows"] == 2
    options = ("--prompt", "the cat", "--max-new-tokens", 4, "--quantization", "int8", "--json")
    done = command("generate", checkpoint, *options)
    assert done.returncode == 0, done.stderr
