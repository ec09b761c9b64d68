"""Prompts computed once serve every schedule: logits and gradients of one pass over prompt and text."""

from __future__ import annotations

import pytest
import torch

from helpers.families import (
    FAMILIES,
    FORMS,
    LAYERS,
    SCHEDULES,
    TOP,
    WIDTH,
    build,
    distance,
    prompts,
)
from skipdecode import Schedule, ScheduleError, attach, teacher_forced
from skipdecode.model.adapter import Adapter
from skipdecode.model.teacher_forcing import PrefilledBatch

FULL = Schedule.full(LAYERS)


TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        (name, schedule)
        for name in FAMILIES
        for schedule in (("top", "permutation", "list") if name in FORMS else ("permutation",))
    ],
)
def test_texts_after_shared_prompts_are_teacher_forced(name: str, schedule: str) -> None:
    """Prompts computed once serve all schedules: logits and gradients are those of one pass over prompt and text."""
    model, plan, start = attach(build(name)), SCHEDULES[schedule], prompts()["input_ids"]
    text = torch.cat([start, torch.randint(2, 128, (len(start), 10))], 1)
    mask = torch.cat([prompts()["attention_mask"], torch.ones(len(text), text.shape[1] - WIDTH, dtype=torch.long)], 1)
    batch = {"input_ids": text, "attention_mask": mask, "prompt_length": WIDTH}
    batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    passes, gradients = PrefilledBatch(model, batch), []
    for shared in (True, False):
        model.zero_grad()
        if shared:
            with torch.no_grad():
                passes.logits(FULL)  # another pass in between changes nothing
            after = passes.logits(plan)
            logits = after
        else:
            with teacher_forced(model, plan, WIDTH):
                logits = model(**{k: v for k, v in batch.items() if k != "prompt_length"}, use_cache=False).logits
            assert distance(after, logits[:, WIDTH:]) < TOLERANCE
        logits[:, -1].square().sum().backward()
        gradients.append(model.get_input_embeddings().weight.grad is not None)
    assert all(gradients)


def test_schedules_that_skip_layers_in_the_prompt_are_refused() -> None:
    """It was computed by all layers; nor may an adapter skip what it was not trained to."""
    model, ids = attach(build("llama")), prompts()["input_ids"]
    mask = torch.ones_like(ids)
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1, "prompt_length": 4}
    passes = PrefilledBatch(model, batch)
    for plan in (TOP.replace(prompt_layers="max"), TOP.replace(prompt_decay=2)):
        with pytest.raises(ScheduleError, match="leave prompt_layers and prompt_decay out"):
            passes.logits(plan)
    attach(model, adapter=Adapter(32, 4, {2.0: TOP}))
    with pytest.raises(ScheduleError, match="cannot skip layers"):
        passes.logits(TOP.replace(warmup=2))


def test_positions_that_count_are_those_of_labels_after_the_first() -> None:
    """The first token of a text is computed by the prompt's pass."""
    model, ids = attach(build("llama")), prompts()["input_ids"]
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": ids.cumsum(1),
        "prompt_length": 4,
    }
    batch["labels"] = torch.tensor([[-100, 5, 6, -100, 8]] * 3)
    assert PrefilledBatch(model, batch).counted.tolist() == [[True, False, True]] * 3
