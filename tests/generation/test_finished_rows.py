"""Rows that have ended leave their batch: nobody's text changes, and the model computes fewer rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel, StoppingCriteria

from helpers.families import FORMS, SCHEDULES, TOP, build
from skipdecode import SkipCache, attach
from skipdecode.generation import finished_rows
from skipdecode.generation.generate import Decoding, generate_ids
from skipdecode.generation.stats import GenerationOutput
from skipdecode.model.cache import total_kv_bytes
from skipdecode.model.cache_name import CACHE

PAD, END, NEW = 0, 1, 16
LENGTHS = (9, 8, 7, 6, 5, 4, 3, 2)
WIDTH = max(LENGTHS)
#: After how many tokens the rows end; the sixth runs out of them.
ENDS = (3, 13, 6, 1, 9, 99, 4, 8)
#: Rows of each pass if those that have ended leave when half have: four of eight by token 6, two of four by 9.
ROWS = [8] * 6 + [4] * 3 + [2] * 4 + [1] * 3


class Tokenizer:
    """Tokens are their own text."""

    pad_token_id = PAD

    def decode(self, ids: list[int], **_: object) -> str:
        return " ".join(map(str, ids))


class Ends(LogitsProcessor):
    """Ends each row after so many tokens, and not before."""

    def __init__(self, ends: tuple[int, ...]) -> None:
        self.ends = torch.tensor(ends)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ends = self.ends.repeat_interleave(len(scores) // len(self.ends)) == input_ids.shape[1] - WIDTH + 1  # beams
        scores[:, END] = -torch.inf
        scores[ends] = -torch.inf
        scores[ends, END] = 0.0
        return scores


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(2, 128, (n,), generator=generator).tolist() for n in LENGTHS]


@contextmanager
def passes(model: PreTrainedModel) -> Iterator[list[int]]:
    """Rows that each forward pass computes."""
    rows: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    yield rows
    hook.remove()


@contextmanager
def all_stay() -> Iterator[None]:
    """No row leaves: the batches that the others are compared with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finished_rows, "SHARE", 0.0)
        yield


def write(model: PreTrainedModel, decoding: Decoding, ends: tuple[int, ...] = ENDS, **options: Any) -> GenerationOutput:
    processors = [*options.pop("logits_processor", []), Ends(ends)]
    defaults: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": END, "logits_processor": processors}
    return generate_ids(attach(model), Tokenizer(), prompts(), decoding, 8, 0, **(defaults | options))


PLANS = {"stock": None, **{key: SCHEDULES[key] for key in ("top-to-1", "even", "prompt-wide")}}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("key", PLANS)
def test_no_text_changes_and_fewer_rows_are_computed(name: str, key: str) -> None:
    """Sampled and greedy: sliding windows, recurrent layers, shared KV, depths that fall meanwhile.

    The penalty sees the ids of all rows, with those that have left.
    """
    model, plan = build(name), PLANS[key]
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_k": 40, "repetition_penalty": 1.2}
    for options in (sampled, {}) if key == "top-to-1" else (sampled,):
        with all_stay():
            stay = write(model, plan, **options)
        with passes(model) as rows:
            left = write(model, plan, **options)
        assert left.completions == stay.completions
        assert [row.tokens for row in left.completions] == [min(end, NEW) for end in ENDS]
        assert rows == ROWS
        assert (left.stats.steps, left.stats.layer_steps) == (stay.stats.steps, stay.stats.layer_steps)
        assert left.stats.peak_kv_bytes <= stay.stats.peak_kv_bytes


@pytest.mark.parametrize("kind", ["stock", "ours"])
def test_the_peak_is_the_most_that_the_cache_held(kind: str) -> None:
    """Before rows leave, not at the end; and what they held is given back."""
    caches: list[DynamicCache] = []

    def make(model: PreTrainedModel) -> DynamicCache:
        caches.append(DynamicCache(config=model.config) if kind == "stock" else SkipCache(model, TOP))
        return caches[-1]

    held: list[int] = []

    class Probe(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            held.append(total_kv_bytes(caches[-1]))
            return scores

    stats = write(build("llama"), make, logits_processor=[Probe()]).stats
    assert stats.peak_kv_bytes >= max(held)
    cut = ROWS.index(4)
    assert held[cut] < 0.6 * held[cut - 1]


class OtherCache(DynamicCache):
    """Of a baseline, say: it may hold data by rows."""


class First(StoppingCriteria):
    """Ends the first row at once; without an end token, ``generate`` writes it on."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.arange(len(input_ids)) == 0


@pytest.mark.parametrize(
    ("decoding", "options"),
    [
        (TOP, {"num_beams": 2}),
        (TOP, {"eos_token_id": None, "stopping_criteria": [First()]}),
        (lambda model: OtherCache(config=model.config), {}),
    ],
    ids=["beams", "no end", "another cache"],
)
def test_rows_stay_where_they_cannot_leave(decoding: Any, options: dict[str, Any]) -> None:
    model = build("opt")
    with passes(model) as rows:
        write(model, decoding, **options)
    assert len(set(rows)) == 1


def test_rows_stay_where_a_pass_takes_what_we_do_not_know() -> None:
    """A tensor that might be by rows, and might not; a family's own order of beams; a compiled model."""
    model, cache = build("gpt2"), DynamicCache(config=build("gpt2").config)
    ended = torch.tensor([True] * 7 + [False])
    rows = finished_rows.FinishedRows(model, cache, ended)
    for name, shape in (("input_ids", (5, 1)), ("attention_mask", (8, 1, 1, 9)), ("token_type_ids", (8, 1))):
        given = torch.ones(shape)
        assert rows._before(model, (), {name: given})[1][name] is given
    for change in (lambda model: setattr(model, "_reorder_cache", None), lambda model: model.compile()):
        model = build("gpt2")
        change(model)
        with finished_rows.FinishedRows(model, cache, ended):
            assert not model._forward_pre_hooks


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_nothing_is_left_on_the_model(ends: str) -> None:
    """Whatever happens in between; other passes of the model keep their rows."""
    model = build("opt")
    ids = torch.randint(2, 128, (len(LENGTHS), 4))
    with torch.no_grad():
        alone = attach(model)(ids).logits

    class Looks(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if input_ids.shape[1] < WIDTH + 5:  # all rows are there
                assert torch.equal(model(ids, **{CACHE: DynamicCache(config=model.config)}).logits, alone)
            elif ends == "badly":
                raise RuntimeError("on purpose")
            return scores

    with nullcontext() if ends == "well" else pytest.raises(RuntimeError, match="on purpose"):
        write(model, None, logits_processor=[Looks()])
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
