"""Batches: every response token is a label once, where it is predicted, and all prompts end in the same column."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.tiny import TEXTS, train_tokenizer
from skipdecode.data.collator import Collator, batches, batches_of, encoded
from skipdecode.data.tasks import Example
from skipdecode.data.tokenize import encode_prompts, encode_response

TOKENIZER = train_tokenizer(TEXTS * 20, 320)
EXAMPLES = [Example(text, (text[::-1],)) for text in TEXTS]

rows = st.lists(
    st.tuples(
        st.lists(st.integers(3, 90), min_size=1, max_size=9), st.lists(st.integers(3, 90), min_size=1, max_size=9)
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=80)
@given(rows=rows, multiple=st.sampled_from([1, 4, 8]), room=st.none() | st.integers(0, 12))
def test_every_response_token_is_a_label_once_where_it_is_predicted(
    rows: list[tuple[list[int], list[int]]], multiple: int, room: int | None
) -> None:
    """What is fed is the text; a batch is no wider than the model."""
    longest = max(len(prompt) for prompt, _ in rows)
    widest = None if room is None else max(longest + room, *(len(p) + len(r) - 1 for p, r in rows))
    collate = Collator(pad_token_id=0, multiple=multiple, max_length=widest)
    batch: Any = collate([{"prompt_ids": prompt, "response_ids": response} for prompt, response in rows])
    ids, mask, labels, edge = (batch[key] for key in ("input_ids", "attention_mask", "labels", "prompt_length"))
    width = ids.shape[1]
    assert ids.shape == mask.shape == batch["position_ids"].shape
    assert labels.shape == (len(rows), 1 + width - edge + 1)
    assert widest is None or width <= widest
    assert edge >= longest
    for i, (prompt, whole) in enumerate(rows):
        here = mask[i].bool()
        response = whole[: width - edge + 1]  # beside a longer prompt, the end of a response may have no room
        assert response == whole or width == widest
        assert ids[i][here].tolist() == [*prompt, *response[:-1]]
        assert here.nonzero().flatten().tolist() == list(range(edge - len(prompt), edge + len(response) - 1))
        assert batch["position_ids"][i][here].tolist() == list(range(len(prompt) + len(response) - 1))
        assert torch.equal(ids[i][~here], torch.zeros_like(ids[i][~here]))
        # Column edge - 1 + j predicts the response's token j.
        assert labels[i, 1 : 1 + len(response)].tolist() == response
        assert (labels[i] != -100).sum() == len(response)


def test_encoded_rows_are_the_examples_that_fit() -> None:
    """Ids of each example in its order; the sampler finds what is alike in length."""
    rows = encoded(EXAMPLES, TOKENIZER, 1000)
    assert [row["prompt_ids"] for row in rows] == encode_prompts(TOKENIZER, TEXTS)
    assert [row["response_ids"] for row in rows] == encode_response(TOKENIZER, [(t, t[::-1]) for t in TEXTS])
    longest = sorted(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows)[len(rows) // 2]
    kept = encoded(EXAMPLES, TOKENIZER, longest)
    assert 0 < len(kept) < len(rows)
    assert all(len(row["prompt_ids"]) + len(row["response_ids"]) <= longest for row in kept)
    by_length = sorted(rows, key=lambda row: row["length"])
    widths = [-(-len(row["prompt_ids"]) // 8) for row in by_length]
    assert widths == sorted(widths)


def test_a_response_that_was_cut_has_no_end_to_learn() -> None:
    whole, cut = (encoded([Example("the cat", (" sat",), cut)], TOKENIZER)[0]["response_ids"] for cut in (False, True))
    assert whole == [*cut, TOKENIZER.eos_token_id]


def test_batches_hold_all_rows_in_their_order() -> None:
    rows = encoded(EXAMPLES, TOKENIZER)
    made = batches(rows, TOKENIZER, 3)
    assert [len(batch["input_ids"]) for batch in made][:-1] == [3] * (len(made) - 1)
    labels = [label[label != -100].tolist() for batch in made for label in batch["labels"]]
    assert labels == [row["response_ids"] for row in rows]
    again = batches_of(EXAMPLES, TOKENIZER, 3)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(made, again, strict=True))
