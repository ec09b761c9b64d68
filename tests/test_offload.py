"""Offloaded layers: a skipped one is never loaded, the next one is read ahead, tokens stay the same."""

from __future__ import annotations

import functools
import importlib
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import skipdecode
from helpers.families import FORMS, LAYERS, SCHEDULES, TOP, build, prompts, run
from helpers.tiny import run as command
from helpers.tiny import write_jsonl
from model_shapes import shape_config
from skipdecode import Schedule, attach, detach
from skipdecode.errors import ModelError, UsageError
from skipdecode.loading import memory, offload
from skipdecode.loading.load import read_weights
from skipdecode.loading.memory import GIB, available_memory
from skipdecode.loading.offload import Offload, ReadAhead, device_map, prepare_offloaded
from skipdecode.model.adapter import Adapter
from skipdecode.model.inspect import decoder_layers

accelerate = pytest.importorskip("accelerate")

PROMPTS = ["the cat sat on", "a dog", "the small old house by the river sat"]
FULL = Schedule.full(LAYERS)


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


@contextmanager
def reads_ahead() -> Iterator[list[int]]:
    """The layers that threads read, in order."""
    found: list[int] = []
    read = ReadAhead._try_read

    def noted(self: ReadAhead, index: int) -> None:
        found.append(index)
        read(self, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReadAhead, "_try_read", noted)
        yield found


def runs(schedule: Schedule, width: int, steps: int) -> list[int]:
    """The layers that the prompt's pass and the steps run, in order."""
    ran = [layer for layer, count in enumerate(schedule.positions_per_layer(width, width)) if count]
    for step in range(steps):
        ran += schedule.layers(schedule.depth(step))
    return ran


def from_disk(folder: Path, name: str = "opt", place: str = "disk") -> PreTrainedModel:
    """The family's model, read from a checkpoint of many files, with its layers on the disk (``cpu``: with none)."""
    model, path = build(name), folder / "model"
    if not path.exists():
        model.save_pretrained(path, max_shard_size="20KB")
    places = device_map(model, "cpu", dict.fromkeys(range(LAYERS), place))
    options = {"attn_implementation": model.config._attn_implementation, "offload_folder": str(folder / "more")}
    return AutoModelForCausalLM.from_pretrained(path, device_map=places, **options).eval()


@pytest.mark.parametrize("speedup", [1, 5])
def test_a_layer_is_loaded_as_often_as_it_runs_and_the_next_one_is_read_ahead(speedup: float, checkpoint: Path) -> None:
    """Skipped layers are neither loaded nor read; tokens and memory are those of the model in memory."""
    schedule = Schedule.for_speedup(speedup, LAYERS, horizon=8, decay="linear")
    options: dict[str, Any] = {"schedule": schedule, "max_new_tokens": 12, "eos_token_id": -1}
    expected = skipdecode.generate(*skipdecode.load(str(checkpoint)), PROMPTS, **options)
    model, tokenizer = skipdecode.load(str(checkpoint), offload="disk")
    with loads(model) as found, reads_ahead() as read:
        result = skipdecode.generate(model, tokenizer, PROMPTS, **options)
    assert result.completions == expected.completions
    assert result.stats.peak_kv_bytes == expected.stats.peak_kv_bytes
    ran = runs(schedule, max(map(len, tokenizer(PROMPTS).input_ids)), result.stats.steps)
    assert found == Counter(ran)
    following = [*ran[1:], *schedule.layers(schedule.depth(result.stats.steps))[:1]]
    assert read == [layer for layer, before in zip(following, ran, strict=True) if layer != before]


@pytest.mark.parametrize("name", [*FORMS, "mixtral"])
def test_every_form_of_model_is_offloaded(name: str, tmp_path: Path) -> None:
    """Tokens and logits are those of the model in memory; experts, which are converted, come from another folder."""
    stays = from_disk(tmp_path, name, "cpu")
    few = functools.partial(run, max_new_tokens=6)
    expected = {key: few(stays, prompts(), SCHEDULES[key]) for key in ("permutation", "prompt-wide")}
    model = from_disk(tmp_path, name)
    prepare_offloaded(model)
    for key, stock in expected.items():
        found = few(model, prompts(), SCHEDULES[key])
        assert torch.equal(found.sequences, stock.sequences), key
        assert all(map(torch.equal, found.logits, stock.logits)), key
    detach(model)
    assert torch.equal(few(model, prompts()).sequences, few(detach(stays), prompts()).sequences)


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload"])
@pytest.mark.parametrize("attached", ["before", "after"])
def test_models_that_others_offloaded_skip(way: str, attached: str, tmp_path: Path) -> None:
    """accelerate's cpu_offload and disk_offload, before or after attach: skipped layers are not loaded."""
    model, inputs = build("llama"), prompts()
    expected = run(model, inputs, TOP).sequences
    detach(model)
    if attached == "before":
        attach(model)
    if way == "cpu_offload":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    if attached == "after":
        attach(model)
    with loads(model) as count:
        found = run(model, inputs, TOP).sequences
    assert torch.equal(found, expected)
    width = inputs["input_ids"].shape[1]
    assert count == Counter(runs(TOP, width, found.shape[1] - width - 1))
    adapter = Adapter(model.config.hidden_size, 4, {2.0: TOP})
    attach(model, adapter=adapter)  # whose weights stay where they are, though the model's are on no device
    assert torch.equal(run(model, inputs, TOP).sequences, found)  # new, it changes nothing


def test_threads_wait_for_each_other(checkpoint: Path) -> None:
    """C13: what one pass unloads, another may be computing with. Each thread writes what it writes alone."""
    model, _ = skipdecode.load(str(checkpoint), offload="disk")
    batches = [prompts((9, 5)), prompts((3, 7)), prompts((4,))]
    expected = [run(model, inputs, TOP, max_new_tokens=5).sequences for inputs in batches]
    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(lambda inputs: run(model, inputs, TOP, max_new_tokens=5).sequences, batches)]
    assert all(map(torch.equal, found, expected))


def test_weights_that_cannot_be_read_are_an_error_of_the_layer_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the thread that reads ahead; the next call works."""
    model = from_disk(tmp_path)
    prepare_offloaded(model)
    loader = accelerate.utils.OffloadedWeightsLoader
    load = loader.__getitem__

    def failing(self: Any, key: str) -> Tensor:
        if "layers.5.fc1" in key:
            raise OSError("input/output error")
        return load(self, key)

    monkeypatch.setattr(loader, "__getitem__", failing)
    with pytest.raises(ModelError, match=r"offloaded layer 5 cannot be read: input/output error"):
        run(model, prompts(), FULL)
    monkeypatch.undo()
    assert torch.equal(run(model, prompts(), TOP).sequences, run(build("opt"), prompts(), TOP).sequences)


def test_weights_that_are_not_finite_are_refused_when_they_come(checkpoint: Path, tmp_path: Path) -> None:
    """Offloaded weights are not read by load; the first pass that needs them says what is wrong."""
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        decoder_layers(model)[6].get_parameter("fc1.bias")[3] = torch.nan
    model.save_pretrained(folder)
    model, tokenizer = skipdecode.load(str(folder), offload="disk")
    with pytest.raises(ModelError, match=r"layer 6: fc1.bias holds values that are not finite"):
        skipdecode.generate(model, tokenizer, PROMPTS, speedup=1, max_new_tokens=2)


def sizes(checkpoint: Path) -> tuple[int, int]:
    """Bytes of what always stays, and of a layer."""
    model, _ = skipdecode.load(str(checkpoint))
    layer = sum(p.numel() * 4 for p in decoder_layers(model)[0].parameters())
    return sum(p.numel() * 4 for p in model.parameters()) - LAYERS * layer, layer


def test_layers_that_fit_stay_the_most_used_first(checkpoint: Path) -> None:
    """With room for three layers, those that every step runs stay: decoding then loads nothing at all."""
    fixed, layer = sizes(checkpoint)
    schedule = Schedule.for_speedup(3, LAYERS, horizon=8, decay="constant")
    room = (fixed + 4.5 * layer) / GIB  # three that stay, and the one that runs
    model, tokenizer = skipdecode.load(str(checkpoint), offload=Offload("disk", max_memory=room))
    assert offloaded(model) == sorted(schedule.ranking[3:])
    options: dict[str, Any] = {"schedule": schedule, "max_new_tokens": 9, "eos_token_id": -1}
    with loads(model) as count:
        found = skipdecode.generate(model, tokenizer, PROMPTS, **options)
    assert count == dict.fromkeys(offloaded(model), 1)
    assert found.completions == skipdecode.generate(*skipdecode.load(str(checkpoint)), PROMPTS, **options).completions


def test_auto_offloads_only_what_does_not_fit(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for all: an ordinary model. Less: some layers are offloaded. Too little for one: refused beforehand."""
    model, _ = skipdecode.load(str(checkpoint), offload="auto")
    assert offloaded(model) == []
    fixed, layer = sizes(checkpoint)
    monkeypatch.setattr(offload, "available_memory", lambda _: int((fixed + 4.5 * layer) / offload.SHARE))
    model, _ = skipdecode.load(str(checkpoint), offload="auto")
    assert len(offloaded(model)) == LAYERS - 3
    for refused in ("auto", Offload("disk", max_memory=1e-6)):
        monkeypatch.setattr(offload, "available_memory", lambda _: layer)
        with pytest.raises(ModelError, match=r"embeddings, head and the layer that runs take"):
            skipdecode.load(str(checkpoint), offload=refused)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"place": "moon"}, "auto, disk or cpu, not 'moon'"),
        ({"max_memory": 0}, "GiB above 0"),
        ({"max_memory": float("nan")}, "GiB"),
    ],
)
def test_what_means_nothing_is_refused(values: dict[str, Any], message: str) -> None:
    """A place that is none, a memory that is no number."""
    with pytest.raises(UsageError, match=message):
        Offload(**values)


def test_a_model_on_the_cpu_is_not_offloaded_to_it(checkpoint: Path) -> None:
    """Host memory is where it computes."""
    with pytest.raises(UsageError, match=r"offload its layers to the disk"):
        skipdecode.load(str(checkpoint), offload="cpu")


def test_a_checkpoint_of_another_type_is_converted_layer_by_layer(checkpoint: Path, tmp_path: Path) -> None:
    """A bfloat16 checkpoint run in float32: the text is that of the model converted as a whole."""
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    texts = [
        skipdecode.generate(
            *skipdecode.load(str(folder), dtype="float32", offload=place), PROMPTS, speedup=2, max_new_tokens=9
        )
        for place in (None, "disk")
    ]
    assert texts[0].completions == texts[1].completions


def test_an_offloaded_model_is_saved_whole(checkpoint: Path, tmp_path: Path) -> None:
    """save_pretrained finds the weights where they wait."""
    model, tokenizer = skipdecode.load(str(checkpoint), offload="disk")
    detach(model).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = skipdecode.load(str(tmp_path))
    stock, _ = skipdecode.load(str(checkpoint))
    assert all(torch.equal(value, stock.state_dict()[key]) for key, value in again.state_dict().items())


def test_experts_need_a_folder(tmp_path: Path) -> None:
    """Weights that are converted when they are read need a place; without one that is said."""
    model = from_disk(tmp_path, "mixtral", "cpu")
    config, path = model.config, str(tmp_path / "model")
    for folder in (tmp_path / "more", None):
        options = Offload("disk", folder=folder).options(model, "float32", "cpu")
        if folder is None:
            with pytest.raises(ModelError, match=r"Offload\(folder="):
                read_weights(path, config=config, **options)
        else:
            read_weights(path, config=config, **options)
    assert any((tmp_path / "more").iterdir())


def test_the_command_offloads(checkpoint: Path, tmp_path: Path) -> None:
    """``--offload disk`` writes the same output; what cannot be is one line and exit code 2."""
    source = write_jsonl(tmp_path / "in.jsonl", ({"prompt": text} for text in PROMPTS))
    common = ("generate", checkpoint, "--input", source, "--speedup", 3, "--max-new-tokens", 8)
    plain = command(*common)
    for more in (("--offload", "disk"), ("--offload", "disk", "--max-memory", "0.001"), ("--max-memory", 1)):
        assert command(*common, *more).stdout == plain.stdout
    refused = command(*common, "--max-memory", "0.000001")
    assert refused.returncode == 2
    assert "embeddings, head" in refused.stderr


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is what the machine has free, or what the control group leaves, whichever is less."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=9000))
    for name, value in (("max", 3000), ("current", 1000), ("none", "max")):
        (tmp_path / name).write_text(f"{value}\n")
    groups = ((tmp_path, "", "none", "current", ""), (tmp_path / "absent", "", "max", "current", ""))
    monkeypatch.setattr(memory, "CGROUPS", groups)
    assert available_memory("cpu") == 9000
    monkeypatch.setattr(memory, "CGROUPS", ((tmp_path, "", "max", "current", ""),))
    assert available_memory("cpu") == 2000
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "own").write_text("3:cpu:/elsewhere\n0::/a/b\n")
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "own")
    for name, value in (("max", 1500), ("current", 300)):
        (tmp_path / "a" / name).write_text(f"{value}\n")
    assert available_memory("cpu") == 1200, "of the group around this process's"


@pytest.mark.parametrize("prefix", ["", "total_"], ids=["version 2", "version 1"])
def test_a_containers_page_cache_is_not_in_use(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it read of files is free."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=9000))
    monkeypatch.setattr(memory, "CGROUPS", ((tmp_path, "memory" if prefix else "", "max", "current", prefix),))
    (tmp_path / "max").write_text("3000\n")
    (tmp_path / "current").write_text("2500\n")
    held = {f"{prefix}inactive_file": 1500, f"{prefix}active_file": 300, "anon": 700, f"{prefix}shmem": 7}
    (tmp_path / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in held.items()))
    assert available_memory("cpu") == 500 + 1800
    (tmp_path / "memory.stat").unlink()
    assert available_memory("cpu") == 500, "they were never added"


def test_memory_of_other_devices_is_not_guessed() -> None:
    with pytest.raises(UsageError, match="free memory of xpu is not known"):
        available_memory("xpu")


def test_a_checkpoint_can_be_written_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/checkpoint.py: a whole checkpoint, with no more than a layer of it in memory at once."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    make = importlib.import_module("checkpoint").make
    counts: list[int] = []
    save = make.__globals__["save_file"]

    def counted(values: Any, *args: Any, **options: Any) -> None:
        counts.append(len(values))
        save(values, *args, **options)

    monkeypatch.setitem(make.__globals__, "save_file", counted)
    make(shape_config("tiny"), tmp_path / "tiny", torch.bfloat16)
    assert counts == [16] * 8 + [4]  # a layer's weights each; embeddings and last norm
    model, tokenizer = skipdecode.load(str(tmp_path / "tiny"), dtype="float32", offload="disk")
    assert skipdecode.generate(model, tokenizer, "a b", speedup=2, max_new_tokens=3).stats.tokens > 0
