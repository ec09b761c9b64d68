"""Probing: divergence of choices of layers before any training, and what closed-form bypasses give back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny import TEXTS, run, write_jsonl
from skipdecode import load
from skipdecode.errors import ScheduleError, UsageError
from skipdecode.schedule import flat_depth
from skipdecode.training.probe import Candidate, candidates, probe

SHORT: dict[str, Any] = {"num_texts": 16, "max_new_tokens": 12, "rank": 8, "say": str}


@pytest.fixture(scope="module")
def model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose layers change much: skipping them shows."""
    folder = tmp_path_factory.mktemp("model")
    network, tokenizer = load(str(checkpoint), dtype="float32")
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(8 if weight.ndim == 2 else 1)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", ({"prompt": text} for text in TEXTS))


@pytest.mark.parametrize("speedup", [1, 1.5, 2, 8])
def test_candidates_run_the_same_number_of_layers(speedup: float) -> None:
    """Each once, at constant depth, with all layers in the prompt; the last ones spread evenly."""
    found = list(candidates(8, speedup))
    assert len(set(found)) == len(found)
    assert {each.distinct_depths for each in found} == {(flat_depth(speedup, 8),)}
    assert {each.order for each in found} == {"top", "even"}
    assert {each.deepest for each in found} == {8}


@pytest.fixture(scope="module")
def tried(model: Path, prompts: Path) -> list[Candidate]:
    return probe(str(model), (2, 1), prompts=prompts, **SHORT)


def test_bypasses_come_nearer_than_skipping(tried: list[Candidate]) -> None:
    """On texts that they were not fitted to; 1x is the model itself."""
    assert [each.speedup for each in tried] == sorted(each.speedup for each in tried)
    for each in tried:
        if each.speedup == 1:
            assert each.skipped.kl == each.bypassed.kl == 0
            assert each.skipped.top1 == each.bypassed.top1 == 1
        else:
            assert 0 < each.bypassed.kl < each.skipped.kl


def test_the_command_shows_what_was_found(model: Path, prompts: Path, tried: list[Candidate]) -> None:
    """The same seed finds the same."""
    words = ["--speedups", "1,2", "--num-texts", 16, "--max-new-tokens", 12, "--rank", 8, "--prompts", prompts]
    done = run("probe", model, *words, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row["bypassed"]["kl"] for row in rows] == [each.bypassed.kl for each in tried]
    for each in tried:
        assert f"{each.skipped.kl:.2f}" in done.stdout


def test_what_cannot_be_probed_is_refused(model: Path, prompts: Path) -> None:
    with pytest.raises(ScheduleError, match="1 to the number of layers"):
        probe(str(model), (9,), prompts=prompts, **SHORT)
    with pytest.raises(UsageError, match="four texts at least: 3 of 3"):
        probe(str(model), (2,), prompts=prompts, **SHORT | {"num_texts": 3})
