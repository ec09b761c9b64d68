"""Conversations: their messages, and their text by a tokenizer's chat template."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ..errors import DataError, ModelError


class Message(NamedTuple):
    """One message of a conversation; ``role`` is ``system``, ``user``, ``assistant``, …

    ``more`` is JSON of further fields, such as ``tool_calls``; the first message also has the conversation's
    :data:`OPTIONS`.
    """

    role: str
    content: str
    more: str = "{}"

    def fields(self) -> dict[str, Any]:
        """All fields, as chat templates take them."""
        return {"role": self.role, "content": self.content} | json.loads(self.more)


Chat = tuple[Message, ...]
#: Input of the model: a text, or a conversation that it answers.
Prompt = str | Chat
#: What a conversation's row may hold beside its messages: arguments of ``apply_chat_template``.
OPTIONS = ("tools", "chat_template_kwargs")
#: Fields that templates leave out of earlier turns.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
#: A template's tags, the names and quoted texts in them, and the variables that are no options.
TAG = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
WORD = re.compile(r"""'(?:\\.|[^'])*'|"(?:\\.|[^"])*"|(?<![\w.])[A-Za-z_]\w*""", re.DOTALL)
GIVEN = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
#: Placeholder that shows where a template puts a message.
MARK = "x7MESSAGE7x"


def is_conversation(value: Any) -> bool:
    """Whether ``value`` is a list of messages, as chat templates take them."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(m, (Mapping, Message)) for m in value)


def parse_messages(value: Any, options: Mapping[str, Any] | None = None) -> Chat:
    """Conversation from a list of ``{"role": …, "content": …}``, the format of TRL and transformers.

    ``options`` are the row's :data:`OPTIONS`. Raises DataError for anything else, such as images.
    """
    if not is_conversation(value):
        raise DataError("a prompt is a text, or messages: a list of {'role': …, 'content': …}")
    chat = []
    for number, message in enumerate(value, 1):
        fields = message.fields() if isinstance(message, Message) else message
        content = fields.get("content") or "" if fields.get("tool_calls") else fields.get("content")
        if not isinstance(fields.get("role"), str) or not isinstance(content, str):
            raise DataError(f"message {number} has no role and content that are texts: other content is not supported")
        more = dict(fields) | {name: options[name] for name in OPTIONS if options and number == 1 and options.get(name)}
        more = {k: v for k, v in more.items() if k not in ("role", "content") and v not in (None, "", [], {})}
        if not isinstance(more.get("chat_template_kwargs", {}), Mapping):
            raise DataError("chat_template_kwargs is an object: values of the chat template's options, by name")
        chat.append(Message(fields["role"], content, json.dumps(more, ensure_ascii=False)))
    return tuple(chat)


def as_json(value: Any) -> Any:
    """Value for JSON, with messages as objects that :func:`parse_messages` reads again."""
    if isinstance(value, (list, tuple)):
        return [item.fields() if isinstance(item, Message) else item for item in value]
    return value


def render(tokenizer: PreTrainedTokenizerBase, chat: Chat, answer: str | None = None) -> str:
    """Text of a conversation by the tokenizer's chat template, with special tokens.

    It ends with ``answer`` and what closes it. Without ``answer`` it ends where the assistant's answer begins, or
    after a last message of the assistant, which the answer continues.

    Raises ModelError if there is no template, or it refuses the conversation or leaves out a message or field.
    """
    chat = parse_messages(chat)
    if len(chat) > 1 and chat[-1].role == "assistant" and not chat[-1].content:
        chat = chat[:-1]  # transformers would continue it behind its end
    messages = as_json(chat)
    options = {name: messages[0].pop(name) for name in OPTIONS if name in messages[0]}
    continues = chat[-1].role == "assistant"
    if continues:
        messages[-1]["content"] += answer or ""
    elif answer is not None:
        messages.append({"role": "assistant", "content": answer})
    ending = {"continue_final_message": continues, "add_generation_prompt": not continues} if answer is None else {}
    kwargs = options.pop("chat_template_kwargs", {})
    words = {word for tag in TAG.findall(str(tokenizer.chat_template)) for word in WORD.findall(tag)} - GIVEN
    if unknown := sorted(kwargs.keys() - words):
        raise ModelError(f"the chat template knows no {unknown[0]!r}, which chat_template_kwargs has")
    text = _apply(tokenizer, messages, **options, **kwargs, **ending)
    _check_fields(tokenizer, messages, text, options, kwargs, ending)
    contents = [message.content.rpartition("</think>")[2].strip() for message in chat]  # earlier thoughts are dropped
    marks = [f"{MARK}{number}x" if content else "" for number, content in enumerate(contents)]
    marked = [m | {"content": mark} if mark else m for m, mark in zip(messages, [*marks, ""], strict=False)]
    try:  # contents may stand elsewhere by chance, or be written as JSON: marks are not
        shown = _apply(tokenizer, marked, **options, **kwargs, **ending)
    except ModelError:  # the template minds what a message says
        shown, marks = text, contents
    place = 0
    for number, (message, mark) in enumerate(zip(chat, marks, strict=True), 1):
        start = shown.find(mark, 0 if message.role == "system" else place)  # templates may move a system message
        if start < 0:
            raise ModelError(f"the chat template leaves out message {number}, of role {message.role!r}")
        place = place if message.role == "system" else start + len(mark)
    return text


def _check_fields(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], text: str, tools: Any, kwargs: Any, ending: Any
) -> None:
    """Raise ModelError if a field or option could be left out without a change of the text."""
    if tools and _apply(tokenizer, messages, **kwargs, **ending) == text:
        raise ModelError("the chat template leaves out the tools")
    for number, message in enumerate(messages, 1):
        for name in message.keys() - {"role", "content"}:
            known = name in THOUGHTS and name in str(tokenizer.chat_template)
            others = [*messages[: number - 1], {k: v for k, v in message.items() if k != name}, *messages[number:]]
            if not known and _apply(tokenizer, others, **tools, **kwargs, **ending) == text:
                raise ModelError(f"the chat template leaves out {name!r} of message {number}")


def around_message(tokenizer: PreTrainedTokenizerBase, role: str = "user", chat: Chat = ()) -> tuple[str, str]:
    """What the chat template writes before the next message of a conversation, and what ends that message.

    Raises ModelError if the template takes no such message, or does not show where it ends.
    """
    text = _apply(tokenizer, [*as_json(chat), {"role": role, "content": MARK}])
    before, _, rest = text.partition(MARK)
    after = rest.strip()
    if not after:
        raise ModelError(f"the chat template does not show where a {role} message ends: give --prompts FILE")
    return before, after


def _apply(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    if tokenizer.chat_template is None:
        raise ModelError("the tokenizer has no chat template: set tokenizer.chat_template, or give prompts as texts")
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except Exception as error:  # templates are programs, and raise what they like
        raise ModelError(f"the chat template does not take these messages: {' '.join(str(error).split())}") from error
