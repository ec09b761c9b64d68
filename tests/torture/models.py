"""Random schedules, batches and threads on every family, against the reference that uses nothing of ours."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from helpers import families
from helpers.families import LAYERS, build, distance, new_token_logits, reference_logits, row, run, uncached
from skipdecode import Schedule, attach, detach
from skipdecode.evaluation.exactness import TOLERANCE
from skipdecode.model.cache_name import CACHE
from skipdecode.schedule import DECAYS
from torture.attempt import Attempt, Found, Kind

WORDS = 128  # of every family's vocabulary


@cache
def model_of(name: str, attention: str) -> PreTrainedModel:
    """A family's model, made once."""
    return build(name, attention)


def draw_model(attempt: Attempt, names: tuple[str, ...] = tuple(families.FAMILIES)) -> tuple[str, PreTrainedModel]:
    """A family in one of its attention implementations."""
    name, attention = attempt.random.choice([pair for pair in families.ATTENTIONS if pair[0] in names])
    return f"{name}, {attention}", model_of(name, attention)


def draw_schedule(random: Random) -> Schedule:
    """Any that is valid: every order, decay, depth and horizon, now and then with decay inside the prompt."""
    least = random.randint(1, LAYERS)
    most = random.randint(least, LAYERS)
    order: Any = random.choice(("top", "bottom", "even", "random", "random"))
    order = tuple(random.sample(range(LAYERS), LAYERS)) if order == "random" else order
    rest = {
        "order": order,
        "warmup": random.randint(0, least),
        "prompt_decay": random.choice((0, 0, random.randint(1, 20))),
    }
    decay = random.choice(list(DECAYS))
    if decay == "list":
        depths = sorted((random.randint(least, most) for _ in range(random.randint(1, 12))), reverse=True)
        return Schedule.from_depths(LAYERS, depths, **rest | {"warmup": random.randint(0, depths[-1])})
    if decay == "constant":
        most = least
    rest |= {"rate": random.choice((0.1, 1, 3, 30)), "stairs": random.randint(2, 9)}
    return Schedule(LAYERS, most, least, random.randint(1, 20), decay, **rest)


def draw_batch(random: Random) -> dict[str, Tensor]:
    """Left-padded prompts of uneven lengths, from one token on."""
    lengths = [random.randint(1, random.choice((3, 12, 24))) for _ in range(random.randint(1, 5))]
    width, dice = max(lengths), torch.Generator().manual_seed(random.randrange(2**31))
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    return {"input_ids": torch.randint(2, WORDS, mask.shape, generator=dice) * mask, "attention_mask": mask}


def _rounding(model: PreTrainedModel, inputs: dict[str, Tensor], new: int) -> float:
    """How far the stock model's own cached logits are from its uncached ones."""
    stock = run(detach(model), inputs, max_new_tokens=new)
    return distance(
        torch.stack(stock.logits, 1),
        reference_logits(model, Schedule.full(LAYERS), stock.sequences, inputs["attention_mask"]),
    )


def cached(attempt: Attempt) -> None:
    """Cached decoding, and one teacher-forced pass, are the stock layers undone; the depths are those asked for."""
    random = attempt.random
    (name, model), plan, inputs, new = (
        draw_model(attempt),
        draw_schedule(random),
        draw_batch(random),
        random.randint(2, 24),
    )
    attempt.counts["logits"] += new * len(inputs["input_ids"])
    output = run(model, inputs, plan, max_new_tokens=new)
    depths = [plan.depth(step) for step in range(new - 1)]
    if output[CACHE].step_depths != depths:
        raise Found(f"{name}, {plan}: ran {output[CACHE].step_depths}, not {depths}")
    expected = reference_logits(model, plan, output.sequences, inputs["attention_mask"])
    allowed = TOLERANCE
    for way, logits in (
        ("cached", torch.stack(output.logits, 1)),
        ("teacher-forced", new_token_logits(attach(model), plan, output.sequences, inputs["attention_mask"])),
    ):
        error = distance(logits, expected)
        if error > allowed:
            allowed = max(TOLERANCE, 4 * _rounding(model, inputs, new))
        if not error <= allowed:
            raise Found(
                f"{name}, {plan}, {inputs['attention_mask'].sum(1).tolist()} tokens: {way}: {error:.1e} > {allowed:.1e}"
            )


def alone(attempt: Attempt) -> None:
    """A row's tokens are those of the row by itself, unpadded."""
    random = attempt.random
    (name, model), plan, inputs, new = (
        draw_model(attempt),
        draw_schedule(random),
        draw_batch(random),
        random.randint(2, 24),
    )
    width = inputs["input_ids"].shape[1]
    together = run(model, inputs, plan, max_new_tokens=new)
    for index in range(len(inputs["input_ids"])):
        attempt.counts["rows"] += 1
        own = row(inputs, index)
        single = run(model, own, plan, max_new_tokens=new)
        a, b = together.sequences[index, width:], single.sequences[0, own["input_ids"].shape[1] :]
        if torch.equal(a, b):
            continue
        # Where rounding decides between two tokens, the logits up to there are equal.
        steps = int((a != b).nonzero()[0]) + 1
        error = distance(torch.stack(together.logits, 1)[index, :steps], torch.stack(single.logits, 1)[0, :steps])
        allowed = max(10 * TOLERANCE, 4 * _rounding(model, inputs, new))
        if error > allowed:
            raise Found(
                f"{name}, {plan}, {inputs['attention_mask'].sum(1).tolist()}: row {index}: {error:.1e} > {allowed:.1e}"
            )
        attempt.counts["ties"] += 1


def threads(attempt: Attempt) -> None:
    """Schedules, stock passes, training passes and copies, at once on one model: each as by itself."""
    random = attempt.random
    name, model = draw_model(attempt)
    attach(model)
    inputs = draw_batch(random)
    ids = torch.randint(2, WORDS, (len(inputs["input_ids"]), 30))
    plans = [draw_schedule(random) for _ in range(5)]

    def generate(subject: nn.Module, plan: Schedule | None) -> Tensor:
        return torch.stack(run(subject, inputs, plan, max_new_tokens=8).logits, 1)

    def taught(plan: Schedule) -> Tensor:
        with torch.no_grad():
            return uncached(model, plan, ids, inputs["attention_mask"]).logits

    works: list[tuple[str, Callable[[], Tensor]]] = [("stock", lambda: generate(model, None))]
    for plan in plans:
        works.append((f"generate {plan}", partial(generate, model, plan)))
        works.append((f"teacher-forced {plan}", partial(taught, plan)))
    works.append((f"deepcopy {plans[0]}", lambda: generate(copy.deepcopy(model), plans[0])))
    works.append((f"pickle {plans[1]}", lambda: generate(pickle.loads(pickle.dumps(model)), plans[1])))
    expected = [work() for _, work in works]
    order = [random.randrange(len(works)) for _ in range(24)]
    with ThreadPoolExecutor(random.randint(2, 6)) as pool:
        results = list(pool.map(lambda index: works[index][1](), order))
    for index, result in zip(order, results, strict=True):
        attempt.counts["calls"] += 1
        if not torch.equal(result, expected[index]):
            raise Found(f"{name}: {works[index][0]} differs among other threads")
    detach(model)


THREADS: dict[str, Kind] = {"calls": threads}
FAMILIES: dict[str, Kind] = {"cached": cached, "alone": alone}
