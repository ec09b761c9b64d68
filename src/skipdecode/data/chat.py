"""Conversations: parse messages from a row, and render them with a tokenizer's chat template."""

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
#: The model's input: a text, or a conversation that the model answers.
Prompt = str | Chat
#: A message that no template has in its own words.
MARK = "x7MESSAGE7x"


def parse_messages(value: Any) -> Chat:
    """Parse a list of ``{"role": …, "content": …}``, the format of TRL and transformers.

    Raises DataError for anything else, and for content that is not text (images, tool calls).
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError("messages are a list of {'role': …, 'content': …}, at least one")
    chat = []
    for number, message in enumerate(value, 1):
        if isinstance(message, Message):
            message = message._asdict()
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not role.strip():
            raise DataError(f"message {number} has no role: messages are {{'role': …, 'content': …}}")
        if not isinstance(message.get("content"), str) or message.get("tool_calls"):
            raise DataError(f"message {number}: its content is not a string; images and tool calls are not supported")
        chat.append(Message(role, message["content"]))
    return tuple(chat)


def as_json(value: Any) -> Any:
    """Return a column's value for JSON, with messages as objects that :func:`parse_messages` reads again."""
    if isinstance(value, (list, tuple)):
        return [each._asdict() if isinstance(each, Message) else each for each in value]
    return value


def render(tokenizer: PreTrainedTokenizerBase, chat: Chat, answer: str | None = None) -> str:
    """Return the conversation in the format of the tokenizer's chat template, with special tokens.

    The text ends after ``answer``; without it, where the assistant's answer begins, or after a last message of the
    assistant, which the answer continues.

    Raises ModelError if the tokenizer has no template, or the template refuses the conversation.
    """
    messages, begun = [message._asdict() for message in chat], chat[-1].role == "assistant"
    if begun:
        messages[-1]["content"] += answer or ""
    elif answer is not None:
        messages.append({"role": "assistant", "content": answer})
    open_end = answer is None
    kind = {"continue_final_message": begun and open_end, "add_generation_prompt": not begun and open_end}
    return _apply(tokenizer, messages, **kind)


def _apply(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], **kind: bool) -> str:
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise ModelError(
            "the tokenizer has no chat template, so it cannot write messages: take a model made for chats, "
            "set tokenizer.chat_template, or give the prompts as text"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **kind)
    except (TemplateError, ValueError, TypeError) as problem:
        why = " ".join(str(problem).split())
        raise ModelError(f"the tokenizer's chat template does not take these messages: {why}") from None


def around_message(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return what the chat template writes before the first message of a user, and what ends that message.

    Raises ModelError if the template takes no such message, or does not show where it ends.
    """
    before, _, rest = _apply(tokenizer, [{"role": "user", "content": MARK}]).partition(MARK)
    after = rest.strip()
    if not after:
        raise ModelError(
            "the tokenizer's chat template does not show where a user's message ends, so the model cannot be asked to "
            "write one: give --prompts FILE"
        )
    return before, after


def texts_for_a_chat_model(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> str | None:
    """Return what to tell a user whose prompts are texts, where the model was taught to answer messages; else None."""
    texts = sum(isinstance(prompt, str) for prompt in prompts)
    if not texts or tokenizer.chat_template is None:
        return None
    return (
        f"{texts:,} of {len(prompts):,} prompts are texts, and a chat model is given them as they are: it answers rows "
        "with `messages` (`generate --chat` makes messages of texts)"
    )
