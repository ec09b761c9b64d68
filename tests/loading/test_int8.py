"""Int8 and prepacked linear modules: the same numbers up to rounding, with schedules, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.families import FAMILIES, LENGTHS, SCHEDULES, TOP, build, distance, new_token_logits, prompts, run
from skipdecode import Schedule, attach, load
from skipdecode.errors import ModelError, UsageError
from skipdecode.loading import int8
from skipdecode.loading.int8 import Int8Linear, PackedLinear, linear_class, optimize
from skipdecode.model.inspect import decoder_layers

#: As many rows as F.linear needs to take oneDNN's product for weights as small as these: below it has one of its own.
ROWS = (9, 5, 2) * 8
#: Jamba multiplies with a module's weight itself.
PACKED = [name for name in FAMILIES if name != "jamba"]
#: Linear modules, GPT-2's, experts, layers of several kinds.
KINDS = [name for name in ("gpt2", "gemma3", "mixtral", "qwen3.5") if name in FAMILIES]


def _runs(kind: Any, dtype: torch.dtype = torch.float32) -> bool:
    try:
        kind(torch.zeros(16, 16, dtype=dtype), None)(torch.zeros(1, 16, dtype=dtype))
    except (AttributeError, RuntimeError):
        return False
    return True


needs = pytest.mark.skipif(not _runs(PackedLinear), reason="no oneDNN")
needs_bfloat16 = pytest.mark.skipif(not _runs(PackedLinear, torch.bfloat16), reason="no bfloat16 products")
needs_int8 = pytest.mark.skipif(not int8._int8_is_exact(), reason="no exact int8 products")


@pytest.fixture(params=[{"quantization": "int8"}, {"prepack": True}], ids=["int8", "prepack"])
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Each option, for what holds however exact this CPU's products are."""
    monkeypatch.setattr(int8, "_int8_is_exact", lambda: True)
    kind = linear_class(**{"quantization": None, "prepack": False} | request.param, device="cpu")
    if kind is None or not _runs(kind):
        pytest.skip("this torch has no such products")
    return dict(request.param)


# --- the head's input


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_heads_16_bit_inputs_are_contiguous(checkpoint: Path, dtype: str) -> None:
    """Of a view, the head's weight would be copied for each row; in float32 bits stay as they are."""
    model, _ = load(checkpoint, dtype=dtype, device="cpu")
    seen: list[Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda head, args: seen.append(args[0]))
    run(model, prompts(), TOP)
    assert len(seen) > 2
    assert seen[0].shape[:2] == (len(LENGTHS), 1)
    assert seen[0].is_contiguous() == (dtype == "bfloat16")


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
    weight_scale, row_scale = weight.abs().amax(1, keepdim=True) / 127, rows.abs().amax(-1, keepdim=True) / 127
    rounded = (rows / row_scale.clamp_min(1e-30)).round() * row_scale
    expected = rounded @ ((weight / weight_scale).round() * weight_scale).t()
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


def test_int8_of_a_row_that_is_not_finite_is_not_finite(options: dict[str, Any]) -> None:
    """And the other rows are what they were."""
    kind = linear_class(options.get("quantization"), options.get("prepack", False), "cpu")
    assert kind is not None
    module, x = kind(torch.randn(24, 48), None), torch.randn(3, 48)
    expected = module(x)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x[1, 5] = bad
        got = module(x)
        assert not got[1].isfinite().any()
        assert torch.equal(got[::2], expected[::2])


@needs_int8
@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
@pytest.mark.parametrize("schedule", ["top", "prompt-wide"])
def test_int8_layers_follow_schedules(name: str, schedule: str) -> None:
    """Step by step as in one pass; near the logits of the model it was made of."""
    plain = build(name)
    model, plan = attach(optimize(copy.deepcopy(plain), "int8")), SCHEDULES[schedule]
    out = run(model, prompts(), plan)
    logits = torch.stack(out.logits, dim=1)
    again = new_token_logits(model, plan, out.sequences, prompts()["attention_mask"])
    assert distance(logits, again) < 0.1, "a rounding to 8 bits may fall to the other side"
    float_logits = new_token_logits(attach(plain), plan, out.sequences, prompts()["attention_mask"])
    assert 0 < distance(again, float_logits) < 0.35


def test_a_cpu_whose_sums_overflow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would write other texts without a word; so is a torch without the kernel."""

    def none(*_: Any) -> Tensor:
        raise RuntimeError("needs the cpu support avx512bw")

    for wrong in (none, lambda x, *_: torch.full((len(x), 16), 32767.0)):
        monkeypatch.setattr(int8, "_product", wrong)
        with pytest.raises(ModelError, match="VNNI or AMX"):
            linear_class("int8", False, "cpu")


# --- prepacked


@needs_bfloat16
@pytest.mark.parametrize("name", KINDS)
def test_prepacked_bfloat16_differs_by_roundings_alone(name: str) -> None:
    """Rows are padded on the left. With AMX some products of many rows do."""
    plain = build(name).to(torch.bfloat16)
    packed = attach(optimize(copy.deepcopy(plain), prepack=True))
    plain, inputs = attach(optimize(plain)), prompts(ROWS)
    assert any(isinstance(part, PackedLinear) for part in decoder_layers(packed).modules())
    for schedule in (Schedule.full(TOP.num_layers), TOP):
        made = run(plain, inputs, schedule, max_new_tokens=4)
        expected, found = (
            new_token_logits(model, schedule, made.sequences, inputs["attention_mask"]).float()
            for model in (plain, packed)
        )
        assert distance(found, expected) < 0.03, schedule


@needs
@pytest.mark.parametrize("name", PACKED)
def test_prepacked_float32_writes_the_same_tokens(name: str) -> None:
    """The kernel is another one: logits are near, and greedy tokens equal."""
    plain = build(name)
    packed = optimize(copy.deepcopy(plain), prepack=True)
    expected, found = (run(model, prompts(), TOP, max_new_tokens=5) for model in (plain, packed))
    assert torch.equal(found.sequences, expected.sequences)
    assert distance(torch.stack(found.logits), torch.stack(expected.logits)) < 1e-4


@needs
@pytest.mark.parametrize("shape", [(48,), (1, 48), (2, 3, 48), (0, 48), (2, 0, 48)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_module_takes_what_a_linear_module_takes(shape: tuple[int, ...], bias: bool) -> None:
    """Rows of any number, none included, and views."""
    linear = nn.Linear(48, 24, bias=bias).requires_grad_(False)
    packed, x = PackedLinear(linear.weight, linear.bias), torch.randn(shape)
    assert packed(x).shape == linear(x).shape
    assert torch.allclose(packed(x), linear(x), atol=1e-5)
    view = torch.randn(5, 48).expand(3, 5, 48)[:, -1:]
    assert torch.allclose(packed(view), linear(view), atol=1e-5)


# --- both


@pytest.mark.parametrize("name", ["opt", "gpt2", "llama"])
def test_layers_and_head_are_replaced_and_the_embedding_stays(name: str, options: dict[str, Any]) -> None:
    """A head that is tied to it gets a weight of its own."""
    model = build(name)
    before = model.get_input_embeddings().weight.clone()
    optimize(model, **options)
    assert isinstance(model.get_output_embeddings(), (Int8Linear, PackedLinear))
    assert not any(type(part).__name__ in ("Linear", "Conv1D") for part in decoder_layers(model).modules())
    assert torch.equal(model.get_input_embeddings()(torch.arange(128)), before)
    model.generate(**prompts(), max_new_tokens=2)


class _Other(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_subclasses_of_linear_modules_stay(options: dict[str, Any]) -> None:
    """They do more than a product."""
    model = build("llama")
    layers: Any = decoder_layers(model)
    layers[1].mlp.up_proj.__class__ = _Other
    optimize(model, **options)
    assert type(layers[1].mlp.up_proj) is _Other
    assert isinstance(layers[0].mlp.up_proj, (Int8Linear, PackedLinear))


def test_a_model_with_replaced_weights_is_neither_saved_nor_trained(options: dict[str, Any], tmp_path: Path) -> None:
    model = optimize(build("opt"), **options)
    with pytest.raises(ModelError, match="cannot be saved: load it without them"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    assert not model(prompts()["input_ids"]).logits.requires_grad


@pytest.mark.parametrize(
    ("quantization", "prepack", "device", "match"),
    [
        ("int4", False, "cpu", "int8 or None, not 'int4'"),
        ("int8", True, "cpu", "leave quantization or prepack out"),
        ("int8", False, "cuda", "for CPUs, not 'cuda'"),
        (None, True, "cuda", "for CPUs, not 'cuda'"),
    ],
)
def test_what_cannot_be_replaced_is_refused(quantization: Any, prepack: bool, device: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        linear_class(quantization, prepack, device)
