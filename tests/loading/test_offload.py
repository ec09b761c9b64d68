"""Offloaded layers: a skipped one is never read, the most used ones stay, tokens are the same."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import skipdecode
from helpers.families import FORMS, LAYERS, SCHEDULES, TOP, build, prompts, run, same
from skipdecode import Schedule, attach, detach
from skipdecode.errors import ModelError, UsageError
from skipdecode.loading import offload
from skipdecode.loading.load import Checkpoint
from skipdecode.loading.offload import GIB, Offload
from skipdecode.model.adapter import Adapter
from skipdecode.model.inspect import decoder_layers

accelerate = pytest.importorskip("accelerate")

PROMPTS = ["the cat sat on", "a dog", "the small old house by the river sat"]


def offloaded(model: nn.Module) -> list[int]:
    """Layers whose weights are not in memory."""
    return [i for i, layer in enumerate(decoder_layers(model)) if next(layer.parameters()).is_meta]


@contextmanager
def loads(model: nn.Module) -> Iterator[Counter[int]]:
    """Count the layers that accelerate loads, by the first part of each that has weights."""
    from accelerate.hooks import AlignDevicesHook

    found: Counter[int] = Counter()
    firsts = [next(part for part in layer.modules() if part._parameters) for layer in decoder_layers(model)]
    layers = {id(part): index for index, part in enumerate(firsts)}
    before = AlignDevicesHook.pre_forward

    def counted(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.offload and id(module) in layers:
            found[layers[id(module)]] += 1
        return before(self, module, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AlignDevicesHook, "pre_forward", counted)
        yield found


def runs(schedule: Schedule, width: int, steps: int) -> Counter[int]:
    """How often each layer runs: in the prompt's pass and in the steps."""
    ran = [layer for layer, count in enumerate(schedule.positions_per_layer(width, width)) if count]
    for step in range(steps):
        ran += schedule.layers(schedule.depth(step))
    return Counter(ran)


@pytest.mark.parametrize("speedup", [1, 5])
def test_a_layer_is_loaded_as_often_as_it_runs(speedup: float, checkpoint: Path) -> None:
    """Skipped layers are not; tokens and memory are those of the model in memory."""
    schedule = Schedule.for_speedup(speedup, LAYERS, horizon=8, decay="linear")
    options: dict[str, Any] = {"schedule": schedule, "max_new_tokens": 12, "eos_token_id": -1}
    expected = skipdecode.generate(*skipdecode.load(checkpoint, device="cpu"), PROMPTS, **options)
    model, tokenizer = skipdecode.load(checkpoint, device="cpu", offload="disk")
    with loads(model) as found:
        result = skipdecode.generate(model, tokenizer, PROMPTS, **options)
    assert result.completions == expected.completions
    assert result.stats.peak_kv_bytes == expected.stats.peak_kv_bytes
    assert found == runs(schedule, max(map(len, tokenizer(PROMPTS).input_ids)), result.stats.steps)


@pytest.mark.parametrize("name", [*FORMS[1:], "mixtral"])
def test_every_form_of_model_is_offloaded(name: str, tmp_path: Path) -> None:
    """Logits are those of the model in memory. Experts, which transformers converts, come from another folder."""
    build(name).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    checkpoint = Checkpoint.resolve(tmp_path / "model")
    whole = checkpoint.load(device="cpu")
    model = checkpoint.load(device="cpu", offload=Offload("disk", folder=tmp_path / "more"))
    assert offloaded(model) == list(range(LAYERS))
    stock, found = (run(each, prompts(), SCHEDULES["prompt-wide"], max_new_tokens=5) for each in (whole, model))
    assert same(found, stock)
    stock, found = (run(detach(each), prompts(), max_new_tokens=3) for each in (whole, model))
    assert same(found, stock)


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload"])
@pytest.mark.parametrize("attached", ["before", "after"])
def test_models_that_others_offloaded_skip(way: str, attached: str, tmp_path: Path) -> None:
    """accelerate's cpu_offload and disk_offload, before or after attach: skipped layers are not loaded."""
    model, inputs = build("llama"), prompts()
    expected = run(model, inputs, TOP).sequences
    detach(model)
    if attached == "before":
        attach(model)
    folder = {} if way == "cpu_offload" else {"offload_dir": str(tmp_path)}
    getattr(accelerate, way)(model, execution_device="cpu", **folder)
    with loads(model) as count:
        found = run(model, inputs, TOP).sequences
    assert torch.equal(found, expected)
    width = inputs["input_ids"].shape[1]
    assert count == runs(TOP, width, found.shape[1] - width - 1)
    adapter = Adapter(model.config.hidden_size, 4, {2.0: TOP})
    attach(model, adapter=adapter)  # whose weights stay where they are, though the model's are on no device
    assert torch.equal(run(model, inputs, TOP).sequences, found)  # untrained, it changes nothing


def sizes(checkpoint: Path) -> tuple[int, int]:
    """Bytes of what always stays, and of a layer."""
    model, _ = skipdecode.load(checkpoint, device="cpu")
    layer = sum(weight.numel() * 4 for weight in decoder_layers(model)[0].parameters())
    return sum(weight.numel() * 4 for weight in model.parameters()) - LAYERS * layer, layer


def test_layers_that_most_steps_run_stay(checkpoint: Path, tmp_path: Path) -> None:
    """With room for three layers, decoding at 3x loads nothing after the prompt."""
    fixed, layer = sizes(checkpoint)
    schedule = Schedule(LAYERS, 3, 3, horizon=1, decay="constant", order=(6, 0, 3, 7, 5, 1, 4, 2))
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.skipdecode = {"method": "skipdecode", "schedules": {"3": schedule.to_dict()}}
    model.save_pretrained(folder)
    room = (fixed + 4.5 * layer) / GIB  # three that stay, and the one that runs
    model, tokenizer = skipdecode.load(folder, device="cpu", offload=Offload("disk", max_memory=room))
    assert offloaded(model) == [1, 2, 4, 5, 7]
    with loads(model) as count:
        found = skipdecode.generate(model, tokenizer, PROMPTS, max_new_tokens=9, eos_token_id=-1)
    assert count == dict.fromkeys(offloaded(model), 1)
    whole = skipdecode.load(folder, device="cpu")
    assert found.completions == skipdecode.generate(*whole, PROMPTS, max_new_tokens=9, eos_token_id=-1).completions


def test_auto_offloads_only_what_does_not_fit(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for all: an ordinary model. Less: some layers are offloaded. Too little for one: refused beforehand."""
    model, _ = skipdecode.load(checkpoint, device="cpu", offload="auto")
    assert offloaded(model) == []
    fixed, layer = sizes(checkpoint)
    monkeypatch.setattr(offload, "free_memory", lambda _: int((fixed + 4.5 * layer) / offload.SHARE))
    model, _ = skipdecode.load(checkpoint, device="cpu", offload="auto")
    assert len(offloaded(model)) == LAYERS - 3
    monkeypatch.setattr(offload, "free_memory", lambda _: layer)
    for refused in ("auto", Offload("disk", max_memory=1e-6)):
        with pytest.raises(ModelError, match="embeddings, head and one layer take"):
            skipdecode.load(checkpoint, device="cpu", offload=refused)


def test_host_memory_comes_before_the_disk_on_an_accelerator(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: by free memory alone."""
    fixed, layer = sizes(checkpoint)
    config = Checkpoint.resolve(checkpoint).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for host, place in ((100 * layer, "cpu"), (layer, "disk")):
        free = {"cuda": (fixed + 4.5 * layer) / offload.SHARE, "cpu": host}
        monkeypatch.setattr(offload, "free_memory", free.__getitem__)
        places = Offload().options(model, range(LAYERS), "cuda")["device_map"]
        layers = [where for name, where in places.items() if ".layers." in name]
        assert layers == ["cuda"] * 3 + [place] * (LAYERS - 3)
        assert places["lm_head"] == "cuda"


def test_places_that_mean_nothing_are_refused(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="auto, disk or cpu, not 'moon'"):
        Offload("moon")
    with pytest.raises(UsageError, match="offload its layers to the disk"):
        skipdecode.load(checkpoint, device="cpu", offload="cpu")


def test_a_checkpoint_of_another_type_is_converted_layer_by_layer(checkpoint: Path, tmp_path: Path) -> None:
    """A bfloat16 checkpoint run in float32 writes what the model converted as a whole writes."""
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
    loaded = [skipdecode.load(folder, offload=place, **options) for place in (None, "disk")]
    whole, parts = (skipdecode.generate(*each, PROMPTS, speedup=2, max_new_tokens=9) for each in loaded)
    assert whole.completions == parts.completions


def test_an_offloaded_model_is_saved_whole(checkpoint: Path, tmp_path: Path) -> None:
    """save_pretrained finds the weights where they wait."""
    model, tokenizer = skipdecode.load(checkpoint, device="cpu", offload="disk")
    detach(model).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = skipdecode.load(tmp_path, device="cpu")
    stock, _ = skipdecode.load(checkpoint, device="cpu")
    assert all(torch.equal(value, stock.state_dict()[key]) for key, value in again.state_dict().items())
