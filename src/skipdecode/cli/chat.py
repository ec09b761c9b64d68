"""``skipdecode chat``: a conversation in the terminal, at a speed that may change between turns."""

import re
import sys
from typing import Annotated

from typer import Option

from ..errors import SkipDecodeError, UsageError
from . import options as o
from .console import err, say

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
    from ..generation.chat import Conversation, sampling_options
    from ..loading.load import Checkpoint

    checkpoint = Checkpoint.resolve(model, adapter)
    if checkpoint.tokenizer.chat_template is None:
        raise UsageError(f"{model} has no chat template: use skipdecode generate")
    schedule = checkpoint.schedule(speedup)
    chosen = {"temperature": temperature, "top_p": top_p, "repetition_penalty": repetition_penalty}
    sampling = sampling_options(checkpoint, chosen)
    conversation = Conversation(checkpoint.load(dtype=dtype), checkpoint.tokenizer, system)
    beginning = conversation.messages
    say(f"{schedule.num_layers / schedule.max_depth:.3g}x; {HELP}")
    line = ""
    while line != "/quit":
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
            command, _, value = line.partition(" ")
            if command == "/new":
                conversation.messages = beginning
            elif command == "/speed":
                if re.fullmatch(r"\d+(\.\d+)?", value) is None:
                    raise UsageError(f"/speed takes a number, as in /speed 2, not {value!r}")
                schedule = checkpoint.schedule(float(value))
                say(f"{value}x from here on")
            elif command == "/help":
                say(HELP)
            elif line and line != "/quit":
                note = "stopped"
                stats = conversation.answer(line, schedule, max_new_tokens=max_new_tokens, **sampling)
                if stats is not None:
                    depth = f"{stats.average_depth:.1f} of {stats.num_layers} layers a step"
                    note = f"{stats.tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, {depth}"
                err.print(note, style="dim")
        except (EOFError, KeyboardInterrupt):
            break
        except SkipDecodeError as error:
            say(f"skipdecode: {error}")
