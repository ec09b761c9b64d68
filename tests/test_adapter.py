"""Adapters: stand-ins for skipped layers, which act only on positions that skip."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.families import (
    FORMS,
    LAYERS,
    TOP,
    WIDTH,
    build,
    prompts,
    run,
)
from helpers.profiles import profile_of
from helpers.tiny import TEXTS
from skipdecode import Schedule, attach, load
from skipdecode.errors import DataError, FileError, UsageError
from skipdecode.evaluation.divergence import Damage, damage
from skipdecode.evaluation.exactness import run_checks
from skipdecode.model.adapter import (
    Adapter,
    save_adapter,
)
from skipdecode.model.inspect import gates_of, text_config
from skipdecode.model.teacher_forcing import PrefilledBatch
from skipdecode.training.config import TrainingPlan
from skipdecode.training.distill import make_learner
from skipdecode.training.probe import Probe, Tried, candidates, probe_model

FULL = Schedule.full(LAYERS)
TOLERANCE = 1e-5


def random_adapter(model: Any, schedule: Schedule) -> Adapter:
    """Stand-ins and bottlenecks that change hidden states much."""
    adapter = Adapter(text_config(model.config).hidden_size, 4, {schedule.target: schedule})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return adapter


def own_texts_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return a batch of texts that the model wrote, as the Collator makes one."""
    text = run(model, prompts()).sequences
    mask = torch.cat([prompts()["attention_mask"], torch.ones(len(text), text.shape[1] - WIDTH, dtype=torch.long)], 1)
    batch = {"input_ids": text[:, :-1], "attention_mask": mask[:, :-1], "prompt_length": WIDTH}
    batch["position_ids"] = (mask[:, :-1].cumsum(1) - 1).clamp(min=0)
    batch["labels"] = torch.cat([torch.full((len(text), 1), -100), text[:, WIDTH:]], 1)
    return batch


def test_distance_is_that_of_texts_however_they_are_batched() -> None:
    """Its interval is over texts: it holds the mean, and one text has none."""
    model = build("llama")
    batch, schedule = own_texts_of(model), FULL.replace(order="top").flat(LAYERS // 2)
    alone = [
        {name: value[i : i + 1] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        for i in range(len(batch["labels"]))
    ]
    attach(model)
    together, apart = (
        damage([PrefilledBatch(model, each) for each in batches], [schedule])[0] for batches in ([batch], alone)
    )
    assert apart.interval
    assert together.interval
    assert torch.tensor([apart.kl, *apart.interval]).allclose(torch.tensor([together.kl, *together.interval]))
    assert together.interval[0] < together.kl < together.interval[1]
    (one,) = damage([PrefilledBatch(model, alone[0])], [schedule])
    assert one.interval is None


@pytest.mark.parametrize("name", [*FORMS, "gemma3n"])
@pytest.mark.parametrize("order", ["top", "even"])
def test_an_adapter_can_be_learnt(name: str, order: str) -> None:
    """Its start in closed form is nearer to full depth than bare skipping; all that it trains gets a gradient."""
    model = build(name)
    batch = own_texts_of(model)
    schedule = FULL.replace(order=order, warmup=1).flat(LAYERS // 2)
    (bare,) = damage([PrefilledBatch(attach(model), batch)], [schedule])
    plan = TrainingPlan(model="demo", own_texts=20, speedups=(2,), adapter_rank=8)
    learner = make_learner(plan, model, {2.0: schedule}, [batch], str)
    loss = learner(learner.full_depth(batch), schedule)
    assert 0 < loss.item() < bare.kl
    loss.backward()
    for weight in learner.parameters():
        if weight.requires_grad:
            assert weight.grad is not None
            assert weight.grad.isfinite().all()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Path, Adapter]:
    """A model, the folder of an adapter for it, and the adapter."""
    model = build("llama")
    adapter = random_adapter(model, TOP)
    model.save_pretrained(tmp_path / "base")

    save_adapter(tmp_path / "adapter", adapter, model, "some/model")
    return model, tmp_path / "adapter", adapter


def test_check_takes_an_adapter_along_to_float64(
    saved: tuple[Any, Path, Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes in the model's dtype, bfloat16 here; in float64 nothing but a fault would be left."""
    model, folder, _ = saved
    attach(model.bfloat16(), adapter=folder)
    adapter = vars(gates_of(model))["adapter"]
    before = {name: weight.clone() for name, weight in adapter.state_dict().items()}
    seen = set()
    for module in (*adapter.bypasses.values(), *adapter.bottlenecks.values()):
        module.register_forward_pre_hook(lambda module, args: seen.add((args[0].dtype, module.down.dtype)))
    monkeypatch.setattr("skipdecode.evaluation.exactness.TOLERANCE", 1e-6)
    monkeypatch.setattr("skipdecode.evaluation.exactness.TIMES_STOCK", 0)
    findings = list(run_checks(model, TOP))
    assert [finding for finding in findings if not finding.held] == []
    assert any("in float64" in finding.detail for finding in findings)
    assert seen == {(torch.bfloat16, torch.bfloat16), (torch.float64, torch.float64)}
    for name, weight in adapter.state_dict().items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, before[name])


def test_full_depths_pass_is_paid_once() -> None:
    """An hour for each of two speeds, of which half is full depth's pass: an hour and a half for both."""
    near = Damage(0.5, 0.6)
    tried = [Tried(speed, FULL.flat(depth), near, near, 10.0) for speed, depth in ((2.0, 4), (4.0, 2))]
    found = Probe("model", tried, 36_000, 20.0)
    assert [found.hours(each) for each in tried] == [1, 1]
    assert "about 1.5 hours" in found.advice
    assert "Worth it: 2x, 4x" in found.advice
    assert "--decay" not in found.advice
    assert "--order top --warmup-layers 0 --decay constant" in replace(found, trained=True).advice
    far = [Tried(each.speedup, each.schedule, each.bare, Damage(2.0, 0.2), 10.0) for each in tried]
    assert "None is worth it" in Probe("model", far, 36_000, 20.0).advice


def test_probing_finds_what_a_stand_in_saves(checkpoint: Path, tmp_path: Path) -> None:
    """On texts of the model's own: all candidates are measured, stand-ins help, and a second run reads the texts."""
    with pytest.raises(DataError, match=r"no token .--prompts"):  # this tokenizer has no begin-of-text token
        probe_model(str(checkpoint), (2,), folder=tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f"{json.dumps({'prompt': text})}\n" for text in TEXTS))
    options: dict[str, Any] = {
        "prompts": prompts,
        "count": 24,
        "max_new_tokens": 12,
        "rank": 16,
        "where": {"dtype": "float32"},
    }
    profile = tmp_path / "profile.json"
    profile_of(checkpoint, prepack=True).save(profile)
    found = probe_model(str(checkpoint), (2, 1), folder=tmp_path, profile=profile, **options)
    assert [each.schedule for each in found.tried] == [*candidates(8, 1), *candidates(8, 2)]
    for each in found.tried:
        if each.schedule.is_full:
            assert each.bare.kl == each.stand_ins.kl == pytest.approx(0, abs=1e-6)
            assert each.bare.agreement == 1
        else:
            assert 0 < each.stand_ins.kl < each.bare.kl
        # Layers take half of a step's time, so without half of them it takes three quarters.
        assert each.step_clock == pytest.approx(1 if each.schedule.is_full else 4 / 3)
    assert [each.speedup for each in found.best] == [1, 2]
    assert found.batch_size == 8  # the profile's largest
    _, tokenizer = load(str(checkpoint))
    written = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    measured = written[len(written) // 2 :]
    # The first token of a text is the prompt's; where it ended, its end is learnt too.
    learnt = sum(len(tokenizer(each["response"])["input_ids"]) for each in measured)
    assert found.tokens == pytest.approx(4000 * 3 * learnt / len(measured), rel=0.1)
    assert found.hours(found.best[1]) > 0
    assert f"--prompts {prompts} --adapter-rank 16 --max-new-tokens 12 --speedups 2" in found.advice
    with pytest.raises(UsageError, match="1 to 8, the model's number of layers"):
        probe_model(str(checkpoint), (2, 9), **options)
    with pytest.raises(UsageError, match="batches of 1 to 8 rows and up to 112 positions"):
        probe_model(str(checkpoint), (2,), profile=profile, **options | {"max_new_tokens": 90})
    texts = (tmp_path / "texts.jsonl").read_text()
    again = probe_model(str(checkpoint), (2,), folder=tmp_path, **options)
    assert (tmp_path / "texts.jsonl").read_text() == texts
    assert [each.stand_ins for each in again.tried] == [each.stand_ins for each in found.tried if each.speedup == 2]
    assert json.loads((tmp_path / "probe.json").read_text())["advice"] == again.advice
    (tmp_path / "texts.json").unlink()
    with pytest.raises(UsageError, match=r"texts.jsonl is there and was not written"):
        probe_model(str(checkpoint), (2,), folder=tmp_path, **options)
    assert (tmp_path / "texts.jsonl").read_text() == texts
    (tmp_path / "probe.json").write_text("{}")
    with pytest.raises(FileError, match=r"probe.json is there"):
        probe_model(str(checkpoint), (2,), folder=tmp_path, **options)
