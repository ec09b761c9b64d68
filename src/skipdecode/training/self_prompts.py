"""Prompts that a chat model writes itself, so that its own texts need no file of prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..data.chat import Message, Prompt, around_message, texts_for_a_chat_model
from ..errors import DataError
from ..files import read_json, write
from ..generation.generate import max_positions
from ..generation.job import GenerationJob
from ..loading.load import identity_of, load_tokenizer, read_config
from ..provenance import fingerprint
from .self_generated import own_texts, read_prompts

#: A little surer than the model's own distribution: small models ask more sensibly so.
ASKED = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 0}
#: The longest message, in tokens; longer ones are left out.
LONGEST = 128


def prompts_for(
    job: GenerationJob,
    source: str | Path | None,
    count: int,
    file: Path | None = None,
    *,
    on_start: Callable[[int, int], object] = lambda total, done: None,
    on_batch: Callable[[Any], object] = lambda cost: None,
    say: Callable[[str], object] = lambda message: None,
) -> list[Prompt]:
    """Return the prompts of own texts: those of ``source``, else a chat model's own, else the begin-of-text token.

    A chat model is given its template up to where the first message of a user begins, and writes the message (Xu et
    al., 2024, "Magpie", section 2.1): what it was trained to answer.

    Args:
        job: the model; its other options are those of the texts.
        source: as :func:`read_prompts` takes it.
        count: of messages to write; those that are empty, loop, do not end, or were written before are left out.
        file: keeps the messages, as :func:`own_texts` does its texts.
        on_start, on_batch, say: as :meth:`GenerationJob.run` takes them.

    Raises:
        DataError: ``source`` holds no prompts, or the model writes no message that ends.
        SkipDecodeError: as :func:`own_texts` raises it, or the chat template takes no user's message.
    """
    tokenizer = load_tokenizer(job.model, job.revision)
    if source is not None or tokenizer.chat_template is None:
        prompts = read_prompts(source, job.task, say)
        if source is not None and (told := texts_for_a_chat_model(tokenizer, prompts)):
            say(told)
        return prompts
    before, after = around_message(tokenizer)
    bos = tokenizer.bos_token
    if bos and before.startswith(bos) and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
        before = before.removeprefix(bos)  # the tokenizer adds one
    if file is not None:
        before = _begun_with(file, before, fingerprint(identity_of(job.model, job.adapter, job.revision)))
    say("no prompts are given: the model writes its users' messages too")
    positions = max_positions(read_config(job.model, job.revision))
    longest = min(LONGEST, positions // 4) if positions else LONGEST  # the template and the answer need some too
    asking = replace(job, options=ASKED | {"max_new_tokens": longest, "stop_strings": [after]})
    asked = own_texts(asking, [before], count, file, ended=True, on_start=on_start, on_batch=on_batch, say=say)
    messages = [text.references[0].split(after)[0].strip() for text in asked]
    if not any(messages):
        raise DataError("the model writes no user's message that ends: give --prompts FILE")
    return [(Message("user", message),) for message in dict.fromkeys(messages) if message]


def _begun_with(file: Path, before: str, model: str) -> str:
    """Return what stood before the messages when this model began to write them: templates may write today's date."""
    kept = file.with_suffix(".begin.json")
    begun: Any = read_json(kept) if kept.exists() else {}
    if isinstance(begun, dict) and begun.get("model") == model:
        return str(begun["before"])
    write(kept, json.dumps({"model": model, "before": before}, indent=1) + "\n")
    return before
