"""Conversations: what a row may hold, and that a prompt and its answer are what the chat template makes of both."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from helpers.tiny import TEXTS, WORDS, sentence_pieces, train_tokenizer
from skipdecode.data.chat import Chat, Message, around_message, as_json, parse_messages, render
from skipdecode.data.tasks import get_task
from skipdecode.data.tokenize import encode_prompts, encode_response
from skipdecode.errors import ModelError

#: ChatML closes every message with a token of its own; a line break follows it.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Llama 2's writes both special tokens itself, and takes no other roles.
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }} {{ eos_token }}"
    "{% else %}{{ raise_exception('no system role') }}{% endif %}{% endfor %}"
)
#: Closes nothing.
OPEN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
#: The space that its prompts end in belongs to the token of the answer's first word.
SPACED = OPEN.replace("assistant:", "assistant: ")
#: Forgets the question once it is answered.
FORGETFUL = "{% if add_generation_prompt %}{{ messages[0].content }} ->{% else %}{{ messages[-1].content }}{% endif %}"


def with_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> PreTrainedTokenizerBase:
    tokenizer.chat_template = template
    return tokenizer


def chatml() -> PreTrainedTokenizerBase:
    """Byte-level BPE whose end of sequence is ChatML's, as instruction-tuned models have it."""
    tokenizer = train_tokenizer(TEXTS * 20, 320)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
    return with_template(tokenizer, CHATML)


TOKENIZERS: dict[str, PreTrainedTokenizerBase] = {
    "chatml": chatml(),
    "llama": with_template(sentence_pieces(), LLAMA),
    "llama closing": with_template(sentence_pieces(eos=True), LLAMA),
    "open": with_template(sentence_pieces("first"), OPEN),
    "open bytes": with_template(train_tokenizer(TEXTS * 20, 320), OPEN),
}
ALL = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)

ASKED: Chat = (Message("user", "the cat sat"),)
words = st.lists(st.sampled_from([*WORDS, "x,", "I."]), min_size=1, max_size=5).map(" ".join)
turns = st.lists(words, min_size=1, max_size=5).filter(lambda texts: len(texts) % 2 == 1)


def conversation(texts: list[str]) -> Chat:
    """The user and the assistant in turn; the user begins."""
    return tuple(Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts))


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Text of ids, special tokens included."""
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


#: Knows tools, calls of them, names, thoughts of the last turn, and one option.
KNOWING = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}"
    "{% for m in messages %}{{ m.role }}{{ ' ' + m.name if m.name }}: {{ m.content }}"
    "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant{{ ' (brief)' if brief }}:{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "x", "parameters": {}}}]
CALLS: dict[str, Any] = {
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"at": "x"}}}]
}


def rendered(template: str, messages: list[Any], **options: Any) -> str:
    chat = get_task().example({"messages": messages, **options}).prompt
    again = parse_messages(as_json(chat))  # as job files hold it
    assert again == chat
    tokenizer = with_template(train_tokenizer(TEXTS * 20, 320), template)
    texts = {render(tokenizer, each) for each in (chat, again) if not isinstance(each, str)}
    assert len(texts) == 1
    return texts.pop()


def test_what_a_template_knows_reaches_the_model() -> None:
    """Tools, calls without a content, the tools' answers, names, thoughts, the template's options."""
    asked = {"role": "user", "content": "the cat", "name": "Ann"}
    called = {"role": "assistant", "content": None, "reasoning_content": "hm", **CALLS}
    answer = {"role": "tool", "content": "rain", "name": "weather"}
    options = {"tools": TOOLS, "chat_template_kwargs": {"brief": True}}
    text = rendered(KNOWING, [asked, called, answer], **options)
    call = '<call>weather{"at": "x"}</call>'
    assert text == f"<tool>weather</tool>user Ann: the cat\nassistant: {call}\ntool weather: rain\nassistant (brief):"


@pytest.mark.parametrize(
    ("messages", "options", "match"),
    [
        ([{"role": "user", "content": "x", "name": "Ann"}], {}, "leaves out 'name' of message 1"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", **CALLS}],
            {},
            "'tool_calls' of mess",
        ),
        ([{"role": "user", "content": "x", "reasoning_content": "hm"}], {}, "leaves out 'reasoning_content'"),
        ([{"role": "user", "content": "x"}], {"tools": TOOLS}, "leaves out the tools"),
        ([{"role": "user", "content": "x"}], {"chat_template_kwargs": {"brief": True}}, "knows no 'brief'"),
        ([{"role": "user", "content": "x"}], {"chat_template_kwargs": {"role": "a"}}, "knows no 'role'"),
        ([{"role": "user", "content": "x"}], {"chat_template_kwargs": {"start": 1}}, "knows no 'start'"),
        ([{"role": "user", "content": "x"}], {"chat_template_kwargs": {"messages": []}}, "knows no 'messages'"),
        ([{"role": "user", "content": "x"}], {"chat_template_kwargs": {"tokenizer": 1}}, "knows no 'tokenizer'"),
        (
            [{"role": "user", "content": "x"}],
            {"chat_template_kwargs": {"add_generation_prompt": False}},
            "knows no 'add_gen",
        ),
        ([{"role": "user", "content": "x", "weight": 0}], {}, "leaves out 'weight' of message 1"),
    ],
)
def test_what_a_template_leaves_out_is_told(messages: list[Any], options: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        rendered(CHATML, messages, **options)


# --- what prompts and answers are encoded to


@ALL
@settings(max_examples=20)
@given(texts=turns, answer=words)
@example(texts=["the cat sat"], answer="on a mat")
def test_prompt_and_answer_are_the_templates(tokenizer: PreTrainedTokenizerBase, texts: list[str], answer: str) -> None:
    """The prompt's ids are those of `apply_chat_template`; the answer's continue to those of the whole conversation."""
    chat = conversation(texts)
    messages = [message._asdict() for message in chat]
    own = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    (prompt,) = encode_prompts(tokenizer, [chat])
    assert prompt == own
    whole = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": answer}], return_dict=False)
    (ids,) = encode_response(tokenizer, [(chat, answer)])
    assert ids[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.eos_token_id) == 1
    shared = whole[: len(prompt) + len(ids)]
    assert prompt + ids in (shared, [*whole, tokenizer.eos_token_id])
    assert not text_of(tokenizer, whole[len(shared) :]).strip()


@ALL
@settings(max_examples=10)
@given(message=words, answer=words)
def test_what_stands_around_a_users_message(tokenizer: PreTrainedTokenizerBase, message: str, answer: str) -> None:
    """A conversation begins with what is before, the message, and what ends it; an endless message is refused."""
    if tokenizer.chat_template == OPEN:
        with pytest.raises(ModelError, match="where a user message ends"):
            around_message(tokenizer)
        return
    before, after = around_message(tokenizer)
    whole = render(tokenizer, (Message("user", message), Message("assistant", answer)))
    assert whole.startswith(before + message)
    assert after
    assert whole.removeprefix(before + message).lstrip().startswith(after)


def test_an_answer_ends_where_its_template_closes_it() -> None:
    """ChatML's line break behind the end of sequence is never decoded; what closes nothing is closed."""
    for name, text in (("chatml", "on a mat<|im_end|>"), ("open bytes", " on a mat\n</s>")):
        (ids,) = encode_response(TOKENIZERS[name], [(ASKED, "on a mat")])
        assert text_of(TOKENIZERS[name], ids) == text
        (ids,) = encode_response(TOKENIZERS[name], [(ASKED, "on a mat")], cut=[True])
        assert text_of(TOKENIZERS[name], ids).strip(" ") == "on a mat"
    for end in ("<|im_end|>", "<|im_end|>\n"):  # one is enough
        (ids,) = encode_response(TOKENIZERS["chatml"], [(ASKED, f"on a mat{end}")])
        assert text_of(TOKENIZERS["chatml"], ids) == "on a mat<|im_end|>"
    (ids,) = encode_response(TOKENIZERS["open bytes"], [(ASKED, "on </s> a mat")])  # a user may write of them
    assert text_of(TOKENIZERS["open bytes"], ids) == " on </s> a mat\n</s>"


#: Models that think: Qwen 3's template puts empty thoughts before an answer that has none, R1's drops them, and its
#: prompt begins them.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{{ m.content.split('</think>')[-1].lstrip() }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
R1 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip() }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize("template", [QWEN3, R1, CHATML, OPEN], ids=["qwen3", "r1", "chatml", "open"])
@pytest.mark.parametrize("answer", ["<think>\nthe mat", "<think>\nthe mat\n</think>\n\non a mat", "on a mat"])
def test_what_a_model_wrote_stays_as_it_is(template: str, answer: str) -> None:
    """Whatever its template makes of thoughts; in a later turn they may be gone."""
    tokenizer = with_template(chatml(), template)
    (ids,) = encode_response(tokenizer, [(ASKED, answer)], as_written=True)
    assert ids[-1] == tokenizer.eos_token_id
    assert text_of(tokenizer, ids[:-1]).strip() == answer
    if template in (CHATML, OPEN):
        assert [ids] == encode_response(tokenizer, [(ASKED, answer)])
    if answer.endswith("on a mat"):
        assert "on a mat" in render(tokenizer, (*ASKED, Message("assistant", answer), *ASKED))


SHARING = {"bytes": with_template(train_tokenizer(TEXTS * 20, 320), SPACED)}
SHARING |= {kind: with_template(sentence_pieces(kind), SPACED) for kind in ("legacy", "first", "crossing")}


@pytest.mark.parametrize("tokenizer", [*TOKENIZERS.values(), *SHARING.values()], ids=[*TOKENIZERS, *SHARING])
@pytest.mark.parametrize("answer", ["on a mat", "\n\non a mat", " on a mat"])
def test_an_answer_that_shares_a_token_with_its_prompt_is_encoded_behind_it(
    tokenizer: PreTrainedTokenizerBase, answer: str
) -> None:
    """Decoding sees the prompt's ids, however the whole text would be split; nothing is added or lost."""
    (prompt,), (ids,) = encode_prompts(tokenizer, [ASKED]), encode_response(tokenizer, [(ASKED, answer)])
    whole = tokenizer(render(tokenizer, ASKED, answer), add_special_tokens=False)["input_ids"]
    text = text_of(tokenizer, whole)
    assert text_of(tokenizer, prompt + ids) in (text, text.rstrip(), text + tokenizer.eos_token)
    assert "on a mat" in text_of(tokenizer, ids)


def test_texts_and_conversations_may_stand_side_by_side() -> None:
    """Each is encoded as it is alone; lists of dictionaries are conversations too."""
    tokenizer = TOKENIZERS["llama"]
    prompts: list[Any] = [ASKED, "the cat", conversation(["a", "b", "c"]), "the dog", as_json(ASKED)]
    pairs = [(prompt, "sat on a mat") for prompt in prompts]
    assert encode_prompts(tokenizer, prompts) == [encode_prompts(tokenizer, [prompt])[0] for prompt in prompts]
    assert encode_response(tokenizer, pairs) == [encode_response(tokenizer, [pair])[0] for pair in pairs]
    assert encode_prompts(tokenizer, prompts[-1:]) == encode_prompts(tokenizer, prompts[:1])


@ALL
def test_words_of_the_assistant_are_continued(tokenizer: PreTrainedTokenizerBase) -> None:
    """As by transformers' pipelines: a conversation that ends with them gets no new turn."""
    begun = (*ASKED, Message("assistant", "on a"))
    (ids,) = encode_prompts(tokenizer, [begun])
    assert ids == tokenizer.apply_chat_template(as_json(begun), continue_final_message=True, return_dict=False)
    assert text_of(tokenizer, ids).endswith("on a")
    (answer,) = encode_response(tokenizer, [(begun, " mat")])
    (whole,) = encode_response(tokenizer, [(ASKED, "on a mat")])
    spoken = text_of(tokenizer, encode_prompts(tokenizer, [ASKED])[0] + whole)
    assert text_of(tokenizer, ids + answer) == spoken


# --- what templates do not take

USERS = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}\n{% endif %}{% endfor %}"
SYSTEM_LAST = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.content | trim }}\n{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("chat", "match"),
    [
        ((Message("system", "be brief"), *ASKED), "leaves out message 1, of role 'system'"),
        ((Message("human", "hello"), *ASKED), "leaves out message 1, of role 'human'"),
        ((*ASKED, Message("assistant", "on a mat"), *ASKED), "leaves out message 2, of role 'assistant'"),
        ((Message("system", "the cat"), *ASKED), "leaves out message 1, of role 'system'"),  # the user says so too
        ((Message("human", "t"), *ASKED), "leaves out message 1, of role 'human'"),
    ],
)
def test_a_message_that_the_template_drops_is_named(chat: Chat, match: str) -> None:
    """The text would be as without it."""
    tokenizer = with_template(sentence_pieces(), USERS)
    with pytest.raises(ModelError, match=match):
        render(tokenizer, chat)


def test_of_several_conversations_the_one_that_fails_is_named() -> None:
    tokenizer = with_template(sentence_pieces(), USERS)
    with pytest.raises(ModelError, match=r"^prompt 3: .*leaves out message 1"):
        encode_prompts(tokenizer, ["the cat", ASKED, (Message("human", "t"), *ASKED), "a mat"])


def test_a_template_may_move_the_system_message_and_trim() -> None:
    tokenizer = with_template(sentence_pieces(), SYSTEM_LAST)
    chat = (Message("system", "be brief"), Message("user", "  the cat \n"), Message("user", "the"))
    assert render(tokenizer, chat) == "the cat\nthe\nbe brief"
    with pytest.raises(ModelError, match="leaves out message 3"):  # "the" stands in message 2 alone
        render(
            with_template(sentence_pieces(), SYSTEM_LAST.replace("!= 'system'", "== 'user' and loop.index < 3")), chat
        )


def test_a_template_may_write_a_message_as_json() -> None:
    """Or mind what it says: then its text is looked for."""
    chat = (Message("user", 'the "cat"\nsat'),)
    quoting = with_template(sentence_pieces(), "{{ messages[0].content | tojson }}")
    assert json.loads(render(quoting, chat)) == chat[0].content
    minding = "{% if 'cat' not in messages[0].content %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    assert render(with_template(sentence_pieces(), minding), chat) == chat[0].content


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ 1 / 0 }}"])
def test_what_a_template_raises_is_the_models_error(template: str) -> None:
    with pytest.raises(ModelError, match="chat template does not take these messages"):
        encode_prompts(with_template(sentence_pieces(), template), [ASKED])


def test_a_tokenizer_without_a_template_is_refused() -> None:
    for encode in (lambda t: encode_prompts(t, [ASKED]), lambda t: encode_response(t, [(ASKED, "on a mat")])):
        with pytest.raises(ModelError, match=r"no chat template: set tokenizer\.chat_template"):
            encode(sentence_pieces())


def test_a_template_that_rewrites_the_prompt_is_refused() -> None:
    """The model would be trained behind other ids than it decodes behind."""
    tokenizer = with_template(sentence_pieces(), FORGETFUL)
    encode_prompts(tokenizer, [ASKED])
    with pytest.raises(ModelError, match=r"changes a prompt once it is answered|leaves out"):
        encode_response(tokenizer, [(ASKED, "on a mat")])


# --- messages


def test_messages_may_be_dictionaries_or_ours() -> None:
    """They can be compared, and come back as JSON."""
    messages = [{"role": "user", "content": "the cat sat", "name": None}]
    assert parse_messages(messages) == parse_messages(ASKED) == ASKED
    assert hash(parse_messages(messages)) == hash(ASKED)
    assert as_json(ASKED) == [{"role": "user", "content": "the cat sat"}]
    assert as_json("a text") == "a text"
