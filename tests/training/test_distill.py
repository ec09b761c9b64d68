"""``distill``: an adapter in a folder, learned from texts of the model's own; the model stays as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainingArguments

import skipdecode
from helpers.tiny import TEXTS, run, write_jsonl
from skipdecode import Schedule
from skipdecode.data.tokenize import encode_prompts
from skipdecode.errors import FileError, ModelError, ScheduleError, UsageError
from skipdecode.loading.load import Checkpoint
from skipdecode.model.adapter import WEIGHTS, read_about, read_adapter, read_schedules
from skipdecode.model.cache_name import CACHE
from skipdecode.model.inspect import gates_of
from skipdecode.training import distill as distilling
from skipdecode.training.config import DistillConfig
from skipdecode.training.trainer import DistillationTrainer

SHORT: dict[str, Any] = {"num_texts": 24, "max_new_tokens": 10, "speedups": "2,4", "max_steps": 4, "batch_size": 4}
SHORT |= {"eval_steps": 0, "save_steps": 2}


def distill(model: Path | str, prompts: Path | None, output: Path, say: Any = str, **options: Any) -> Any:
    """A short run."""
    overwrite = options.pop("overwrite", False)
    options = SHORT | {"model": str(model), "output": str(output), "prompts": prompts and str(prompts)} | options
    return distilling.distill(DistillConfig.create(**options), overwrite=overwrite, say=say)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of prompts without responses."""
    return write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", ({"prompt": text} for text in TEXTS))


@pytest.fixture(scope="module")
def trained(checkpoint: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter for 2x and 4x, by the command line. Read it, or copy it to change it."""
    folder = tmp_path_factory.mktemp("adapters") / "adapter"
    (folder.parent / "run.yaml").write_text("eval_steps: 0")
    words = ["--prompts", prompts, "--output", folder, "--config", folder.parent / "run.yaml"]
    for name, value in SHORT.items():
        words += [] if name == "eval_steps" else [f"--{name.replace('_', '-')}", value]
    done = run("distill", checkpoint, *words)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_model_stays_as_it_is(trained: Path, checkpoint: Path) -> None:
    """At 1x to the bit, with the adapter on; 2x writes otherwise; other speeds are refused."""
    model, tokenizer = skipdecode.load(str(trained), dtype="float32")
    stock, _ = skipdecode.load(str(checkpoint), dtype="float32")
    assert all(map(torch.equal, model.state_dict().values(), stock.state_dict().values()))
    held: Any = gates_of(model).adapter
    assert all(map(torch.equal, read_adapter(trained).parameters(), held.parameters()))
    ids = encode_prompts(tokenizer, TEXTS[:3])
    inputs = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
    for speedup in (1, 2):
        schedule = Schedule.full(8) if speedup == 1 else read_schedules(trained)[2.0]
        cache = skipdecode.SkipCache(model, schedule)
        options: dict[str, Any] = {"max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
        theirs = stock.generate(**inputs, **options).logits
        ours = model.generate(**inputs, **{CACHE: cache}, **options).logits
        assert torch.equal(ours[0], theirs[0])
        assert all(map(torch.equal, ours, theirs)) == (speedup == 1)
    with pytest.raises(ScheduleError, match="trained for 2x and 4x"):
        skipdecode.generate(model, tokenizer, TEXTS[:1], speedup=1.2, max_new_tokens=4)


def test_depth_is_constant_and_speeds_share_an_order(trained: Path) -> None:
    """A sixth of the layers is always kept at the bottom, unless the user says otherwise."""
    two, four = read_schedules(trained).values()
    assert (two.distinct_depths, four.distinct_depths) == ((4,), (2,))
    assert two.ranking == four.ranking
    thirty: Any = SimpleNamespace(adapter=None, num_layers=30)
    for given, expected in (({}, ("top", 5)), ({"bottom_layers": 1}, ("top", 1)), ({"order": "even"}, ("even", 1))):
        found = distilling.choose_schedules(DistillConfig.create(model="x", **given), thirty)
        assert {speedup: schedule.max_depth for speedup, schedule in found.items()} == {1.5: 20, 2.0: 15}
        assert {(schedule.order, schedule.warmup) for schedule in found.values()} == {expected}


def test_a_killed_run_ends_with_the_same_adapter(
    trained: Path, checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the texts, then in training: it goes on from both."""

    class Killed(BaseException):
        """What nothing catches."""

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    step = DistillationTrainer.training_step
    with monkeypatch.context() as patch:
        patch.setattr("skipdecode.training.self_generated.save_texts", killed)
        with pytest.raises(Killed):
            distill(checkpoint, prompts, tmp_path)
    raw = (tmp_path / "self_generated.texts.raw.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(
            DistillationTrainer,
            "training_step",
            lambda self, *a, **k: step(self, *a, **k) if self.state.global_step < 3 else killed(),
        )
        with pytest.raises(Killed):
            distill(checkpoint, prompts, tmp_path)
    assert raw
    assert not list(tmp_path.glob("*.raw.jsonl"))
    texts = (tmp_path / "self_generated.jsonl").read_bytes()
    said: list[str] = []
    distill(checkpoint, prompts, tmp_path, said.append)
    assert f"resuming from {tmp_path / 'checkpoint-2'}" in said
    assert (tmp_path / "self_generated.jsonl").read_bytes() == texts
    assert (tmp_path / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()


def kl_of(line: str) -> float:
    return float(line.partition("KL ")[2].split()[0].strip(","))


def test_training_comes_nearer_to_the_full_model(
    checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On texts that it did not learn from; told before and after, with how long it takes."""
    model, tokenizer = skipdecode.load(str(checkpoint), dtype="float32")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8 if weight.ndim == 2 else 1)  # else layers, and what they change, are next to nothing
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(distilling, "fit_bypasses", lambda *_, **__: None)  # bypasses that do nothing
    options = {"num_texts": 60, "max_new_tokens": 12, "speedups": "4", "max_steps": 25, "learning_rate": 1e-2}
    said: list[str] = []
    asked = str(write_jsonl(tmp_path / "asked.jsonl", ({"prompt": text} for text in TEXTS)))
    (after,) = distill(tmp_path / "model", prompts, tmp_path / "out", said.append, eval_prompts=asked, **options)
    assert said[0].startswith("this takes about ")
    assert "for 60 texts" in said[0]
    assert "for 25 steps" in said[0]
    for name in ("held-out texts", asked):
        (before,) = [line for line in said if line.startswith(f"4x before training, {name}: KL ")]
        (now,) = [line for line in said if line.startswith(f"4x now, {name}: KL ")]
        assert kl_of(now) < 0.9 * kl_of(before)
    assert f"4x now, held-out texts: KL {after.kl:.3f}" in " ".join(said)


def test_texts_are_kept_when_only_training_changes(
    trained: Path, checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--overwrite with another learning rate."""
    folder = shutil.copytree(trained, tmp_path / "copy")
    monkeypatch.setattr(distilling, "forecast", lambda *a: pytest.fail("texts were written again"))
    distill(checkpoint, prompts, folder, overwrite=True, learning_rate=1e-4)
    assert (folder / WEIGHTS).read_bytes() != (trained / WEIGHTS).read_bytes()


def test_a_chat_model_needs_no_prompts(checkpoint: Path, tmp_path: Path) -> None:
    """Each text answers a message that the model wrote before."""
    model, tokenizer = skipdecode.load(str(checkpoint))
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}a{% endfor %}"
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "model")
    # Random weights often write an "a", which ends a message here.
    distill(tmp_path / "model", None, tmp_path / "out", num_texts=60, max_steps=1, max_new_tokens=4)
    rows = [json.loads(line) for line in (tmp_path / "out" / "self_generated.jsonl").read_text().splitlines()]
    assert rows
    for row in rows:
        assert row["prompt"][-1]["role"] == "user"
        assert all(message["content"] for message in row["prompt"])


def test_a_model_in_bfloat16_teaches_an_adapter(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    """The frozen model computes in bfloat16, and the adapter is saved so; it learns in float32."""
    distill(checkpoint, prompts, tmp_path, bf16=True)
    assert {weight.dtype for weight in load_file(tmp_path / WEIGHTS).values()} == {torch.bfloat16}
    learned = load_file(max(tmp_path.glob("checkpoint-*")) / "model.safetensors")
    assert {weight.dtype for weight in learned.values()} == {torch.float32}


def test_training_goes_on_from_an_adapter(trained: Path, checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    """Its own model's, or that of the model it was fine-tuned from: what it knew of a speed is where it begins."""
    still: dict[str, Any] = {"max_steps": 1, "learning_rate": 1e-30, "max_new_tokens": 6}
    start = read_adapter(trained).state_dict()
    distill(trained, prompts, tmp_path / "more", speedups=None, **still)
    assert read_about(tmp_path / "more")["base_model"] == read_about(trained)["base_model"]
    more = read_adapter(tmp_path / "more").state_dict()
    assert more.keys() == start.keys()
    assert all(torch.equal(more[name], start[name]) for name in start)

    model, tokenizer = skipdecode.load(str(checkpoint), dtype="float32")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "tuned")
    distill(tmp_path / "tuned", prompts, tmp_path / "two", adapter=str(trained), speedups="2", **still)
    assert read_schedules(tmp_path / "two") == {2.0: read_schedules(trained)[2.0]}
    two = read_adapter(tmp_path / "two").state_dict()
    assert 0 < len(two) < len(start)
    assert all(torch.equal(two[name], start[name]) for name in two)
    assert skipdecode.load(str(tmp_path / "tuned"), adapter=tmp_path / "two")
    with pytest.raises(ModelError, match="another model"):
        skipdecode.load(str(checkpoint), adapter=tmp_path / "two")


def test_a_speed_is_added_to_an_adapter(trained: Path, prompts: Path, tmp_path: Path) -> None:
    """In the adapter's order of layers, with a bypass fitted to texts; what the adapter has stays where it begins."""
    start, before = read_adapter(trained), read_schedules(trained)
    still: dict[str, Any] = {"max_steps": 1, "learning_rate": 1e-30, "max_new_tokens": 6}
    distill(trained, prompts, tmp_path / "more", speedups="1.6,2,4", **still)
    more, schedules = read_adapter(tmp_path / "more"), read_schedules(tmp_path / "more")
    assert {speedup: schedules[speedup] for speedup in before} == before
    assert {(each.order, each.warmup) for each in schedules.values()} == {(before[4.0].order, before[4.0].warmup)}
    kept = more.state_dict()
    assert all(torch.equal(kept[name], weight) for name, weight in start.state_dict().items())
    (new,) = more.bypasses.keys() - start.bypasses.keys()
    assert kept[f"bypasses.{new}.up"].count_nonzero()


def test_a_speed_of_weight_0_stays_as_it_is(trained: Path, prompts: Path, tmp_path: Path) -> None:
    """Nothing that acts in it learns, and layers that it runs get no LoRA; the other speed learns."""
    start, before = read_adapter(trained), read_schedules(trained)
    distill(trained, prompts, tmp_path / "more", speedups="1.6,2,4", speedup_weights="1,0,0", lora_rank=2)
    more = read_adapter(tmp_path / "more")
    assert all(torch.equal(more.state_dict()[name], weight) for name, weight in start.state_dict().items())
    assert more.loras
    for schedule in before.values():
        assert not any(more.loras_at(layers) for layers in schedule.step_layer_sets)
    assert all(lora.lora_B.count_nonzero() for lora in more.loras.values())


def test_lora_is_learned_on_top_of_an_adapter(trained: Path, checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    """It begins where the adapter is, learns, and runs merged, so that a text needs no more modules."""
    start = read_adapter(trained).state_dict()
    distill(trained, prompts, tmp_path / "still", speedups=None, lora_rank=2, max_steps=1, learning_rate=1e-30)
    still = read_adapter(tmp_path / "still")
    assert all(torch.equal(still.state_dict()[name], start[name]) for name in start)
    assert all(lora.lora_B.count_nonzero() == 0 for lora in still.loras.values())
    distill(tmp_path / "still", prompts, tmp_path / "more", speedups=None)
    more = read_adapter(tmp_path / "more")
    assert more.loras.keys() == still.loras.keys()
    assert any(lora.lora_B.count_nonzero() for lora in more.loras.values())
    loaded, _ = skipdecode.load(tmp_path / "more")
    held: Any = gates_of(loaded).adapter
    assert held.private.keys() == more.loras.keys()


def test_what_cannot_be_learned_is_told_before_a_model_is_loaded(
    trained: Path, checkpoint: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "load", lambda *a, **k: pytest.fail("a model was loaded"))
    before = (trained / WEIGHTS).read_bytes()
    for model, output, options, error, said in (
        (checkpoint, tmp_path, {"speedups": "1.02,2"}, UsageError, "1.02x of 8 layers is all of them"),
        (checkpoint, tmp_path, {"adapter": str(tmp_path)}, FileError, "holds no adapter"),
        (trained, trained, {"speedups": None}, UsageError, "another run|another model|run with another"),
    ):
        with pytest.raises(error, match=said):
            distill(model, prompts, output, **options)
    assert (trained / WEIGHTS).read_bytes() == before
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(UsageError, match="one process writes the texts"):
        distill(checkpoint, prompts, tmp_path)
