"""``skipdecode chat``: a conversation in the terminal, at a speed that may change between turns."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..errors import SkipDecodeError, UsageError
from . import options as o
from .console import err, say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..generation.stream import PromptCache
    from ..schedule import Schedule

HELP = "/speed 2 changes the speed, /new starts a new conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer"


def chat(
    model: o.Model,
    adapter: o.Adapter = None,
    speedup: o.Speedup = None,
    system: Annotated[str | None, Option(help="System prompt.")] = None,
    max_new_tokens: Annotated[int, Option(min=1, help="Most tokens of an answer.")] = 512,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    repetition_penalty: o.RepetitionPenalty = None,
    dtype: o.Dtype = "auto",
) -> None:
    """Talk to a model. Each answer is followed by its tokens per second and layers per step.

    skipdecode chat fast --speedup 1.5
    """
    from ..generation.stream import PromptCache, sampling_defaults
    from ..loading.load import Checkpoint
    from ..schedule import choose_schedule

    checkpoint = Checkpoint.resolve(model, adapter)
    tokenizer = checkpoint.tokenizer
    if tokenizer.chat_template is None:
        raise UsageError(f"{model} has no chat template: use skipdecode generate")
    schedule = choose_schedule(checkpoint.schedules, checkpoint.num_layers, speedup)
    chosen = {"temperature": temperature, "top_p": top_p, "repetition_penalty": repetition_penalty}
    sampling = sampling_defaults(checkpoint.generation_config)
    sampling |= {name: value for name, value in chosen.items() if value is not None}
    prompts = PromptCache(checkpoint.load(dtype=dtype))
    beginning = [] if system is None else [{"role": "system", "content": system}]
    messages = list(beginning)
    say(f"{schedule.num_layers / schedule.max_depth:.3g}x; {HELP}")
    while (line := read_line()) is not None:
        command, _, value = line.partition(" ")
        try:
            if command == "/quit":
                break
            if command == "/new":
                messages = list(beginning)
            elif command == "/speed":
                schedule = choose_schedule(checkpoint.schedules, checkpoint.num_layers, _number(value))
                say(f"{value}x from here on")
            elif command == "/help":
                say(HELP)
            elif line:
                asked = [*messages, {"role": "user", "content": line}]
                answer = _answer(prompts, tokenizer, asked, schedule, max_new_tokens, sampling)
                messages = [*asked, {"role": "assistant", "content": answer}]
        except SkipDecodeError as error:
            say(f"skipdecode: {error}")


def _answer(
    prompts: PromptCache,
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Any],
    schedule: Schedule,
    max_new_tokens: int,
    sampling: dict[str, float],
) -> str:
    """Print the answer as it is generated, and return it. Ctrl-C stops it."""
    from ..data.tokenize import encode_prompts
    from ..generation.stream import TokenStream

    conversations: Any = [messages]
    (ids,) = encode_prompts(tokenizer, conversations)
    stream = TokenStream(prompts.model, ids, schedule, sampling, prefix=prompts.prefix(ids, schedule))
    text = whole = ""
    try:
        while not stream.done and len(stream.tokens) < max_new_tokens:
            stream.step()
            whole = tokenizer.decode(stream.tokens, skip_special_tokens=True)
            if not whole.endswith("\ufffd"):  # the rest of a character is still to come
                print(whole[len(text) :], end="", flush=True)
                text = whole
        print(whole[len(text) :], end="")
        text = whole
        depths = stream.cache.step_depths
        depth = sum(depths) / len(depths) if depths else schedule.num_layers
        rate = len(stream.tokens) / stream.seconds
        note = f"{len(stream.tokens)} tokens, {rate:.1f} tokens/s, {depth:.1f} of {schedule.num_layers} layers a step"
    except KeyboardInterrupt:
        note = "stopped"
    print()
    err.print(note, style="dim")
    return text


def read_line() -> str | None:
    """Return the user's next line, None at the end. Ctrl-C clears the line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"/speed takes a number, as in /speed 2, not {value!r}") from None
