"""A model people know, with the adapter that this repository holds: results/smollm2/adapter."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny import run
from skipdecode import attach, detach, generate, load
from skipdecode.data.chat import Prompt, parse_messages
from skipdecode.data.collator import batches_of
from skipdecode.data.tasks import Example
from skipdecode.evaluation.divergence import divergence
from skipdecode.model.adapter import read_schedules
from skipdecode.model.cache import SkipCache
from skipdecode.model.cache_name import CACHE
from skipdecode.model.teacher_forcing import PrefilledBatch
from skipdecode.schedule import Schedule

ROOT = Path(__file__).parents[1]
FOLDER = Path(os.environ.get("SMOLLM2", ROOT / "smollm2"))
RESULTS = ROOT / "results" / "smollm2"
ADAPTER = RESULTS / "adapter"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (FOLDER / "tokenizer.json").exists(), reason="needs SmolLM2: python recipes/smollm2.py smollm2"
    ),
]


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Questions that the adapter has not seen; the model made them up."""
    lines = (RESULTS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:6]
    return [parse_messages(json.loads(line)["messages"]) for line in lines]


@pytest.fixture(scope="module")
def texts(prompts: list[Prompt]) -> list[Example]:
    """What stock transformers writes after them."""
    model, tokenizer = load(str(FOLDER))
    made = generate(model, tokenizer, prompts, speedup=1, max_new_tokens=40)
    return [Example(prompt, (each.text,)) for prompt, each in zip(prompts, made.completions, strict=True)]


def test_full_depth_is_the_model(texts: list[Example], prompts: list[Prompt]) -> None:
    """To the bit, with the adapter attached: a pass without a cache, and texts at 1x."""
    model, tokenizer = load(str(FOLDER), adapter=ADAPTER)
    (batch,) = batches_of(texts, tokenizer, len(texts))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        ours = model(**inputs, **{CACHE: SkipCache(attach(model), Schedule.full(30))}).logits
        stock = detach(model)(**inputs).logits
    assert torch.equal(ours, stock)
    model, tokenizer = load(str(FOLDER), adapter=ADAPTER)
    made = generate(model, tokenizer, prompts, speedup=1, max_new_tokens=40)
    assert [each.text for each in made.completions] == [text.references[0] for text in texts]


def test_the_adapter_keeps_near_full_depth(texts: list[Example]) -> None:
    """Nearer than the bare layers at each speed, and the nearer the slower."""
    schedules = [schedule for _, schedule in sorted(read_schedules(ADAPTER).items())]
    found: dict[bool, list[Any]] = {}
    for with_adapter in (True, False):
        model, tokenizer = load(str(FOLDER), adapter=ADAPTER if with_adapter else None)
        attach(model)
        batches = batches_of(texts, tokenizer, len(texts))
        found[with_adapter] = divergence([PrefilledBatch(model, batch) for batch in batches], schedules)
    learnt = found[True]
    for ours, bare in zip(learnt, found[False], strict=True):
        assert ours.kl < bare.kl / 2
        assert ours.top1 > bare.top1
    assert learnt[0].kl < learnt[1].kl < 1.5
    assert learnt[0].top1 > 0.65


def test_it_talks_at_its_speeds() -> None:
    """A conversation whose speed changes."""
    lines = b"What is a solar panel made of?\n/speed 2\nSay it in one sentence.\n"
    done = run("chat", FOLDER, "--adapter", ADAPTER, "--speedup", 1.5, "--max-new-tokens", 24, stdin=lines)
    assert done.returncode == 0, done.stderr
    assert "20.0 of 30 layers" in done.stderr
    assert "15.0 of 30 layers" in done.stderr
    assert len(done.stdout.split()) > 20


def test_the_figures_of_the_table_are_what_this_code_gives() -> None:
    """README's distances, of the texts that are kept with them."""
    _, *lines = (RESULTS / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["target"]: row for row in map(json.loads, lines)}
    lines = (RESULTS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [parse_messages(json.loads(line)["messages"]) for line in lines]
    written = [Example(prompt, (text,)) for prompt, text in zip(asked, rows[1]["texts"], strict=True)]
    model, tokenizer = load(str(FOLDER), adapter=ADAPTER, dtype="float32")
    attach(model)
    passes = (PrefilledBatch(model, batch) for batch in batches_of(written, tokenizer, 8, as_written=True))
    schedules = read_schedules(ADAPTER)
    for speedup, found in zip(schedules, divergence(passes, [*schedules.values()]), strict=True):
        assert found.kl == pytest.approx(rows[speedup]["kl"], abs=0.005)
        assert 100 * found.top1 == pytest.approx(rows[speedup]["top_1"], abs=0.5)
