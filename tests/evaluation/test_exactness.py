"""``check`` holds on every family, and fails where skipping is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import skipdecode
from helpers.families import FAMILIES, FORMS, LAYERS, TOP, build
from helpers.tiny import run
from skipdecode import Schedule, attach
from skipdecode.evaluation.exactness import CHECKS, NEW_TOKENS, run_checks
from skipdecode.model import cache, gate
from skipdecode.model.adapter import Adapter
from skipdecode.model.inspect import text_config


def failed(model: Any, schedule: Schedule) -> dict[str, str]:
    """Claims that do not hold, with the reason."""
    return {each.claim: each.detail for each in run_checks(model, schedule) if not each.held}


CACHED, FORCED = "cached decoding = these layers without a cache", "a training pass = these layers without gates"


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in {*FORMS, "gemma3n"} - {"gemma3"}])
def test_all_claims_hold_on_every_form_of_model(name: str) -> None:
    findings = list(run_checks(attach(build(name)), Schedule(LAYERS, 6, 2, horizon=8)))
    assert [finding for finding in findings if not finding.held] == []
    assert len(findings) == len(CHECKS)


def random_adapter(model: Any, schedule: Schedule) -> Adapter:
    """One that changes hidden states much."""
    adapter = Adapter(text_config(model.config).hidden_size, 4, {schedule.target: schedule})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return adapter


def test_an_adapter_is_checked_with_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 too, where needed; it stays what it was."""
    model = build("llama").bfloat16()
    adapter = random_adapter(model, TOP).bfloat16()
    attach(model, adapter=adapter)
    monkeypatch.setattr("skipdecode.evaluation.exactness.TOLERANCE", 1e-6)
    monkeypatch.setattr("skipdecode.evaluation.exactness.TIMES_STOCK", 0)
    findings = list(run_checks(model, TOP))
    assert [finding for finding in findings if not finding.held] == []
    assert any("in float64" in finding.detail for finding in findings)
    assert {weight.dtype for weight in (*model.parameters(), *adapter.parameters())} == {torch.bfloat16}


def run_all(right: Any, self: Any, index: int, width: int) -> None:
    """Let the layer run on all positions."""
    right(self, index, width)
    self.counts[index] = width


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (gate.Gates, "like_output", lambda right, self, hidden: right(self, hidden * 1.01)),
        (gate.Gates, "like_output", lambda right, self, hidden: right(self, hidden * 0)),
        (cache.SkipCache, "begin_layer", run_all),
        (gate.PositionSlice, "of_call", lambda right, self, forward, args, kwargs: (args, kwargs)),
    ],
    ids=["scaled", "forgotten", "skipped-layers-run", "uncut"],
)
def test_broken_skipping_fails(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, place: type, name: str, fault: Any
) -> None:
    """Hidden states passed on wrongly or not at all, layers that run though skipped, arguments uncut."""
    right = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *arguments: fault(right, *arguments))
    done = run("check", checkpoint, "--json")
    assert done.returncode == 1
    held = {finding["claim"]: finding["held"] for finding in json.loads(done.stdout.splitlines()[-1])}
    assert held["inert at full depth"]
    assert not all(held.values())


@pytest.mark.parametrize("step", [0, 2, 5])
def test_nan_at_any_step_fails(checkpoint: Path, step: int) -> None:
    """argmax of NaN is a token too, so that a broken model's texts would be equal."""
    model, _ = skipdecode.load(str(checkpoint))
    calls: list[int] = []

    def poison(module: Any, args: Any, output: Any) -> Any:
        calls.extend([1] * (output.shape[1] == 1))
        return output * float("nan") if len(calls) % NEW_TOKENS == (step + 1) % NEW_TOKENS else output

    model.lm_head.register_forward_hook(poison)
    found = failed(model, TOP)
    assert {CACHED, FORCED, "a second run generates the same"} <= set(found)
    assert "NaN" in found[CACHED]


def test_rounding_is_told_from_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without layer 1, rounding is many times the stock model's: float64 decides."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        initializer_range=1.0,
        pad_token_id=0,
    )
    model = attach(LlamaForCausalLM(config).eval())
    model.model.layers[1].mlp.down_proj.weight.data *= 1000
    schedule = Schedule(6, 5, 3, 8)
    with monkeypatch.context() as strict:  # how far float32 goes astray depends on the CPU: here always too far
        strict.setattr("skipdecode.evaluation.exactness.TOLERANCE", 1e-6)
        strict.setattr("skipdecode.evaluation.exactness.TIMES_STOCK", 0)
        findings = list(run_checks(model, schedule))
    assert [finding for finding in findings if not finding.held] == []
    assert any("in float64" in finding.detail for finding in findings)
    right = gate.Gates.like_output
    monkeypatch.setattr(gate.Gates, "like_output", lambda self, hidden: right(self, hidden * (1 + 1e-4)))
    assert set(failed(model, schedule)) >= {CACHED, FORCED}


def test_what_a_run_leaves_behind_is_found(checkpoint: Path) -> None:
    """A model with noise in it."""
    model, _ = skipdecode.load(str(checkpoint))
    model.get_input_embeddings().register_forward_hook(lambda m, args, output: output + torch.randn_like(output))
    assert "a second run generates the same" in failed(model, TOP)


# --- the verb


def test_a_sound_checkpoint_passes(checkpoint: Path) -> None:
    """With a schedule that begins at full depth, too; a full one is refused."""
    done = run("check", checkpoint, "--speedup", 1.2, "--json")
    findings = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, findings
    assert len(findings) == len(CHECKS)
    assert all(finding["held"] for finding in findings)
    assert "not trained" in done.stderr
    done = run("check", checkpoint, "--speedup", 1)
    assert done.returncode == 2
    assert "skips nothing" in done.stderr
