"""Conversations: what a row may hold, and that a prompt and its answer are what the chat template writes of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import skipdecode
from helpers.tiny import TEXTS, WORDS, run, save_checkpoint, sentence_pieces
from skipdecode.data.chat import Chat, Message, Prompt, around_message, parse_messages, render
from skipdecode.data.collator import encoded
from skipdecode.data.inputs import read_items
from skipdecode.data.tasks import Example, get_task
from skipdecode.data.tokenize import encode_prompts, encode_response, train_tokenizer
from skipdecode.errors import DataError, ModelError

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
#: Forgets what was asked once it is answered.
FORGETFUL = "{% if add_generation_prompt %}{{ messages[0].content }} ->{% else %}{{ messages[-1].content }}{% endif %}"


def with_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer of a chat model."""
    tokenizer.chat_template = template
    return tokenizer


def chatml() -> PreTrainedTokenizerBase:
    """Byte-level BPE whose end-of-sequence is ChatML's, as instruction-tuned models have it."""
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

USER, ASSISTANT = {"role": "user", "content": "the cat sat"}, {"role": "assistant", "content": "on a mat"}
SYSTEM = {"role": "system", "content": "be brief"}
ASKED: Chat = (Message("user", "the cat sat"),)
words = st.lists(st.sampled_from([*WORDS, "x,", "I."]), min_size=1, max_size=5).map(" ".join)
turns = st.lists(words, min_size=1, max_size=5).filter(lambda texts: len(texts) % 2 == 1)


def conversation(texts: list[str]) -> Chat:
    """The user and the assistant in turn; the user begins."""
    return tuple(Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts))


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """What the ids say, special tokens included."""
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


# --- what prompts and answers are encoded to


@ALL
@settings(max_examples=40)
@given(texts=turns, answer=words)
@example(texts=["the cat sat"], answer="on a mat")
def test_prompt_and_answer_are_the_templates(tokenizer: PreTrainedTokenizerBase, texts: list[str], answer: str) -> None:
    """The prompt's ids are those of `apply_chat_template`; the answer's go on to the ids of the whole conversation."""
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
@given(message=words, answer=words)
def test_what_stands_around_a_users_message(tokenizer: PreTrainedTokenizerBase, message: str, answer: str) -> None:
    """A conversation begins with what is before, the message, and what ends it; an endless message is refused."""
    if tokenizer.chat_template == OPEN:
        with pytest.raises(ModelError, match="where a user's message ends"):
            around_message(tokenizer)
        return
    before, after = around_message(tokenizer)
    whole = render(tokenizer, (Message("user", message), Message("assistant", answer)))
    assert whole.startswith(before + message)
    assert whole.removeprefix(before + message).lstrip().startswith(after)
    assert after


@ALL
def test_begin_of_text_is_written_once(tokenizer: PreTrainedTokenizerBase) -> None:
    """By the template, where it does: the tokenizer, which puts one before every text, does not put another."""
    (ids,) = encode_prompts(tokenizer, [ASKED])
    assert ids.count(tokenizer.bos_token_id) == (tokenizer.chat_template == LLAMA)


def test_an_answer_ends_where_its_template_closes_it() -> None:
    """ChatML's line break behind the end-of-sequence is never decoded; what closes nothing is closed."""
    tokenizer = TOKENIZERS["chatml"]
    (ids,) = encode_response(tokenizer, [(ASKED, "on a mat")])
    assert text_of(tokenizer, ids) == "on a mat<|im_end|>"
    (ids,) = encode_response(TOKENIZERS["open bytes"], [(ASKED, "on a mat")])
    assert text_of(TOKENIZERS["open bytes"], ids) == " on a mat\n</s>"
    for name in ("chatml", "open bytes"):  # but not if it was cut off
        (ids,) = encode_response(TOKENIZERS[name], [(ASKED, "on a mat")], cut=[True])
        assert text_of(TOKENIZERS[name], ids).strip(" ") == "on a mat"


def test_an_end_of_sequence_within_the_answer_does_not_cut_it() -> None:
    """A user may write of them."""
    tokenizer = TOKENIZERS["open bytes"]
    (ids,) = encode_response(tokenizer, [(ASKED, "on </s> a mat")])
    assert text_of(tokenizer, ids) == " on </s> a mat\n</s>"


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
    """Whatever its template makes of thoughts: nothing is added to the text, dropped, or refused."""
    tokenizer = with_template(chatml(), template)
    (ids,) = encode_response(tokenizer, [(ASKED, answer)], as_written=True)
    assert ids[-1] == tokenizer.eos_token_id
    assert text_of(tokenizer, ids[:-1]).strip() == answer
    if template in (CHATML, OPEN):
        assert [ids] == encode_response(tokenizer, [(ASKED, answer)])


SHARING = {"bytes": with_template(train_tokenizer(TEXTS * 20, 320), SPACED)}
SHARING |= {kind: with_template(sentence_pieces(kind), SPACED) for kind in ("legacy", "first", "crossing")}


@pytest.mark.parametrize("tokenizer", [*TOKENIZERS.values(), *SHARING.values()], ids=[*TOKENIZERS, *SHARING])
@pytest.mark.parametrize("answer", ["on a mat", "\n\non a mat", " on a mat"])
def test_an_answer_that_shares_a_token_with_its_prompt_is_said_behind_it(
    tokenizer: PreTrainedTokenizerBase, answer: str
) -> None:
    """Decoding sees the prompt's ids, whatever the conversation would have been cut to; nothing is added or lost."""
    (prompt,), (ids,) = encode_prompts(tokenizer, [ASKED]), encode_response(tokenizer, [(ASKED, answer)])
    whole = tokenizer(render(tokenizer, ASKED, answer), add_special_tokens=False)["input_ids"]
    text = text_of(tokenizer, whole)
    assert text_of(tokenizer, prompt + ids) in (text, text.rstrip(), text + tokenizer.eos_token)
    assert "on a mat" in text_of(tokenizer, ids)


def test_texts_and_conversations_may_stand_side_by_side() -> None:
    """Each is encoded as it is alone."""
    tokenizer = TOKENIZERS["llama"]
    prompts: list[Prompt] = [ASKED, "the cat", conversation(["a", "b", "c"]), "the dog"]
    pairs = [(prompt, "sat on a mat") for prompt in prompts]
    assert encode_prompts(tokenizer, prompts) == [encode_prompts(tokenizer, [prompt])[0] for prompt in prompts]
    assert encode_response(tokenizer, pairs) == [encode_response(tokenizer, [pair])[0] for pair in pairs]
    assert encode_prompts(tokenizer, ["the cat"])[0][0] == tokenizer.bos_token_id


def test_system_messages_are_the_templates_business() -> None:
    """ChatML writes them; a template that takes none is named as the one that refuses."""
    chat = (Message("system", ""), Message("system", "be brief"), *ASKED)
    (ids,) = encode_prompts(TOKENIZERS["chatml"], [chat])
    assert "<|im_start|>system\nbe brief<|im_end|>" in text_of(TOKENIZERS["chatml"], ids)
    with pytest.raises(ModelError, match="chat template does not take these messages: no system role"):
        encode_prompts(TOKENIZERS["llama"], [chat])


def test_a_tokenizer_without_a_template_is_refused() -> None:
    """The message says what else can be done."""
    tokenizer = sentence_pieces()
    with pytest.raises(ModelError, match=r"no chat template.*set tokenizer\.chat_template"):
        encode_prompts(tokenizer, [ASKED])
    with pytest.raises(ModelError, match=r"no chat template.*set tokenizer\.chat_template"):
        encode_response(tokenizer, [(ASKED, "on a mat")])


def test_a_template_that_rewrites_the_prompt_is_refused() -> None:
    """The model would be trained on other ids than it decodes behind."""
    tokenizer = with_template(sentence_pieces(), FORGETFUL)
    encode_prompts(tokenizer, [ASKED])
    with pytest.raises(ModelError, match="otherwise once it is answered"):
        encode_response(tokenizer, [(ASKED, "on a mat")])


def test_conversations_become_training_rows() -> None:
    """Collation takes them as it takes texts."""
    tokenizer = TOKENIZERS["chatml"]
    (row,) = encoded([Example(ASKED, ("on a mat",))], tokenizer, 1000)
    assert [row["prompt_ids"]] == encode_prompts(tokenizer, [ASKED])
    assert [row["response_ids"]] == encode_response(tokenizer, [(ASKED, "on a mat")])


def test_a_job_writes_what_the_conversations_are_answered_with(tmp_path: Path) -> None:
    """From the command line as from the rendered text; the messages stand in the output as they were."""
    model = save_checkpoint(tmp_path / "model")
    with_template(AutoTokenizer.from_pretrained(model), OPEN).save_pretrained(model)
    rows: list[dict[str, Any]] = [
        {"messages": [USER]},
        {"messages": [SYSTEM, USER, ASSISTANT, USER], "id": 3},
        {"messages": [ASSISTANT]},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = ["--speedup", 2, "--max-new-tokens", 6, "--output", tmp_path / "out.jsonl"]
    assert run("generate", model, "--input", tmp_path / "in.jsonl", *options).returncode == 0
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["messages"] for row in written] == [row["messages"] for row in rows]
    assert written[1]["id"] == 3
    assert "no message for the assistant" in written[2]["error"]
    loaded = skipdecode.load(str(model), device="cpu")
    chats = [parse_messages(row["messages"]) for row in rows[:2]]
    texts = [render(loaded[1], chat) for chat in chats]
    for prompts in (chats, texts):
        answers = skipdecode.generate(*loaded, prompts, speedup=2, max_new_tokens=6).completions
        assert [answer.text for answer in answers] == [row["text"] for row in written[:2]]


@ALL
def test_words_of_the_assistant_are_continued(tokenizer: PreTrainedTokenizerBase) -> None:
    """C14: as transformers' pipelines do, a conversation that ends with them gets no new turn; nor does training."""
    begun = (*ASKED, Message("assistant", "on a"))
    (ids,) = encode_prompts(tokenizer, [begun])
    messages = [message._asdict() for message in begun]
    assert ids == tokenizer.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    assert text_of(tokenizer, ids).endswith("on a")
    (answer,) = encode_response(tokenizer, [(begun, " mat")])
    (whole,) = encode_response(tokenizer, [(ASKED, "on a mat")])
    spoken = text_of(tokenizer, encode_prompts(tokenizer, [ASKED])[0] + whole)
    assert text_of(tokenizer, ids + answer) == spoken


# --- what a row may hold


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"messages": [USER, ASSISTANT]}, ASKED),
        ({"messages": [SYSTEM, USER, ASSISTANT]}, (Message("system", "be brief"), *ASKED)),
        ({"prompt": [USER], "completion": [ASSISTANT]}, ASKED),
        ({"prompt": [USER], "response": "on a mat"}, ASKED),
        ({"prompt": [USER, ASSISTANT]}, ASKED),
        ({"prompt": "the cat sat", "messages": [USER, ASSISTANT]}, ASKED),
        ({"prompt": "the cat sat", "response": "on a mat", "messages": [USER, USER]}, "the cat sat"),
        ({"messages": [USER | {"name": None, "tool_calls": []}, ASSISTANT]}, ASKED),
    ],
)
def test_conversations_are_read_in_the_forms_of_trl(tmp_path: Path, row: dict[str, Any], prompt: Any) -> None:
    """The same prompt and response in training and in generating; the output repeats the column as it was."""
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    task = get_task("jsonl")
    assert task.read(tmp_path, "train") == [Example(prompt, ("on a mat",))]
    (item,) = read_items(str(tmp_path / "train.jsonl"), task)
    assert (item.error, item.prompt, item.references) == (None, prompt, ["on a mat"])
    assert item.columns == row


def test_the_users_word_may_be_the_last(tmp_path: Path) -> None:
    """There is something to answer, and nothing to compare with or to learn."""
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": [USER]}) + "\n", encoding="utf-8")
    (item,) = read_items(str(tmp_path / "train.jsonl"), get_task("jsonl"))
    assert (item.error, item.prompt, item.references) == (None, ASKED, [])
    with pytest.raises(DataError, match=r"train\.jsonl, line 1: the last message is not the assistant's"):
        get_task("jsonl").read(tmp_path, "train")


def test_references_of_one_conversation_are_gathered(tmp_path: Path) -> None:
    """Conversations can be told apart and found again."""
    rows = [{"prompt": [USER], "completion": [ASSISTANT | {"content": text}]} for text in ("one", "two")]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert get_task("jsonl").read(tmp_path, "test") == [Example(ASKED, ("one", "two"))]


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"messages": "hello"}, "messages are a list"),
        ({"messages": []}, "no messages"),
        ({"messages": ["hello"]}, "message 1 has no role"),
        ({"messages": [{"content": "x"}]}, "message 1 has no role"),
        ({"messages": [USER, {"role": "", "content": "x"}]}, "message 2 has no role"),
        ({"messages": [{"from": "human", "value": "x"}]}, "message 1 has no role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 1: its content is not a string"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1: its content is not a string"),
        ({"messages": [USER, ASSISTANT | {"tool_calls": [{"id": 1}]}]}, "message 2: .*tool calls"),
        ({"messages": [ASSISTANT]}, "no message for the assistant to answer"),
        ({"messages": [USER | {"content": " "}]}, "no message for the assistant to answer"),
        ({"messages": [USER, ASSISTANT], "response": "x"}, "responses have a column of their own"),
        ({"prompt": [USER], "completion": [USER]}, "a response is one message, the assistant's"),
        ({"prompt": [USER], "completion": [ASSISTANT, ASSISTANT]}, "a response is one message"),
        ({"prompt": "the cat sat", "completion": [ASSISTANT]}, "the prompt is text"),
    ],
)
def test_what_is_no_conversation_is_named(tmp_path: Path, row: dict[str, Any], match: str) -> None:
    """In training with its line, in a job as a bad row that the output repeats."""
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"train\.jsonl, line 1: .*{match}"):
        get_task("jsonl").read(tmp_path, "train")
    (item,) = read_items(str(tmp_path / "train.jsonl"), get_task("jsonl"))
    assert item.error is not None
    assert not item.prompt
    assert item.columns == row


def test_messages_may_be_given_from_python() -> None:
    """As transformers' lists of dictionaries, or as ours."""
    assert parse_messages([USER]) == parse_messages(ASKED) == ASKED
    assert hash(parse_messages([USER])) == hash(ASKED)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(value=json_values)
def test_anything_is_a_conversation_or_refused(value: Any) -> None:
    """Whatever JSON holds: DataError, or messages of strings."""
    try:
        chat = parse_messages(value)
    except DataError:
        return
    assert chat
    assert all(isinstance(part, str) for message in chat for part in message)


@pytest.mark.parametrize("chat", [True, False])
def test_texts_for_a_chat_model_are_remarked_on(tmp_path: Path, chat: bool) -> None:
    """It was taught to answer messages; a base model's prompts are texts, and nothing is said."""
    model = save_checkpoint(tmp_path / "model", layers=4)
    with_template(AutoTokenizer.from_pretrained(model), OPEN if chat else None).save_pretrained(model)
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "the cat"}) + "\n", encoding="utf-8")
    told = "1 of 1 prompts are texts"
    for verb in (["generate", model, "--input"], ["evaluate", model, "--speedups", 2, "--output", tmp_path, "--data"]):
        done = run(*verb, tmp_path / "in.jsonl", "--max-new-tokens", 4)
        assert done.returncode == 0, done.stderr
        assert (told in done.stderr) is chat
    done = run("generate", model, "--input", tmp_path / "in.jsonl", "--max-new-tokens", 4, *["--chat"] * chat)
    assert told not in done.stderr
