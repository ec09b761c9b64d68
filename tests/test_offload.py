"""Offloaded layers: a skipped one is never loaded, the next one comes while one computes, tokens stay the same."""

from __future__ import annotations

import importlib
import shutil
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import skipdecode
from helpers.families import FORMS, LAYERS, SCHEDULES, TOP, build, prompts, run
from helpers.tiny import run as command
from helpers.tiny import write_jsonl
from skipdecode import Schedule, attach, detach
from skipdecode.clock.model_shapes import shape_config
from skipdecode.core.stack import decoder_layers
from skipdecode.errors import ModelError, UsageError
from skipdecode.weights import memory, offload
from skipdecode.weights.loading import read_weights
from skipdecode.weights.memory import GIB, available_memory
from skipdecode.weights.offload import Offload, device_map
from skipdecode.weights.streaming import Streaming, stream, streaming_of

accelerate = pytest.importorskip("accelerate")

PROMPTS = ["the cat sat on", "a dog", "the small old house by the river sat"]
FULL = Schedule.full(LAYERS)


def streamed(model: PreTrainedModel) -> Streaming:
    """What offloads the model, which must be there."""
    found = streaming_of(model)
    assert found is not None
    return found


def expected_loads(schedule: Schedule, width: int, steps: int, ahead: bool = True) -> Counter[int]:
    """A load for each time that a layer runs in the prompt's pass and the steps, unless it ran just before.

    Args:
        ahead: whether the layer that a further step would begin with is fetched too.
    """
    ran = [layer for layer, count in enumerate(schedule.positions_per_layer(width, width)) if count]
    for step in range(steps):
        ran += schedule.layers(schedule.depth(step))
    ran += schedule.layers(schedule.depth(steps))[:1] * ahead
    return Counter(layer for before, layer in zip([None, *ran], ran, strict=False) if layer != before)


def from_disk(folder: Path, name: str = "opt", place: str = "disk") -> PreTrainedModel:
    """The family's model, read from a checkpoint of many files, with its layers on the disk (``cpu``: with none)."""
    model, path = build(name), folder / "model"
    if not path.exists():
        model.save_pretrained(path, max_shard_size="20KB")
    places = device_map(model, "cpu", dict.fromkeys(range(LAYERS), place))
    options = {"attn_implementation": model.config._attn_implementation, "offload_folder": str(folder / "more")}
    return AutoModelForCausalLM.from_pretrained(path, device_map=places, **options).eval()


@pytest.mark.parametrize("speedup", [1, 2, 5])
@pytest.mark.parametrize("prefetch", [True, False])
def test_a_layer_is_loaded_as_often_as_it_runs(speedup: float, prefetch: bool, checkpoint: Path) -> None:
    """Loads of each layer are the passes that run it, and one of the layer that a further step would begin with."""
    schedule = Schedule.for_speedup(speedup, LAYERS, horizon=8)
    options: dict[str, Any] = {"schedule": schedule, "max_new_tokens": 12, "eos_token_id": -1}
    expected = skipdecode.generate(*skipdecode.load(str(checkpoint)), PROMPTS, **options)
    model, tokenizer = skipdecode.load(str(checkpoint), offload=Offload("disk", prefetch=prefetch))
    found = skipdecode.generate(model, tokenizer, PROMPTS, **options)
    assert found.completions == expected.completions
    width = max(map(len, tokenizer(PROMPTS).input_ids))
    assert streamed(model).loads == expected_loads(schedule, width, found.cost.steps, ahead=prefetch)
    assert found.cost.peak_kv_bytes == expected.cost.peak_kv_bytes


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_first_layer_that_the_prompt_skips_is_loaded_once(prefetch: bool, checkpoint: Path) -> None:
    """By the model's first call, to learn what layers return; with it comes the layer after it. Later calls know."""
    schedule = Schedule(LAYERS, 3, 2, horizon=8, warmup=0, prompt_layers=3)
    assert schedule.positions_per_layer(5, 5)[:2] == [0, 0]
    options: dict[str, Any] = {"schedule": schedule, "max_new_tokens": 12, "eos_token_id": -1}
    expected = skipdecode.generate(*skipdecode.load(str(checkpoint)), PROMPTS, **options)
    model, tokenizer = skipdecode.load(str(checkpoint), offload=Offload("disk", prefetch=prefetch))
    found = skipdecode.generate(model, tokenizer, PROMPTS, **options)
    assert found.completions == expected.completions
    loads, learning = streamed(model).loads, Counter({0: 1, 1: int(prefetch)})
    width = max(map(len, tokenizer(PROMPTS).input_ids))
    assert loads == expected_loads(schedule, width, found.cost.steps, ahead=prefetch) + learning
    skipdecode.generate(model, tokenizer, PROMPTS, **options)
    assert (loads[0], loads[1]) == (1, prefetch)


@pytest.mark.parametrize("name", [*FORMS, "mixtral"])
def test_every_form_of_model_streams(name: str, tmp_path: Path) -> None:
    """Tokens and logits are those of the model in memory; experts, which are converted, come from another folder."""
    stays = from_disk(tmp_path, name, "cpu")
    expected = {key: run(stays, prompts(), SCHEDULES[key]) for key in ("top", "permutation", "prompt-wide")}
    model = from_disk(tmp_path, name)
    streaming = stream(model)
    assert streaming is not None
    for key, stock in expected.items():
        found = run(model, prompts(), SCHEDULES[key])
        assert torch.equal(found.sequences, stock.sequences), key
        assert all(map(torch.equal, found.logits, stock.logits)), key
    detach(model)
    assert torch.equal(run(model, prompts()).sequences, run(detach(stays), prompts()).sequences)


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload"])
@pytest.mark.parametrize("attached", ["before", "after"])
def test_models_that_others_offloaded_stream(way: str, attached: str, tmp_path: Path) -> None:
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
    streaming = stream(model)
    assert streaming is not None
    found = run(model, inputs, TOP).sequences
    assert torch.equal(found, expected)
    width = inputs["input_ids"].shape[1]
    assert streaming.loads == expected_loads(TOP, width, found.shape[1] - width - 1)
    assert all(parameter.is_meta for layer in decoder_layers(model) for parameter in layer.parameters())
    assert stream(build("llama")) is None


def watch(streaming: Streaming) -> tuple[Counter[int], list[int]]:
    """Layers in memory now, and how many there were after each load: followed through the tensors themselves."""
    alive: Counter[int] = Counter()
    most: list[int] = []

    def watched(index: int, read: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def reading() -> Tensor:
            weight = read().clone()
            alive[index] += 1
            weakref.finalize(weight.untyped_storage(), lambda: alive.update({index: -1}))
            most.append(sum(count > 0 for count in alive.values()))
            return weight

        return reading

    streaming.sources = {
        index: {name: watched(index, read) for name, read in found.items()}
        for index, found in streaming.sources.items()
    }
    return alive, most


@pytest.mark.parametrize(("prefetch", "most"), [(True, 2), (False, 1)])
@pytest.mark.parametrize("schedule", [FULL, TOP, SCHEDULES["permutation"], None])
def test_few_layers_are_in_memory_at_once(prefetch: bool, most: int, schedule: Schedule | None, tmp_path: Path) -> None:
    """At most the layer that computes and the one that comes; afterwards at most one."""
    model = from_disk(tmp_path)
    streaming = stream(model, prefetch=prefetch)
    assert streaming is not None
    alive, counts = watch(streaming)
    for _ in range(2):
        run(model, prompts(), schedule)
    assert max(counts) == most
    if streaming._coming is not None:
        streaming._coming.join()
    assert sum(count > 0 for count in alive.values()) <= 1


def test_the_only_layer_that_runs_stays(tmp_path: Path) -> None:
    """Where one offloaded layer is its own successor, it is loaded once."""
    model = from_disk(tmp_path)
    streaming = stream(model)
    assert streaming is not None
    schedule = Schedule.from_depths(LAYERS, (2, 1), order="bottom")
    found = run(model, prompts(), schedule).sequences
    assert torch.equal(found, run(build("opt"), prompts(), schedule).sequences)
    assert streaming.loads[0] == 3  # for the prompt, for a step with another layer, and from there on it stays


@pytest.mark.parametrize("prefetch", [True, False])
def test_an_error_of_the_background_surfaces_in_the_caller(prefetch: bool, tmp_path: Path) -> None:
    """Reading fails in the thread: generate raises it, no thread is left, and the next call works."""
    model = from_disk(tmp_path)
    streaming = stream(model, prefetch=prefetch)
    assert streaming is not None
    read = streaming.sources[5]["fc1.weight"]

    def failing() -> Tensor:
        raise OSError("input/output error")

    streaming.sources[5]["fc1.weight"] = failing
    with pytest.raises(ModelError, match=r"offloaded layer 5 cannot be read: input/output error"):
        run(model, prompts(), FULL)
    assert not fetching()
    streaming.sources[5]["fc1.weight"] = read
    assert torch.equal(run(model, prompts(), TOP).sequences, run(build("opt"), prompts(), TOP).sequences)


def fetching() -> list[str]:
    """Threads that still fetch, after those that have work left have had a second for it."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("skipdecode-fetch")]
    for thread in threads:
        thread.join(1)
    return [thread.name for thread in threads if thread.is_alive()]


def test_an_aborted_call_leaves_no_thread(tmp_path: Path) -> None:
    """Interrupted inside a layer: the thread ends with its layer, the next call gives the same text."""
    model = from_disk(tmp_path)
    attach(model)
    streaming = stream(model)
    assert streaming is not None
    part, left = decoder_layers(model)[3].get_submodule("fc2"), [3]

    def interrupt(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    handle = part.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(model, prompts(), FULL)
    handle.remove()
    assert not fetching()
    _, counts = watch(streaming)
    assert torch.equal(run(model, prompts(), TOP).sequences, run(build("opt"), prompts(), TOP).sequences)
    assert max(counts) == 2


def test_weights_that_are_not_finite_are_refused_when_they_come(checkpoint: Path, tmp_path: Path) -> None:
    """Offloaded weights are not read by load; the first pass that needs them says what is wrong."""
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        decoder_layers(model)[6].get_parameter("fc1.bias")[3] = torch.nan
    model.save_pretrained(folder)
    model, tokenizer = skipdecode.load(str(folder), offload="disk")
    with pytest.raises(ModelError, match=r"layer 6: fc1.bias holds values that are not finite"):
        skipdecode.generate(model, tokenizer, PROMPTS, full=True, max_new_tokens=2)


def sizes(checkpoint: Path) -> tuple[int, int]:
    """Bytes of what always stays, and of a layer."""
    model, _ = skipdecode.load(str(checkpoint))
    layer = sum(p.numel() * 4 for p in decoder_layers(model)[0].parameters())
    return sum(p.numel() * 4 for p in model.parameters()) - LAYERS * layer, layer


def test_layers_that_fit_stay_the_most_used_first(checkpoint: Path) -> None:
    """With room for three layers, those that every step runs stay: decoding then loads nothing at all."""
    fixed, layer = sizes(checkpoint)
    schedule = Schedule.for_speedup(3, LAYERS, horizon=8, decay="constant")
    room = (fixed + 5.5 * layer) / GIB  # three that stay, the one that runs, the one that comes
    kept = Offload("disk", max_memory=room, ranking=schedule.ranking)
    model, tokenizer = skipdecode.load(str(checkpoint), offload=kept)
    stay = [i for i, each in enumerate(decoder_layers(model)) if not next(each.parameters()).is_meta]
    assert stay == sorted(schedule.ranking[:3])
    found = skipdecode.generate(model, tokenizer, PROMPTS, schedule=schedule, max_new_tokens=9, eos_token_id=-1)
    assert streamed(model).loads == {layer: 1 for layer in range(LAYERS) if layer not in stay}
    again = skipdecode.generate(
        *skipdecode.load(str(checkpoint)), PROMPTS, schedule=schedule, max_new_tokens=9, eos_token_id=-1
    )
    assert found.completions == again.completions


def test_auto_offloads_only_what_does_not_fit(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for all: an ordinary model. Less: some layers wait. Too little for two of them: refused beforehand."""
    model, _ = skipdecode.load(str(checkpoint), offload="auto")
    assert streaming_of(model) is None
    fixed, layer = sizes(checkpoint)
    monkeypatch.setattr(offload, "available_memory", lambda _: int((fixed + 4.5 * layer) / offload.SHARE))
    model, _ = skipdecode.load(str(checkpoint), offload="auto")
    assert len(streamed(model).sources) == LAYERS - 2
    for refused in ("auto", Offload("disk", max_memory=1e-6)):
        monkeypatch.setattr(offload, "available_memory", lambda _: layer)
        with pytest.raises(ModelError, match=r"embeddings, head and the layers that run take"):
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
            with pytest.raises(ModelError, match=r"--offload-folder"):
                read_weights(path, config=config, **options)
        else:
            stream(read_weights(path, config=config, **options))
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
    free = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=9000))
    monkeypatch.setattr(memory, "_psutil", lambda: free)
    for name, value in (("max", 3000), ("current", 1000), ("none", "max")):
        (tmp_path / name).write_text(f"{value}\n")
    groups = ((tmp_path, "none", "current", ""), (tmp_path / "absent", "max", "current", ""))
    monkeypatch.setattr(memory, "CGROUPS", groups)
    assert available_memory("cpu") == 9000
    assert available_memory("cpu", kept=500) == 8500
    monkeypatch.setattr(memory, "CGROUPS", ((tmp_path, "max", "current", ""),))
    assert available_memory("cpu") == 2000


@pytest.mark.parametrize("prefix", ["", "total_"], ids=["version 2", "version 1"])
def test_a_containers_page_cache_is_not_in_use(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it read of files is free, but for those that are to stay: these are taken off once, not twice."""
    free = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=9000))
    monkeypatch.setattr(memory, "_psutil", lambda: free)
    monkeypatch.setattr(memory, "CGROUPS", ((tmp_path, "max", "current", prefix),))
    (tmp_path / "max").write_text("3000\n")
    (tmp_path / "current").write_text("2500\n")
    held = {f"{prefix}inactive_file": 1500, f"{prefix}active_file": 300, "anon": 700, f"{prefix}shmem": 7}
    (tmp_path / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in held.items()))
    assert available_memory("cpu") == 500 + 1800
    assert available_memory("cpu", kept=1000) == 500 + 800
    assert available_memory("cpu", kept=2000) == 500, "files that another group was charged with"
    (tmp_path / "memory.stat").unlink()
    assert available_memory("cpu", kept=1000) == 500, "they were never added"


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
    assert skipdecode.generate(model, tokenizer, "a b", speedup=2, max_new_tokens=3).cost.tokens > 0
