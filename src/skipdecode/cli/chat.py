"""``skipdecode chat``: talk to a model, at any of its speeds."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ..errors import SkipDecodeError, UsageError
from . import options as o
from .console import err, say

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ..generation.kept_prompt import KeptPrompt
    from ..schedule import Schedule

HELP = "/speed 2 changes the speed-up, /new begins anew, /help says this, /quit or Ctrl-D ends; Ctrl-C stops an answer"


def chat(
    model: o.Model,
    adapter: o.Adapter = None,
    speedup: o.Speedup = None,
    system: Annotated[str | None, Option(help="What the model is told before the conversation.")] = None,
    max_new_tokens: Annotated[int, Option(min=1, max=o.MOST, help="The longest answer.")] = 512,
    do_sample: o.DoSample = False,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    repetition_penalty: o.RepetitionPenalty = None,
    seed: o.SamplingSeed = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    revision: o.Revision = None,
) -> None:
    """Talk to a model. Each answer is followed by its length, tokens per second and layers per step.

    skipdecode chat MODEL --adapter fast --speedup 1.5
    """
    import torch

    from ..data.chat import Message, render
    from ..data.rows import is_text
    from ..generation.kept_prompt import KeptPrompt
    from ..generation.options import check_options, check_with_model
    from ..loading.load import adapter_of, load, load_tokenizer, read_config, read_generation_config
    from ..model.adapter import trained_schedule
    from ..model.config import config_schedules

    options = {"do_sample": do_sample or None, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    options |= {"repetition_penalty": repetition_penalty, "num_beams": 1}  # whatever the checkpoint asks for
    check_options(options)
    if sys.stdin is None:
        raise UsageError("a conversation needs standard input, which is closed")
    if system is not None and not is_text(system):
        raise UsageError("--system is not UTF-8")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 is refused, not the conversation
    # Before the weights are loaded: a wrong speed-up, and a tokenizer without a chat template.
    folder = adapter_of(model, adapter)
    config = read_config(model, revision, adapter)
    schedule = trained_schedule(config, speedup, folder, max_new_tokens)
    check_with_model(options, read_generation_config(model, revision))
    told = [] if system is None else [Message("system", system)]
    render(load_tokenizer(model, revision), (*told, Message("user", "Hello")))
    loaded, tokenizer = load(model, dtype=dtype, device=device, revision=revision, adapter=adapter)
    _warn(config, schedule)
    torch.manual_seed(seed)
    messages, kept = list(told), KeptPrompt(loaded)
    name = speedup or max(config_schedules(config), default=schedule.target)
    say(f"{name:g}x; {HELP}")
    while (line := _read()) is not None:
        command, _, value = line.partition(" ")
        if not line:
            continue
        if command == "/speed":
            with _said():
                asked = _number(value)
                schedule, name = trained_schedule(config, asked, folder, max_new_tokens), asked
                say(f"{name:g}x from here on")
                _warn(config, schedule)
        elif command == "/new":
            messages = list(told)
        elif command == "/quit":
            break
        elif command.startswith("/"):
            say(HELP)
        else:
            with _said():
                if not is_text(line):
                    raise UsageError("that line is not UTF-8")
                all_said = [*messages, Message("user", line)]
                text, took = _answer(kept, tokenizer, all_said, schedule, max_new_tokens, options)
                messages = [*all_said, Message("assistant", text)]
                err.print(f"{name:g}x: {took}" if took else "stopped", style="dim")


def _warn(config: PreTrainedConfig, schedule: Schedule) -> None:
    """Say what skipping so many layers costs a model that was not trained for it."""
    from ..model.config import config_schedules, untrained_warning

    if warning := untrained_warning(schedule, config_schedules(config)):
        say(f"skipdecode: {warning}")


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"/speed takes a number, as in /speed 2, not {value!r}") from None


@contextmanager
def _said() -> Iterator[None]:
    """Print an error that the user can mend, and go on."""
    try:
        yield
    except SkipDecodeError as error:
        say(f"skipdecode: {error}")


def _read() -> str | None:
    """Return the user's next line; None at the end. Ctrl-C only clears the line."""
    with suppress(ImportError):
        import readline  # noqa: F401 (input then has a history and can be edited)
    while True:
        with _interrupts():
            try:
                return input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                print()


@contextmanager
def _interrupts() -> Iterator[None]:
    """Return a context in which Ctrl-C is a KeyboardInterrupt; elsewhere it ends the command."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, before)


def _answer(
    kept: KeptPrompt, tokenizer: Any, messages: list[Any], schedule: Schedule, most: int, options: dict[str, Any]
) -> tuple[str, str]:
    """Print the answer as it is written; return it, and what it took: nothing after Ctrl-C, with what there is of it.

    It is what a single call on the whole conversation would write, of which only the new part is computed.
    """
    from transformers import TextStreamer

    from ..data.tokenize import encode_prompts
    from ..generation.batch import generate_batch
    from ..generation.generate import max_positions

    class Streamer(TextStreamer):
        text = ""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.text += text
            print(text, end="\n" * stream_end, flush=True)

    (ids,) = encode_prompts(tokenizer, [tuple(messages)])
    model = kept.model
    limit, cost = max_positions(model.config) or sys.maxsize, None
    if len(ids) >= limit:
        raise UsageError(f"the conversation fills the model's {limit:,} positions: /new begins anew")
    streamer: Any = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    options = options | {"max_new_tokens": min(most, limit - len(ids)), "streamer": streamer}
    with _interrupts():
        try:
            _, cost = generate_batch(model, tokenizer, [ids], lambda _: kept.cache(ids, schedule), **options)
        except KeyboardInterrupt:
            streamer.end()
    if cost is None:
        return streamer.text.strip(), ""
    took = f"{cost.tokens} tokens, {cost.tokens / cost.seconds:.1f} tokens/s with the prompt, "
    return streamer.text.strip(), took + f"{cost.average_depth:.1f} of {schedule.num_layers} layers a step"
