"""Encode prompts and responses, and decide at which token a response begins."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import ModelError
from .chat import MARK, Prompt, render

#: Strings put before a response to encode it apart from its prompt; one that does not merge with it is enough.
ANCHORS = ("\n", ".", ",", "a", "0", "(", "#")


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the token ids of prompts, with the tokenizer's special tokens but without an end-of-sequence at the end.

    An empty text becomes the begin-of-text token, if there is one. The tokenizer's chat template renders conversations
    and their special tokens, up to where the assistant's answer begins (see :func:`skipdecode.data.chat.render`).
    Raises ModelError for a conversation if there is no chat template, or the template refuses it.
    """
    return _encode(tokenizer, [p if isinstance(p, str) else render(tokenizer, p) for p in prompts], prompts)


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the token ids of texts, each of which begins with its prompt; a rendered chat has its special tokens."""
    ids: list[list[int]] = [[]] * len(texts)
    chats = [i for i, prompt in enumerate(prompts) if not isinstance(prompt, str)]
    plain = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str)]
    for places, special in ((plain, True), (chats, False)):
        if places:
            rows = tokenizer([texts[i] for i in places], padding=False, truncation=False, add_special_tokens=special)
            closes = special and tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]
            for i, row in zip(places, rows["input_ids"], strict=True):
                ids[i] = row[:-1] if closes and len(row) > 1 else row
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [row if text else begin for text, row in zip(texts, ids, strict=True)]


def encode_response(
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[tuple[Prompt, str]],
    *,
    as_written: bool = False,
    cut: Sequence[bool] = (),
) -> list[list[int]]:
    """Return the token ids of each pair's response, with end-of-sequence at the end unless the response was ``cut``.

    A space separates prompt and response, unless the prompt is empty or either has white space there. A conversation's
    response is the text that the chat template adds after the prompt, up to its end-of-sequence. Templates of models
    that think write an answer's thoughts otherwise, or drop them; ``as_written`` leaves what a model wrote as it is,
    and puts no space before it.

    The response's ids are those of the whole text without the prompt's ids. If the whole text's ids do not begin with
    the prompt's (a prompt's last space may be in a token with the next word), the response is encoded separately;
    ``decode(prompt + response)`` is always the whole text.

    Raises:
        ModelError: the tokenizer has no end-of-sequence token, no begin-of-text token although a prompt is empty, or no
            chat template that keeps the prompt unchanged before an answer; or it cannot encode a response separately.
    """
    if tokenizer.eos_token_id is None:
        raise ModelError("the tokenizer has no end-of-sequence token: set one before training")
    prompts = [prompt for prompt, _ in pairs]
    if "" in prompts and tokenizer.bos_token_id is None:
        raise ModelError(
            "the tokenizer has no begin-of-text token, so a text cannot be learned from nothing (prompt_share 0): "
            "give the prompt a share, or set tokenizer.bos_token"
        )
    texts = [prompt if isinstance(prompt, str) else render(tokenizer, prompt) for prompt in prompts]
    cut = cut or [False] * len(pairs)
    rests = [_rest_of(tokenizer, *pair, text, as_written) for pair, text in zip(pairs, texts, strict=True)]
    for i, (_, response) in enumerate(pairs):
        if cut[i]:  # without what a template closes it with
            at = rests[i].find(response)
            rests[i] = rests[i][: at + len(response)] if at >= 0 else response
    before = _encode(tokenizer, texts, prompts)
    whole = _encode(tokenizer, [text + rest for text, rest in zip(texts, rests, strict=True)], prompts)
    rows = []
    for prompt, rest, start, ids, is_cut in zip(prompts, rests, before, whole, cut, strict=True):
        if ids[: len(start)] == start:
            ids = ids[len(start) :]
        elif prompt:  # not for an empty prompt, whose begin-of-text token some tokenizers do not add
            ids = _ids_behind(tokenizer, start, ids, rest)
        if not is_cut:
            ids = _closed(tokenizer, ids) if isinstance(prompt, tuple) else [*ids, tokenizer.eos_token_id]
        rows.append(ids)
    return rows


def decode_behind(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of ``ids`` as it follows a prompt's: decoded alone, some tokenizers drop its first space."""
    before, whole = (tokenizer.decode([*each], skip_special_tokens=True) for each in (prompt, [*prompt, *ids]))
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode([*ids], skip_special_tokens=True)


def _rest_of(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, response: str, text: str, as_written: bool) -> str:
    """Return the response as it follows ``text``, the rendered prompt: behind a space, or as the template has it."""
    if isinstance(prompt, str):
        apart = as_written or not prompt or prompt[-1].isspace() or response[:1].isspace()
        return response if apart else f" {response}"
    whole = render(tokenizer, prompt, response)
    if as_written and not (whole.startswith(text) and whole[len(text) :].lstrip().startswith(response)):
        return response + render(tokenizer, prompt, MARK).rpartition(MARK)[2]
    if not whole.startswith(text):
        raise ModelError(
            "the tokenizer's chat template writes a prompt otherwise once it is answered, so the answer cannot be told "
            f"from it: {text[-60:]!r} does not begin it. Take a template that only adds the answer"
        )
    return whole[len(text) :]


def _closed(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Return an answer's ids up to its template's end-of-sequence, or with one appended if there is none."""
    eos = tokenizer.eos_token_id
    if eos in ids:
        end = len(ids) - ids[::-1].index(eos)
        if not tokenizer.decode(ids[end:]).strip():  # ChatML adds a line break there, which generation never reaches
            return ids[:end]
    return [*ids, eos]


def _ids_behind(tokenizer: PreTrainedTokenizerBase, start: list[int], whole: list[int], text: str) -> list[int]:
    """Return ids of ``text`` such that ``start`` and they decode to the same text as ``whole``."""

    def ids_of(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False)["input_ids"]

    said = tokenizer.decode(whole)
    for anchor in ("", *ANCHORS):
        head, ids = ids_of(anchor) if anchor else [], ids_of(anchor + text)
        if ids[: len(head)] == head and tokenizer.decode(start + ids[len(head) :]) == said:
            return ids[len(head) :]
    raise ModelError(f"the tokenizer cannot set {text[:60]!r} behind its prompt: end the prompt without white space")


def for_decoding(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Set left padding, and end-of-sequence as the padding token if there is none, and return the tokenizer."""
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most ``vocab_size`` tokens, with ``<pad>`` and ``</s>``.

    Raises ModelError if ``vocab_size`` is below 258 (these two and 256 bytes) or above 2**22.
    """
    least, most = len(pre_tokenizers.ByteLevel.alphabet()) + 2, 1 << 22  # the trainer allocates memory for all
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
