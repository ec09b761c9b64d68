"""Text to token ids and left-padded batches: the one place that decides where a prompt ends and a response begins."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import ModelError

#: What a response is put behind where it cannot be put behind its prompt: one that merges with no letter is enough.
ANCHORS = ("\n", ".", ",", "a", "0", "(", "#")


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids with the tokenizer's own special tokens, less an end-of-sequence that it puts last."""
    if not prompts:
        return []
    rows = tokenizer(list(prompts), padding=False, truncation=False)["input_ids"]
    closes = tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]
    return [row[:-1] if closes and len(row) > 1 else row for row in rows]


def encode_response(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
    """Ids of each (prompt, response)'s response, set off from its prompt by a space, closed by end-of-sequence.

    They are the ids of the whole text after those of the prompt alone, which are all that decoding sees. Where these
    do not begin the whole text's (a prompt that ends in white space may share a token with what follows), they are
    ids that say the rest behind the prompt's: ``decode(prompt + response)`` is always the whole text.

    Raises ModelError for a tokenizer that has no end-of-sequence token: a model could not learn to stop.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise ModelError("the tokenizer has no end-of-sequence token: set one before training")
    texts = [response if prompt[-1:].isspace() else f" {response}" for prompt, response in pairs]
    before = encode_prompts(tokenizer, [prompt for prompt, _ in pairs])
    whole = encode_prompts(tokenizer, [prompt + text for (prompt, _), text in zip(pairs, texts, strict=True)])
    return [
        [*(ids[len(start) :] if ids[: len(start)] == start else _rest(tokenizer, start, ids, text)), eos]
        for start, ids, text in zip(before, whole, texts, strict=True)
    ]


def _rest(tokenizer: PreTrainedTokenizerBase, start: list[int], whole: list[int], text: str) -> list[int]:
    """Ids of ``text`` that, behind those of ``start``, say what ``whole`` says."""

    def ids_of(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False)["input_ids"]

    said = tokenizer.decode(whole)
    for anchor in ("", *ANCHORS):
        head, ids = ids_of(anchor) if anchor else [], ids_of(anchor + text)
        if ids[: len(head)] == head and tokenizer.decode(start + ids[len(head) :]) == said:
            return ids[len(head) :]
    raise ModelError(f"the tokenizer cannot set {text[:60]!r} behind its prompt: end the prompt without white space")


def for_decoding(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Left padding, with end-of-sequence as the padding token where there is none (padding is masked anyway)."""
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most ``vocab_size`` tokens, with ``<pad>`` and ``</s>``.

    Raises ModelError for a size that does not hold these two and the 256 bytes, or is larger than any.
    """
    least, most = len(pre_tokenizers.ByteLevel.alphabet()) + 2, 1 << 22  # the trainer takes memory for all of them
    if type(vocab_size) is not int or not least <= vocab_size <= most:
        raise ModelError(f"a tokenizer of bytes has {least} to {most} tokens: vocab_size cannot be {vocab_size!r}")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        eos_token="</s>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
