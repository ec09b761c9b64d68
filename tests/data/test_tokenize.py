"""Where a prompt ends and a response begins: training sees the ids that decoding will, in every kind of tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from helpers.tiny import TEXTS, WORDS, sentence_pieces, train_tokenizer
from skipdecode.data.chat import Message, Prompt
from skipdecode.data.examples import read_examples
from skipdecode.data.tasks import get_task
from skipdecode.data.tokenize import decode_response, encode_prompts, encode_response
from skipdecode.errors import DataError, ModelError
from skipdecode.loading.load import DEMO

E2E = Path(__file__).parents[3] / "shared" / "data" / "e2e"

TOKENIZERS: dict[str, PreTrainedTokenizerBase] = {"bytes": train_tokenizer(TEXTS * 20, 320)}
TOKENIZERS |= {kind: sentence_pieces(kind) for kind in ("legacy", "first", "always", "unigram")}
TOKENIZERS |= {"closed": sentence_pieces("legacy", eos=True), "bare": sentence_pieces("first", bos=False)}
BPE = TOKENIZERS["bytes"]
ALL = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
#: Its merges run over words: a text is rarely cut where its prompt ends.
CROSSING = sentence_pieces("crossing")

words = st.lists(st.sampled_from([*WORDS, "x,", "ash", "'s", "->", "7", "I."]), min_size=1, max_size=6).map(" ".join)
printable = st.text(st.sampled_from("\n abcdehst.,'7->"), min_size=1, max_size=12).filter(lambda t: bool(t.strip()))
FAST = settings(max_examples=20)


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
    """Llama's kind made a lone space of the one between them: ``▁ ▁sat``."""
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
    """the prompt is what decoding will see, whatever the text would have been cut to; nothing is added or lost."""
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
    written = decode_response(tokenizer, before, after)
    assert written == f" {response}"
    assert encode_response(tokenizer, [(prompt, written)], as_written=True) == [after]
    assert encode_response(tokenizer, [(prompt, written)], as_written=True, cut=[True]) == [after[:-1]]


def alone(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str) -> list[int]:
    """The ids of a response as they were before whole texts were cut."""
    return [
        *tokenizer(joint(prompt, response) + response, add_special_tokens=False)["input_ids"],
        tokenizer.eos_token_id,
    ]


@pytest.mark.skipif(not E2E.exists(), reason="the E2E release is not beside the checkout")
def test_the_demo_models_ids_are_what_they_were() -> None:
    """Its figures hold."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    rows = read_examples(E2E, get_task("e2e"), "validation")[:1000]
    pairs = [(str(row.prompt), row.references[0]) for row in rows]
    prompts = tokenizer([prompt for prompt, _ in pairs])["input_ids"]
    assert encode_prompts(tokenizer, [prompt for prompt, _ in pairs]) == prompts
    assert encode_response(tokenizer, pairs) == [alone(tokenizer, *pair) for pair in pairs]


@pytest.mark.parametrize("kind", ["legacy", "closed", "first"])
def test_a_begin_that_a_prompt_brings_is_its_begin(kind: str) -> None:
    """A prompt that the user rendered by a template holds one already."""
    tokenizer = TOKENIZERS[kind]
    (ids,) = encode_prompts(tokenizer, ["<s>the cat"])
    assert ids.count(tokenizer.bos_token_id) == 1
    response = encode_response(tokenizer, [("<s>the cat", "sat")])[0]
    assert text_of(tokenizer, ids + response) == "the cat sat"


def test_what_a_tokenizers_files_ask_for_is_set_aside() -> None:
    """Truncation would cut prompts in silence."""
    tokenizer = train_tokenizer(TEXTS * 20, 320)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    assert encode_prompts(tokenizer, TEXTS[:2]) == encode_prompts(BPE, TEXTS[:2])


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
        with pytest.raises(ModelError, match="needs a begin-of-text token"):
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


def test_what_is_put_behind_a_text_is_no_end_of_a_prompt() -> None:
    """Whatever token it is."""
    tokenizer, plain = sentence_pieces("legacy"), sentence_pieces("legacy")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <unk> <unk>", special_tokens=[("<s>", 1), ("<unk>", 0)]
    )
    assert tokenizer("the cat")["input_ids"][-2:] == [0, 0]
    assert split(tokenizer, "the cat", "sat") == split(plain, "the cat", "sat")


@pytest.mark.parametrize("prompt", ["a \ud83d", (Message("user", "\udcff"),)])
def test_what_is_no_unicode_is_told(prompt: Prompt) -> None:
    tokenizer = sentence_pieces()
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(DataError, match="not valid Unicode"):
        encode_prompts(tokenizer, ["the cat", prompt])


def test_without_a_begin_of_text_token_nothing_is_no_prompt() -> None:
    """A job names the row; training is refused, with what to do."""
    assert encode_prompts(BPE, ["", "the cat"])[0] == []
    with pytest.raises(ModelError, match=r"needs a begin-of-text token: set tokenizer\.bos_token"):
        encode_response(BPE, [("", "the cat")])
