"""Conversations: their messages, and their text by a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ..errors import DataError, ModelError


class Message(NamedTuple):
    """One message of a conversation; ``role`` is ``system``, ``user``, ``assistant``, …"""

    role: str
    content: str


Chat = tuple[Message, ...]
#: Input of the model: a text, or a conversation that it answers.
Prompt = str | Chat
#: Placeholder that shows where a template puts a message.
MARK = "x7MESSAGE7x"


def is_conversation(value: Any) -> bool:
    """Whether ``value`` is a list of messages, as chat templates take them."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(m, (Mapping, Message)) for m in value)


def parse_messages(value: Any) -> Chat:
    """Conversation from a list of ``{"role": …, "content": …}``, the format of TRL and transformers.

    Raises DataError for anything else, and for fields that would not reach the model: images, tool calls, names.
    """
    if not is_conversation(value):
        raise DataError("a prompt is a text, or messages: a list of {'role': …, 'content': …}")
    chat = []
    for number, message in enumerate(value, 1):
        fields = message._asdict() if isinstance(message, Message) else message
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise DataError(f"message {number} has no role and content that are texts: other content is not supported")
        if more := [name for name, value in fields.items() if value and name not in Message._fields]:
            raise DataError(f"message {number}: {', '.join(more)} would not reach the model; give role and content")
        chat.append(Message(fields["role"], fields["content"]))
    return tuple(chat)


def as_json(value: Any) -> Any:
    """Value for JSON, with messages as objects that :func:`parse_messages` reads again."""
    if isinstance(value, (list, tuple)):
        return [item._asdict() if isinstance(item, Message) else item for item in value]
    return value


def render(tokenizer: PreTrainedTokenizerBase, chat: Chat, answer: str | None = None) -> str:
    """Text of a conversation by the tokenizer's chat template, with special tokens.

    It ends with ``answer`` and what closes it. Without ``answer`` it ends where the assistant's answer begins, or
    after a last message of the assistant, which the answer continues.

    Raises ModelError if there is no template, or the template refuses the conversation or leaves out a message.
    """
    chat = parse_messages(chat)
    if len(chat) > 1 and chat[-1].role == "assistant" and not chat[-1].content:
        chat = chat[:-1]  # transformers would continue it behind its end
    messages = as_json(chat)
    continues = chat[-1].role == "assistant"
    if continues:
        messages[-1]["content"] += answer or ""
    elif answer is not None:
        messages.append({"role": "assistant", "content": answer})
    ending = {"continue_final_message": continues, "add_generation_prompt": not continues} if answer is None else {}
    text = _apply(tokenizer, messages, **ending)
    place = 0
    for number, message in enumerate(chat, 1):  # in order, but templates may move a system message
        content = message.content.rpartition("</think>")[2].strip()  # templates drop earlier thoughts
        start = text.find(content, 0 if message.role == "system" else place)
        if start < 0:
            raise ModelError(f"the chat template leaves out message {number}, of role {message.role!r}")
        if message.role != "system":
            place = start + len(content)
    return text


def around_message(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the chat template writes before a user's first message, and what ends that message.

    Raises ModelError if the template takes no such message, or does not show where it ends.
    """
    before, _, rest = _apply(tokenizer, [{"role": "user", "content": MARK}]).partition(MARK)
    after = rest.strip()
    if not after:
        raise ModelError("the chat template does not show where a user's message ends: give --prompts FILE")
    return before, after


def _apply(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], **options: bool) -> str:
    if tokenizer.chat_template is None:
        raise ModelError("the tokenizer has no chat template: set tokenizer.chat_template, or give prompts as texts")
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except Exception as error:  # templates are programs, and raise what they like
        reason = " ".join(str(error).split())
        raise ModelError(f"the tokenizer's chat template does not take these messages: {reason}") from error
