"""Divergence from the full model, and the loss of texts under it, against plain passes of single texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoConfig, LlamaConfig

from helpers.families import LAYERS, TOP, WIDTH, build, texts_of
from helpers.tiny import TEXTS
from skipdecode import Schedule, SkipCache, attach
from skipdecode.errors import ModelError, UsageError
from skipdecode.evaluation.divergence import divergence, loss_under
from skipdecode.generation.stats import Completion
from skipdecode.model.cache_name import CACHE
from skipdecode.model.teacher_forcing import PrefilledBatch

HALF = Schedule(LAYERS, LAYERS // 2, LAYERS // 2, 1, decay="constant")


def alone(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The texts of a batch, one by one."""
    return [
        {name: value[i : i + 1] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        for i in range(len(batch["labels"]))
    ]


@pytest.mark.parametrize("schedule", [HALF, TOP], ids=["constant", "falling"])
@torch.no_grad()
def test_divergence_is_that_of_decoding_step_by_step(schedule: Schedule) -> None:
    """KL and the most likely token of cached decode steps."""
    model = build("llama")
    batch = texts_of(model)
    (found,) = divergence([PrefilledBatch(attach(model), batch)], [schedule])
    texts = torch.cat([batch["input_ids"], batch["labels"][:, -1:]], 1)
    kl, same, count = 0.0, 0, 0
    for text, mask in zip(texts, batch["attention_mask"], strict=True):
        ids = text[int((1 - mask).sum()) :]
        prompt = WIDTH - int((1 - mask).sum())
        full, skipping = (decoded(model, each, ids, prompt) for each in (Schedule.full(LAYERS), schedule))
        kl += float((full.exp() * (full - skipping)).sum())
        same += int((full.argmax(-1) == skipping.argmax(-1)).sum())
        count += len(full)
    assert found.kl == pytest.approx(kl / count, rel=1e-4)
    assert found.top1 == pytest.approx(same / count)
    assert found.kl > 1e-4


def decoded(model: Any, schedule: Schedule, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Log-probabilities (steps, vocabulary) of cached decode steps over given tokens."""
    cache, steps = SkipCache(model, schedule), []
    model(ids[None, :prompt], **{CACHE: cache})
    for token in ids[prompt:-1]:
        steps.append(model(token[None, None], **{CACHE: cache}).logits[0, -1].log_softmax(-1))
    return torch.stack(steps)


def test_divergence_does_not_depend_on_batches() -> None:
    """Its interval is over texts: it holds the mean, and few texts have none."""
    model = attach(build("llama"))
    few = texts_of(model)
    batch = {name: value.repeat(10, 1) if isinstance(value, torch.Tensor) else value for name, value in few.items()}
    together, apart = (
        divergence([PrefilledBatch(model, each) for each in batches], [HALF])[0] for batches in ([batch], alone(batch))
    )
    assert apart.interval
    assert together.interval
    assert torch.tensor([apart.kl, *apart.interval]).allclose(torch.tensor([together.kl, *together.interval]))
    assert together.interval[0] < together.kl < together.interval[1]
    (one,) = divergence([PrefilledBatch(model, alone(batch)[0])], [HALF])
    assert one.interval is None


def test_the_full_model_diverges_from_another_but_not_from_itself() -> None:
    model = attach(build("llama"))
    batch = texts_of(model)
    full = Schedule.full(LAYERS)
    near, far = divergence([PrefilledBatch(model, batch)], [full, HALF])
    assert (near.kl, near.top1) == (0, 1)
    assert far.kl > 0
    torch.manual_seed(5)
    other = attach(AutoModelForCausalLM.from_config(model.config).eval())
    (distance,) = divergence([PrefilledBatch(model, batch)], [full], other)
    assert distance.kl > 0


def test_nothing_to_measure_and_nan_are_errors() -> None:
    model = attach(build("llama"))
    batch = texts_of(model)
    empty = batch | {"labels": torch.full_like(batch["labels"], -100)}
    with pytest.raises(UsageError, match="no text has a second token"):
        divergence([PrefilledBatch(model, empty)], [HALF])
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="NaN or infinite"):
        divergence([PrefilledBatch(model, batch)], [HALF])


@pytest.mark.parametrize("kind", ["gpt-neo", "llama"])
@torch.no_grad()
def test_the_loss_under_a_model_is_its_own_token_by_token(kind: str, checkpoint: Path) -> None:
    """Alone and without padding; a text's end counts if it has one. A table of positions is not exceeded."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    pairs = [(text[:11], Completion(text[11:], 1, "stop")) for text in TEXTS if text[11] == " "]
    pairs[1] = (pairs[1][0], replace(pairs[1][1], finish_reason="length"))
    widest = max(len(tokenizer(prompt)["input_ids"]) for prompt, _ in pairs)
    longest = max(len(tokenizer(completion.text)["input_ids"]) for _, completion in pairs)
    common = {"vocab_size": len(tokenizer), "hidden_size": 32, "eos_token_id": tokenizer.eos_token_id}
    if kind == "gpt-neo":
        types = [[["global"], 2]]
        config: Any = GPTNeoConfig(
            num_layers=2, num_heads=4, attention_types=types, max_position_embeddings=widest + longest, **common
        )
    else:
        heads = {"num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
        config = LlamaConfig(max_position_embeddings=widest - 1, **heads, **common)
    model = AutoModelForCausalLM.from_config(config).eval()
    nats, count = 0.0, 0
    for prompt, completion in pairs:
        before = len(tokenizer(prompt)["input_ids"])
        ids = tokenizer(prompt + completion.text)["input_ids"]
        ids += [tokenizer.eos_token_id] * (completion.finish_reason == "stop")
        scores = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
        nats -= sum(float(scores[at - 1, ids[at]]) for at in range(before, len(ids)))
        count += len(ids) - before
    found = loss_under(model, tokenizer, [prompt for prompt, _ in pairs], [each for _, each in pairs], 2)
    assert found == pytest.approx(nats / count, rel=1e-4)
