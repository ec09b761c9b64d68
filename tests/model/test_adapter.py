"""Adapters act only on positions that skip layers, step by step as in one pass; their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from helpers.families import (
    FORMS,
    LAYERS,
    SCHEDULES,
    TOP,
    build,
    distance,
    new_token_logits,
    prompts,
    reference_logits,
    run,
)
from skipdecode import Schedule, ScheduleError, SkipCache, attach, detach, teacher_forced
from skipdecode.errors import FileError, ModelError, UntrainedWarning
from skipdecode.model.adapter import (
    ABOUT,
    GENERATION,
    SAMPLE,
    WEIGHTS,
    Adapter,
    Bottleneck,
    LowRankBypass,
    check_base_files,
    load_adapter,
    locate_adapter,
    read_adapter,
    read_schedules,
    save_adapter,
)
from skipdecode.model.cache_name import CACHE
from skipdecode.model.inspect import gates_of, text_config
from skipdecode.model.lora import linear_sizes

FULL = Schedule.full(LAYERS)
TOLERANCE = 1e-5


def random_adapter(model: Any, schedule: Schedule) -> Adapter:
    """Bypasses, bottlenecks and LoRA that change hidden states much."""
    size, linears = text_config(model.config).hidden_size, linear_sizes(model)
    adapter = Adapter(size, 4, {schedule.target: schedule}, linears, 2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return adapter


@pytest.mark.parametrize("schedule", ["even", "permutation", "prompt", "prompt-wide"])
@pytest.mark.parametrize("name", FORMS)
def test_decoding_with_an_adapter_is_teacher_forcing(name: str, schedule: str) -> None:
    """Step by step or in one pass, each position gets what its own depth was taught, and it matters."""
    model, plan, mask = build(name), SCHEDULES[schedule], prompts()["attention_mask"]
    without = torch.stack(run(model, prompts(), plan).logits, 1)
    adapter = random_adapter(model, SkipCache(model, plan).schedule)
    output = run(attach(model, adapter=adapter), prompts(), plan)
    steps = torch.stack(output.logits, 1)
    assert distance(steps, new_token_logits(model, plan, output.sequences, mask)) < TOLERANCE
    assert distance(steps, reference_logits(model, plan, output.sequences, mask, adapter)) < TOLERANCE
    assert distance(steps, without) > 0.01


@pytest.mark.parametrize("name", FORMS)
def test_the_full_model_and_the_prompt_stay_as_they_are(name: str) -> None:
    """Bit for bit, whatever the adapter; and detach leaves nothing behind."""
    model, inputs = build(name), prompts()
    stock = run(model, inputs)
    attach(model, adapter=random_adapter(model, SkipCache(attach(model), TOP).schedule))
    for output in (run(model, inputs, FULL), run(model, inputs)):
        assert all(map(torch.equal, output.logits, stock.logits))
    assert torch.equal(run(model, inputs, TOP).logits[0], stock.logits[0])
    assert all(map(torch.equal, run(detach(model), inputs).logits, stock.logits))


def test_a_bypass_is_affine_and_a_bottleneck_sees_unit_variance() -> None:
    """Whatever the scale of the hidden states, their root mean square is 1 where the bottleneck's product begins."""
    hidden, (bypass, bottleneck) = 50 * torch.randn(64, 256), (LowRankBypass(256, 32), Bottleneck(256, 32))
    for weight in (bypass.up, bypass.bias, bottleneck.up):
        nn.init.normal_(weight)
    torch.testing.assert_close(bypass(hidden), hidden + hidden @ bypass.down @ bypass.up + bypass.bias)
    inside = hidden / hidden.square().mean(-1, keepdim=True).sqrt() @ bottleneck.down
    assert 0.9 < inside.std() < 1.1
    torch.testing.assert_close(bottleneck(hidden), hidden + inside * inside.sigmoid() @ bottleneck.up)


def test_modules_and_flops_are_those_of_the_spans_and_every_fourth_layer() -> None:
    """A new adapter changes nothing but by its biases, which are 0."""
    plan = Schedule.from_depths(LAYERS, [6, 3], order=(0, 7, 3, 4, 6, 1, 2, 5), warmup=0)
    adapter = Adapter(32, 4, {2.0: plan})
    assert set(adapter.bypasses) == {"2-3", "5-6", "1-3", "4-7"}
    assert set(adapter.bottlenecks) == {"3", "7"}
    assert list(adapter.changes((0, 3, 7))) == [1, 3, 4, 7]
    assert adapter.changes(range(LAYERS)) == {}
    assert adapter.flops((0, 3, 7)) == 4 * 2 * 2 * 32 * 4
    model = build("llama")
    expected = run(model, prompts(), plan).sequences
    assert torch.equal(run(attach(model, adapter=adapter), prompts(), plan).sequences, expected)


def test_schedules_that_it_was_not_trained_for_are_refused() -> None:
    """In decoding and in teacher forcing alike, and by attach before anything changes."""
    model = attach(build("llama"))
    adapter = random_adapter(model, TOP)
    other = TOP.replace(warmup=2)
    with pytest.raises(ScheduleError, match="cannot skip layers"):
        attach(model, other, adapter=adapter)
    assert gates_of(model).adapter is None
    attach(model, adapter=adapter)
    with pytest.raises(ScheduleError, match="cannot skip layers"):
        SkipCache(model, other)
    with pytest.raises(ScheduleError, match="cannot skip layers"), teacher_forced(model, other, 1):
        pass


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Path, Adapter]:
    """A model, the folder of an adapter for it, and the adapter."""
    model = build("llama")
    adapter = random_adapter(model, TOP)
    model.save_pretrained(tmp_path / "base")
    for _ in range(2):  # over an earlier one
        save_adapter(tmp_path / "run" / "adapter", adapter, model, "some/model")
    return model, tmp_path / "run" / "adapter", adapter


def test_a_folder_brings_the_adapter_back(saved: tuple[Any, Path, Adapter]) -> None:
    """The same schedules and weights; ``attach`` takes the folder, and the speed-up is known."""
    model, folder, adapter = saved
    again = load_adapter(folder, model)
    assert again.schedules == read_schedules(folder) == adapter.schedules
    assert all(map(torch.equal, again.parameters(), adapter.parameters()))
    attach(model, adapter=folder, speedup=TOP.target)
    output = model.generate(**prompts(), max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    assert output[CACHE].schedule == TOP


def test_the_names_in_the_files_stay(saved: tuple[Any, Path, Adapter]) -> None:
    """Adapters that were published earlier are read, by this version and by others."""
    model, folder, adapter = saved
    assert sorted(path.name for path in folder.iterdir()) == ["adapter.safetensors", "skipdecode_adapter.json"]
    about = json.loads((folder / ABOUT).read_text())
    assert {"base_model", "rank", "lora_rank", "schedules"} <= about.keys()
    weights = load_file(folder / WEIGHTS)
    kinds = {(name.split(".")[0], name.split(".")[-1]) for name in weights}
    spans = {("stand_ins", part) for part in ("down", "up", "bias")} | {("base_model_sample", "weight")}
    assert kinds == spans | {("bottlenecks", part) for part in ("down", "up")} | {("base_model", "weight")}
    assert weights["base_model.model.model.layers.7.mlp.up_proj.lora_A.weight"].shape[0] == about["lora_rank"]
    assert about["skipdecode_adapter"] == 3
    save_adapter(folder, Adapter(model.config.hidden_size, 4, adapter.schedules), model, "some/model")
    assert json.loads((folder / ABOUT).read_text())["skipdecode_adapter"] == 2


def test_an_adapter_is_stored_in_the_models_precision(saved: tuple[Any, Path, Adapter], tmp_path: Path) -> None:
    model, folder, adapter = saved
    save_adapter(tmp_path / "half", adapter, model.bfloat16(), "some/model")
    for at, dtype in ((folder, torch.float32), (tmp_path / "half", torch.bfloat16)):
        weights = load_file(at / WEIGHTS).items()
        assert {weight.dtype for name, weight in weights if not name.startswith(SAMPLE)} == {dtype}
    attach(model, adapter=folder)
    assert {weight.dtype for weight in gates_of(model).adapter.parameters()} == {torch.bfloat16}


def change(model: Any, factor: float = 1.5) -> None:
    """Change one matrix."""
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight.mul_(factor)


def test_another_model_is_refused(saved: tuple[Any, Path, Adapter], tmp_path: Path) -> None:
    """One changed matrix is enough, in memory and in files; the same model in bfloat16 is the same model."""
    model, folder, _ = saved
    load_adapter(folder, model.bfloat16())
    check_base_files(folder, tmp_path / "base")
    count = len(list(model.parameters()))
    change(model)
    model.save_pretrained(tmp_path / "other")
    for compare in (lambda: attach(model, adapter=folder), lambda: check_base_files(folder, tmp_path / "other")):
        with pytest.raises(ModelError, match=rf"another model \(some/model\): 1 of {count} weights differ"):
            compare()
    with pytest.raises(ModelError, match="another model"):
        attach(build("opt"), adapter=folder)
    assert gates_of(model) is None


def test_weights_that_are_near_are_warned_of(saved: tuple[Any, Path, Adapter], tmp_path: Path) -> None:
    """With the distance; of an adapter that was saved without samples, that they are unknown."""
    model, folder, _ = saved
    change(model, 1.03)
    model.save_pretrained(tmp_path / "near")
    for compare in (lambda: attach(model, adapter=folder), lambda: check_base_files(folder, tmp_path / "near")):
        with pytest.warns(UntrainedWarning, match=r"some/model: 1 of .* weights differ, by up to (2\.9|3\.0|3\.1)%"):
            compare()
    weights = load_file(folder / WEIGHTS)
    save_file({name: each for name, each in weights.items() if not name.startswith(SAMPLE)}, folder / WEIGHTS)
    with pytest.warns(UntrainedWarning, match="holds no samples"):
        load_adapter(folder, model)


@pytest.mark.parametrize("form", ["shards", "bare", "beside"])
def test_files_are_those_that_transformers_reads(saved: tuple[Any, Path, Adapter], tmp_path: Path, form: str) -> None:
    """In shards, without the prefix of the model's class, beside a file of another format."""
    model, folder, _ = saved
    base = tmp_path / form
    model.save_pretrained(base, max_shard_size="20KB" if form == "shards" else "1GB")
    if form == "bare":
        weights = load_file(base / "model.safetensors")
        save_file({name.removeprefix("model."): weight for name, weight in weights.items()}, base / "model.safetensors")
    if form == "beside":
        (base / "consolidated.safetensors").write_bytes(b"of another format")
    check_base_files(folder, base)
    change(model)
    model.save_pretrained(base, max_shard_size="20KB" if form == "shards" else "1GB")
    with pytest.raises(ModelError, match="1 of"):
        check_base_files(folder, base)
    for file in base.glob("model*.safetensors"):
        file.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        check_base_files(folder, base)


@pytest.mark.parametrize("kind", ["float16", "offloaded"])
def test_weights_that_cannot_be_compared_in_memory_are_compared_in_files(
    saved: tuple[Any, Path, Adapter], tmp_path: Path, kind: str
) -> None:
    """Where there are none, the user is told how to load the model."""
    _, folder, _ = saved
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = model.half() if kind == "float16" else model.to("meta")
    load_adapter(folder, model, lambda: tmp_path / "base")
    with pytest.raises(ModelError, match="cannot be compared"):
        load_adapter(folder, model)
    other = build("llama")
    change(other)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match="another model"):
        load_adapter(folder, model, lambda: tmp_path / "other")


def test_a_name_on_the_hub_has_one_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is no folder here; of the repository, the adapter's own files are downloaded."""
    download = mock.Mock(return_value="x")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me" / "here").mkdir(parents=True)
    for name in ("./fast", "~/fast", "/fast", "fast", "a/b/fast", "me/here", Path("me/here")):
        assert locate_adapter(name) == Path(name)
    assert not download.called
    for hub_name in ("me/fast", Path("me/fast")):
        assert locate_adapter(hub_name) == Path("x")
    assert download.call_args_list == [mock.call("me/fast", allow_patterns=[ABOUT, WEIGHTS, GENERATION])] * 2


@pytest.mark.parametrize("file", [ABOUT, WEIGHTS])
def test_a_damaged_folder_is_named(saved: tuple[Any, Path, Adapter], file: str) -> None:
    """Cut, or missing."""
    model, folder, _ = saved
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(FileError, match="adapter"):
        attach(model, adapter=folder)
    (folder / file).unlink()
    with pytest.raises(FileError, match="adapter"):
        attach(model, adapter=folder)
    with pytest.raises(FileError, match="neither a folder nor a Hub repository"):
        locate_adapter("no-one/nothing")


@pytest.mark.parametrize(
    "changes", [{"schedules": {"x": {}}}, {"schedules": None}, {"rank": "x"}, {"skipdecode_adapter": None}, "no base"]
)
def test_values_that_are_wrong_or_missing_are_named(saved: tuple[Any, Path, Adapter], changes: Any) -> None:
    _, folder, _ = saved
    about = json.loads((folder / ABOUT).read_text("utf-8"))
    if changes == "no base":
        changes = about.pop("base_model") and {}
    (folder / ABOUT).write_text(json.dumps(about | changes))
    with pytest.raises((FileError, ModelError), match="adapter"):
        read_adapter(folder)


def test_a_folder_of_another_version_is_refused(saved: tuple[Any, Path, Adapter]) -> None:
    """Its modules may stand elsewhere: it is not read as something else."""
    _, folder, _ = saved
    about = json.loads((folder / ABOUT).read_text("utf-8"))
    (folder / ABOUT).write_text(json.dumps(about | {"skipdecode_adapter": 1}))
    with pytest.raises(FileError, match="another version"):
        read_schedules(folder)
