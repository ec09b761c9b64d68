"""Token ids of prompts and responses, and where a response begins. The only place that decides on special tokens."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ..errors import DataError, ModelError
from .chat import MARK, Prompt, render

#: Texts in front of which a response is encoded if it cannot be encoded behind its prompt; one that it does not merge
#: with is enough.
ANCHORS = ("\n", ".", ",", "a", "0", "(", "#")


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of prompts, with one begin-of-text token where the tokenizer adds one, and no end of sequence.

    An empty text becomes the begin-of-text token, if there is one. Conversations are rendered by the chat template,
    up to where the assistant's answer begins. Raises ModelError where :func:`skipdecode.data.chat.render` does.
    """
    texts = []
    for number, prompt in enumerate(prompts, 1):
        try:
            texts.append(prompt if isinstance(prompt, str) else render(tokenizer, prompt))
        except ModelError as error:
            raise ModelError(f"prompt {number}: {error}") from error
    return _encode(tokenizer, texts, prompts)


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of texts that begin with their prompts; a rendered conversation has its special tokens already."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"this is not valid Unicode, mend the text: {error.object[: error.end][-40:]!r}") from None
    begin = tokenizer.bos_token_id
    options = {"padding": False, "truncation": False}  # a tokenizer's files may ask for them
    bare, full = (tokenizer("a", add_special_tokens=special, **options)["input_ids"] for special in (False, True))
    before: list[int] = next((full[:i] for i in range(len(full)) if full[i:][: len(bare)] == bare), [])
    encoded = tokenizer(list(texts), add_special_tokens=False, **options)["input_ids"] if texts else []
    for i, prompt in enumerate(prompts):
        if not texts[i]:
            encoded[i] = [] if begin is None else [begin]
        elif isinstance(prompt, str):  # with what the tokenizer puts before a text, without what it puts behind
            encoded[i] = before + encoded[i]
        if begin is not None and encoded[i][:2] == [begin, begin]:  # the template rendered this text before
            del encoded[i][0]
    return encoded


def encode_response(
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[tuple[Prompt, str]],
    *,
    as_written: bool = False,
    cut: Sequence[bool] = (),
) -> list[list[int]]:
    """Token ids of each pair's response, with one end of sequence unless the response was ``cut``.

    A space separates a text and its response, unless one of them has white space there or the text is empty. A
    conversation's response is what the chat template adds, up to its end of sequence. ``as_written`` leaves what a
    model wrote as it is: without a space before it, and with thoughts that the template would drop.

    The ids are those of the whole text without the prompt's; where a token reaches over the border, those of the
    response alone. Decoding prompt and response always gives the whole text.

    Raises:
        ModelError: there is no end-of-sequence token, no begin-of-text token for an empty prompt, or no chat template
            that keeps a prompt unchanged before an answer; or the response cannot be encoded alone.
    """
    if tokenizer.eos_token_id is None:
        raise ModelError("the tokenizer has no end-of-sequence token: set one before training")
    prompts = [prompt for prompt, _ in pairs]
    if "" in prompts and tokenizer.bos_token_id is None:
        raise ModelError("an empty prompt needs a begin-of-text token: set tokenizer.bos_token, or prompt_share")
    texts = [prompt if isinstance(prompt, str) else render(tokenizer, prompt) for prompt in prompts]
    cut = cut or [False] * len(pairs)
    rests = []
    for (prompt, response), text, is_cut in zip(pairs, texts, cut, strict=True):
        rest = _rest(tokenizer, prompt, response, text, as_written)
        if is_cut:  # without what a template closes it with
            rest = (rest[: rest.index(response)] if response in rest else "") + response
        rests.append(rest)
    starts = _encode(tokenizer, texts, prompts)
    wholes = _encode(tokenizer, [text + rest for text, rest in zip(texts, rests, strict=True)], prompts)
    responses = []
    for prompt, rest, start, whole, is_cut in zip(prompts, rests, starts, wholes, cut, strict=True):
        if whole[: len(start)] == start:
            ids = whole[len(start) :]
        elif prompt:
            ids = _encode_alone(tokenizer, start, whole, rest)
        else:  # some tokenizers do not add the begin-of-text token that an empty prompt is
            ids = whole
        responses.append(ids if is_cut else _close(tokenizer, ids))
    return responses


def _rest(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, response: str, text: str, as_written: bool) -> str:
    """The response as it follows ``text``, the rendered prompt: behind a space, or as the template has it."""
    if isinstance(prompt, str):
        has_space = not prompt or prompt[-1].isspace() or response[:1].isspace()
        return response if as_written or has_space else f" {response}"
    whole = render(tokenizer, prompt, response)
    if as_written and not (whole.startswith(text) and whole[len(text) :].lstrip().startswith(response)):
        return response + render(tokenizer, prompt, MARK).rpartition(MARK)[2]
    if not whole.startswith(text):
        raise ModelError(f"the chat template changes a prompt once it is answered: {text[-60:]!r} does not begin it")
    return whole[len(text) :]


def _close(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """A response's ids up to its own end of sequence, or with one appended if there is none."""
    eos = tokenizer.eos_token_id
    for end, token in enumerate(ids, 1):  # ChatML adds a line break behind it, and the text may bring an end as well
        if token == eos and not tokenizer.decode([rest for rest in ids[end:] if rest != eos]).strip():
            return ids[:end]
    return [*ids, eos]


def _encode_alone(tokenizer: PreTrainedTokenizerBase, start: list[int], whole: list[int], text: str) -> list[int]:
    """Ids of ``text`` such that ``start`` and they decode to the same text as ``whole``."""
    expected = tokenizer.decode(whole)
    for anchor in ("", *ANCHORS):
        head = tokenizer(anchor, add_special_tokens=False)["input_ids"] if anchor else []
        ids = tokenizer(anchor + text, add_special_tokens=False)["input_ids"]
        if ids[: len(head)] == head and tokenizer.decode(start + ids[len(head) :]) == expected:
            return ids[len(head) :]
    raise ModelError(f"the tokenizer cannot encode {text[:60]!r} behind its prompt: end the prompt without white space")


def decode_response(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Text of ``ids`` as it follows a prompt's: decoded alone, some tokenizers drop its first space."""
    before = tokenizer.decode([*prompt], skip_special_tokens=True)
    whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode([*ids], skip_special_tokens=True)
