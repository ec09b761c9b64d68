"""Where a prompt ends and a response begins: training sees the ids that decoding will, in every kind of tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from helpers.tiny import TEXTS, WORDS, sentence_pieces
from skipdecode.data.collator import Collator, encoded
from skipdecode.data.tasks import Example, get_task
from skipdecode.data.tokenize import decode_behind, encode_prompts, encode_response, train_tokenizer
from skipdecode.errors import ModelError
from skipdecode.loading.load import DEMO

E2E = Path(__file__).parents[2] / "shared" / "data" / "e2e"

TOKENIZERS: dict[str, PreTrainedTokenizerBase] = {"bytes": train_tokenizer(TEXTS * 20, 320)}
TOKENIZERS |= {kind: sentence_pieces(kind) for kind in ("legacy", "first", "always", "unigram")}
TOKENIZERS |= {"closed": sentence_pieces("legacy", eos=True), "bare": sentence_pieces("first", bos=False)}
ALL = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
#: Its merges run over words: a text is rarely cut where its prompt ends.
CROSSING = sentence_pieces("crossing")

words = st.lists(st.sampled_from([*WORDS, "x,", "ash", "'s", "->", "7", "I."]), min_size=1, max_size=6).map(" ".join)
printable = st.text(st.sampled_from("\n abcdehst.,'7->"), min_size=1, max_size=12).filter(lambda t: bool(t.strip()))
FAST = settings(max_examples=40)


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """What the ids say."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def joint(prompt: str, response: str) -> str:
    """What stands between them: a space, where neither brings white space."""
    return "" if prompt[-1].isspace() or response[0].isspace() else " "


def split(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str) -> tuple[list[int], list[int]]:
    """A pair's ids."""
    return encode_prompts(tokenizer, [prompt])[0], encode_response(tokenizer, [(prompt, response)])[0]


@ALL
@FAST
@given(prompt=words, response=words)
@example(prompt="the cat", response="sat on a mat")
def test_prompt_and_response_are_the_whole_text(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str) -> None:
    """B1: Llama's kind made a lone space of the one between them: ``▁ ▁sat``."""
    before, after = split(tokenizer, prompt, response)
    whole = encode_prompts(tokenizer, [f"{prompt} {response}"])[0]
    assert before + after[:-1] == whole
    assert after[-1] == tokenizer.eos_token_id
    assert text_of(tokenizer, before + after) == f"{prompt} {response}"


@pytest.mark.parametrize("tokenizer", [*TOKENIZERS.values(), CROSSING], ids=[*TOKENIZERS, "crossing"])
@FAST
@given(prompt=printable | words, response=printable | words)
@example(prompt="the cat ", response="sat")
@example(prompt="the cat\n\n", response="sat")
@example(prompt="the cat  ", response=" sat")
@example(prompt="the", response="  cat")
def test_a_boundary_within_a_token_keeps_prompt_and_text(
    tokenizer: PreTrainedTokenizerBase, prompt: str, response: str
) -> None:
    """B1: the prompt is what decoding will see, whatever the text would have been cut to; nothing is added or lost."""
    before, after = split(tokenizer, prompt, response)
    whole = prompt + joint(prompt, response) + response
    ids = encode_prompts(tokenizer, [whole])[0]
    assert text_of(tokenizer, before + after[:-1]) == text_of(tokenizer, ids)
    if ids[: len(before)] == before:
        assert before + after[:-1] == ids


@ALL
@FAST
@given(prompt=words, response=words)
def test_what_a_model_wrote_is_read_back_as_its_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str, response: str
) -> None:
    """Behind its prompt, where Llama's kind does not drop the first space; and whole, without an end, if it was cut."""
    before, after = split(tokenizer, prompt, response)
    written = decode_behind(tokenizer, before, after)
    assert written == f" {response}"
    assert encode_response(tokenizer, [(prompt, written)], as_written=True) == [after]
    assert encode_response(tokenizer, [(prompt, written)], as_written=True, cut=[True]) == [after[:-1]]


def alone(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str) -> list[int]:
    """The ids of a response as they were before whole texts were cut."""
    return [
        *tokenizer(joint(prompt, response) + response, add_special_tokens=False)["input_ids"],
        tokenizer.eos_token_id,
    ]


@FAST
@given(prompt=printable | words, response=printable | words)
@example(prompt="the cat ", response="sat")
def test_bytes_are_cut_as_they_were(prompt: str, response: str) -> None:
    """B1 is Llama's: what was trained before, the embedded checkpoint too, sees the ids that it did."""
    tokenizer = TOKENIZERS["bytes"]
    assert split(tokenizer, prompt, response)[1] == alone(tokenizer, prompt, response)


@pytest.mark.skipif(not E2E.exists(), reason="the E2E release is not beside the checkout (docs/training.md)")
def test_the_embedded_checkpoints_ids_are_what_they_were() -> None:
    """B1: its figures hold."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    rows = get_task("e2e").read(E2E, "validation")
    pairs = [(str(row.prompt), reference) for row in rows for reference in row.references][:1000]
    prompts = tokenizer([prompt for prompt, _ in pairs])["input_ids"]
    assert encode_prompts(tokenizer, [prompt for prompt, _ in pairs]) == prompts
    assert encode_response(tokenizer, pairs) == [alone(tokenizer, *pair) for pair in pairs]


def test_an_end_that_the_tokenizer_puts_is_taken_off_and_no_other() -> None:
    """A model must go on after the prompt; an end that the user wrote is the prompt's."""
    closing, open_ended = TOKENIZERS["closed"], TOKENIZERS["legacy"]
    eos = closing.eos_token_id
    assert closing("the cat")["input_ids"][-1] == eos
    assert encode_prompts(closing, ["the cat"])[0][-1] != eos
    assert encode_prompts(open_ended, ["the cat</s>"])[0][-1] == eos
    assert encode_prompts(closing, ["the cat</s>"])[0][-1] == eos
    assert encode_prompts(closing, ["the cat</s>"])[0][-2] != eos
    assert encode_prompts(closing, []) == []
    assert encode_response(closing, []) == []


def test_a_tokenizer_without_an_end_is_refused() -> None:
    """A model could not learn to stop."""
    tokenizer = sentence_pieces()
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="end-of-sequence"):
        encode_response(tokenizer, [("a", "b")])


# --- plain text

SPACED = st.text(st.sampled_from("\n \tabcdehst.,'7->"), min_size=1, max_size=30)
BPE = TOKENIZERS["bytes"]


@pytest.mark.parametrize("tokenizer", [*TOKENIZERS.values(), CROSSING], ids=[*TOKENIZERS, "crossing"])
@FAST
@given(text=(SPACED | words).filter(lambda text: len(text.split()) > 1), share=st.floats(0, 0.99))
@example(text="  the cat\n\n  sat on\ta mat \n", share=0.5)
@example(text="the cat", share=0.99)
@example(text="\nthe cat sat", share=0)
def test_both_parts_of_a_plain_text_are_the_text(tokenizer: PreTrainedTokenizerBase, text: str, share: float) -> None:
    """White space is part of it: no space is added where it is cut, none is lost."""
    one = get_task("jsonl", prompt_share=share).example({"text": text})
    (response,) = one.references
    assert f"{one.prompt}{response}" == text
    if share == 0 and tokenizer.bos_token_id is None:
        with pytest.raises(ModelError, match="no begin-of-text token"):
            split(tokenizer, "", response)
        return
    before, after = split(tokenizer, str(one.prompt), response)
    whole = encode_prompts(tokenizer, [text])[0]
    assert after[-1] == tokenizer.eos_token_id
    assert text_of(tokenizer, before + after[:-1]) == text_of(tokenizer, whole)
    if tokenizer is BPE:  # loses nothing itself
        assert text_of(tokenizer, before + after[:-1]) == text
    if share == 0:
        assert before == [tokenizer.bos_token_id]


@pytest.mark.parametrize("kind", ["bare", "legacy", "closed"])
def test_nothing_is_the_begin_of_text_token(kind: str) -> None:
    """Also of a tokenizer that has one and does not put it before a text."""
    tokenizer = TOKENIZERS[kind]
    before, after = split(tokenizer, "", "the cat sat")
    assert before == [tokenizer.bos_token_id]
    assert text_of(tokenizer, before + after) == "the cat sat"
    assert after.count(tokenizer.bos_token_id) == 0
    assert encode_prompts(sentence_pieces(bos=False, eos=True), [""]) == [[1]]  # not the end that it puts
    assert encode_prompts(tokenizer, ["", "the cat"]) == [before, encode_prompts(tokenizer, ["the cat"])[0]]


def test_without_a_begin_of_text_token_nothing_is_no_prompt() -> None:
    """A job names the row; training is refused, with what to do."""
    assert encode_prompts(BPE, ["", "the cat"])[0] == []
    with pytest.raises(ModelError, match=r"no begin-of-text token.*set tokenizer\.bos_token"):
        encode_response(BPE, [("", "the cat")])


def test_a_response_that_brings_its_own_space_gets_no_other() -> None:
    """TRL's prompt-completion rows: `The sky is` and ` blue.`"""
    assert split(BPE, "the cat", " sat") == split(BPE, "the cat", "sat")


# --- batches

rows = st.lists(
    st.tuples(
        st.lists(st.integers(3, 90), min_size=1, max_size=9), st.lists(st.integers(3, 90), min_size=1, max_size=9)
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=200)
@given(rows=rows, multiple=st.sampled_from([1, 4, 8]), room=st.none() | st.integers(0, 12))
def test_every_response_token_is_a_label_once_where_it_is_predicted(
    rows: list[tuple[list[int], list[int]]], multiple: int, room: int | None
) -> None:
    """The prompt edge is one column; what is fed is the text; a batch is no wider than the model."""
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


@ALL
def test_encoded_rows_are_the_examples_that_fit(tokenizer: PreTrainedTokenizerBase) -> None:
    """Ids of each example in its order; none is longer than asked for."""
    examples = [Example(text, (text[::-1],)) for text in TEXTS]
    rows = encoded(examples, tokenizer, 1000)
    assert [(row["prompt_ids"], row["response_ids"]) for row in rows] == [
        split(tokenizer, str(e.prompt), e.references[0]) for e in examples
    ]
    longest = sorted(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows)[len(rows) // 2]
    kept = encoded(examples, tokenizer, longest)
    assert 0 < len(kept) < len(rows)
    assert all(len(row["prompt_ids"]) + len(row["response_ids"]) <= longest for row in kept)
