"""Prompts that a model makes up itself, of as many kinds as it knows, so that distillation needs no data."""

import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from ..data.chat import Chat, Message, Prompt, around_message
from ..data.examples import read_examples, subsample
from ..data.tasks import Task
from ..errors import DataError, ModelError, UsageError
from ..generation.batches import max_positions
from ..loading.load import Checkpoint
from .self_generated import SAMPLING, Say, Write, keep_texts

#: Sampling of messages: all kinds that the model knows, without tokens that would make no sense.
MESSAGE_SAMPLING: dict[str, Any] = SAMPLING | {"temperature": 1.0, "min_p": 0.04}
#: Sampling of their first tokens, from each of which as many messages begin.
OPENING_SAMPLING: dict[str, Any] = SAMPLING | {"temperature": 1.5, "min_p": 0.001}
OPENING = 2
#: Characters that no two messages share at the beginning.
BEGINNING = 40
#: Longest message, and the passage of a document, in tokens. Longer messages are left out.
LONGEST_MESSAGE, PASSAGE = 128, 48
#: One in so many conversations has a system message, and one in so many of a turn goes on to the next.
SYSTEM, NEXT_TURN = 4, 4
#: Turns of the longest conversations.
TURNS = 3
#: Number of different prompts below which the user is told.
FEW = 200


def find_prompts(
    checkpoint: Checkpoint, source: str | Path | None, task: Task, count: int, write: Write, say: Say
) -> list[Prompt]:
    """Prompts of self-generated texts: those of ``source``, else a chat model's conversations or a model's passages."""
    if source is not None:
        examples = read_examples(source, task, "train", references=False)
        prompts = list(dict.fromkeys(example.prompt for example in examples))
        if len(prompts) < FEW:
            say(f"{source} has {len(prompts)} different prompts: some hundreds teach more")
        return prompts
    if checkpoint.tokenizer.chat_template is not None:
        say("no prompts are given: the model writes its users' messages too")
        return list(conversations(checkpoint, count, write, say))
    if checkpoint.tokenizer.bos_token_id is None:
        raise UsageError("the model has no begin-of-text token, from which it could write: give --prompts FILE")
    say("no prompts are given: the model continues passages that it writes itself")
    options = SAMPLING | {"temperature": 1.0, "max_new_tokens": PASSAGE}
    passages = keep_texts([""] * count, write([""] * count, options, "passages"), say)
    return [passage.references[0] for passage in passages if passage.cut] or [""]


def tokens_written(checkpoint: Checkpoint) -> int:
    """Tokens that :func:`find_prompts` lets the model write for each prompt, at most, on average."""
    if checkpoint.tokenizer.chat_template is None:
        return PASSAGE
    further = sum(NEXT_TURN**-number for number in range(1, TURNS))
    return round(LONGEST_MESSAGE * (1 + 1 / SYSTEM + 2 * further))


def conversations(checkpoint: Checkpoint, count: int, write: Write, say: Say) -> list[Chat]:
    """Conversations up to the model's answer, all of whose messages a chat model writes itself.

    Of ``count``, some begin with a system message, if the chat template takes one; some go on for two or three turns.
    Messages that are empty, loop, do not end, or begin like another are left out. Raises DataError if none is left,
    ModelError if the template does not show where a user's message ends.
    """
    around_message(checkpoint.tokenizer)
    begun: list[Chat] = [()] * (count - count // SYSTEM)
    turn = next_messages(checkpoint, begun, write, say, "1", systems=count // SYSTEM)
    found = [chat for chat in turn if chat[-1].role == "user"]
    for number in range(2, TURNS + 1):
        begun = [chat for chat in turn if chat[-1].role == "system"]
        asked = [chat for chat in turn if chat[-1].role == "user"]
        asked = subsample(asked, len(asked) // NEXT_TURN)
        answers = write(asked, SAMPLING | {"temperature": 0.5, "max_new_tokens": LONGEST_MESSAGE}, f"answers-{number}")
        for chat, answer in zip(asked, answers, strict=True):
            if answer and answer.finish_reason != "length" and answer.text.strip():
                begun.append((*chat, Message("assistant", answer.text.strip())))
        turn = next_messages(checkpoint, begun, write, say, str(number))
        found += turn
    if not found:
        raise DataError("the model writes no user message that ends: give --prompts FILE")
    say(f"{len(found):,} different conversations, {sum(len(chat) > 1 for chat in found):,} of more than one message")
    return found


def next_messages(
    checkpoint: Checkpoint, begun: Sequence[Chat], write: Write, say: Say, name: str, *, systems: int = 0
) -> list[Chat]:
    """Conversations with a user's message more, which the model writes (Xu et al., 2024, "Magpie", section 2.1).

    The model gets its chat template up to where the message begins. What it writes there is mostly of one kind: so the
    first two tokens are drawn by themselves, and each different beginning goes on as often. ``systems`` is the number
    of system messages that are written beside; what the template takes not is told and left out.
    """
    starts = []  # what the model gets, what ends its message, and where that belongs
    for chat, role, times in [(chat, "user", 1) for chat in begun] + [((), "system", systems)] * bool(systems):
        try:
            before, after = around_message(checkpoint.tokenizer, role, chat)
        except ModelError as error:
            say(f"without a {role} message behind {len(chat)} others: {error}")
            break
        starts += [(before, after, chat, role)] * times
    if not starts:
        return []
    options = OPENING_SAMPLING | {"max_new_tokens": OPENING}
    drawn = write([before for before, *_ in starts], options, f"openings-{name}")
    openings: dict[str, dict[str, None]] = {}
    for (before, *_), each in zip(starts, drawn, strict=True):
        if each and each.finish_reason == "length":
            openings.setdefault(before, {})[each.text] = None
    turns = {before: cycle(openings.get(before, {"": None})) for before, *_ in starts}
    rows = [before + next(turns[before]) for before, *_ in starts]
    where = dict(zip(rows, starts, strict=True))
    positions = max_positions(checkpoint.config) or sys.maxsize
    longest = min(LONGEST_MESSAGE, positions // 4)  # the template and the answer need some too
    ends = list(dict.fromkeys(after for _, after, *_ in starts))
    options = MESSAGE_SAMPLING | {"max_new_tokens": longest, "stop_strings": ends}
    distinct: dict[str, Chat] = {}
    for text in keep_texts(rows, write(rows, options, f"messages-{name}"), say, ended=True):
        before, after, chat, role = where[str(text.prompt)]
        content = f"{text.prompt}{text.references[0]}".removeprefix(before).split(after)[0].strip()
        if content:
            distinct.setdefault(content[:BEGINNING].casefold(), (*chat, Message(role, content)))
    return list(distinct.values())
