"""The page of ``skipdecode play``; also a Space's ``app.py``, with MODEL, ADAPTER and SPEEDUPS as its variables."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gradio as gr

from skipdecode.data.chat import Message, Prompt
from skipdecode.data.tokenize import encode_prompts
from skipdecode.errors import SkipDecodeError, UsageError
from skipdecode.generation.generate import max_positions
from skipdecode.generation.options import check_with_model
from skipdecode.loading.load import adapter_of, load, read_config, read_generation_config
from skipdecode.model.adapter import trained_schedule
from skipdecode.model.config import bind, config_schedules, trained_schedules, untrained_warning
from skipdecode.schedule import Schedule
from skipdecode.web.drawing import figures, marked, picture
from skipdecode.web.writing import Written, write_side_by_side

#: Most characters of a prompt, tokens of a text, texts side by side, and people whose texts are written at once.
CHARACTERS, TOKENS, SIDE_BY_SIDE, PEOPLE = 8000, 512, 3, 8
#: Longest text, in tokens, unless another is chosen.
LONGEST = 96
#: Speed-ups that are shown of a model that was trained for none.
UNTRAINED = (1.0, 1.5, 2.0)
INTRODUCTION = """# SkipDecode
{name}: one prompt at several speeds. The texts are written in turn, so each one's tokens per second, the prompt's time
among them, are what it would take alone."""
LEGEND = """Marked: words that {first:g}x did not write. The pictures: layers, the lowest below, against positions; grey
is the prompt, blue what each further token ran."""
STYLE = """
.speed h3 {margin: 0}
.text {white-space: pre-wrap; overflow-wrap: anywhere; min-height: 6em; line-height: 1.5}
.text mark {background: #ffd54d; color: #222; border-radius: 2px}
.figures {display: flex; flex-wrap: wrap; gap: .2em 1.2em; font-variant-numeric: tabular-nums; font-size: .9em}
.layers svg {width: 100%; height: 110px; display: block}
.layers .room {fill: currentColor; opacity: .08}
.layers .prompt {fill: currentColor; opacity: .35}
.layers .step {fill: #2a7de1}
"""


def schedules_for(
    config: Any, adapter: Path | None = None, speedups: tuple[float, ...] | None = None
) -> dict[float, Schedule]:
    """Return the schedules to show, by speed-up; without ``speedups`` 1x and two of those that were trained.

    Raises:
        UsageError: there are more than three speed-ups.
        ScheduleError: the model or the adapter has no schedule for one of them.
    """
    trained = config_schedules(config)
    if speedups is None:
        faster = sorted(speedup for speedup in trained if speedup > 1)
        speedups = (1.0, *{faster[(len(faster) - 1) // 2], faster[-1]}) if faster else UNTRAINED
    if len(speedups) > SIDE_BY_SIDE:
        raise UsageError(f"{SIDE_BY_SIDE} speed-ups fit side by side, not {len(speedups)}")
    chosen = {speedup: trained_schedule(config, speedup, adapter, LONGEST) for speedup in sorted(speedups)}
    return {speedup: bind(schedule, config) for speedup, schedule in chosen.items()}


def page(model: Any, tokenizer: Any, schedules: Mapping[float, Schedule], name: str = "the model") -> gr.Blocks:
    """Return the page: a prompt above, a text at each speed-up below, written at the same time.

    Args:
        model: as :func:`skipdecode.load` returns it, its adapter attached.
        tokenizer: its tokenizer; with a chat template, prompts may be messages.
        schedules: by speed-up; texts are compared with the first.
        name: of the model, for people.
    """
    machine, chats = threading.Lock(), tokenizer.chat_template is not None
    limit = max_positions(model.config)
    warnings = [said for each in schedules.values() if (said := untrained_warning(each, trained_schedules(model)))]

    def write(text: str, as_message: bool, most: float) -> Iterator[list[str]]:
        prompt: Prompt = (Message("user", text),) if as_message else text
        try:
            if len(text) > CHARACTERS:
                raise UsageError(f"a prompt has at most {CHARACTERS:,} characters here")
            (ids,) = encode_prompts(tokenizer, [prompt])
            if not text.strip() or not ids:
                raise UsageError("write a prompt first")
            if limit and len(ids) + most > limit:
                raise UsageError(
                    f"the prompt has {len(ids):,} tokens: with {most:g} more it is over the model's {limit:,}"
                )
            options = {"max_new_tokens": int(most), "do_sample": False, "num_beams": 1}
            for texts in write_side_by_side(model, tokenizer, ids, [*schedules.values()], machine, **options):
                yield shown(texts, len(ids), int(most))
        except SkipDecodeError as error:
            raise gr.Error(str(error), print_exception=False) from None

    def shown(texts: list[Written], prompt: int, most: int) -> list[str]:
        html = []
        for written, schedule in zip(texts, schedules.values(), strict=True):
            state = "done" if written.done else "writing"
            html += [
                f'<div class="text" data-state="{state}">{marked(written.text, texts[0].text)}</div>',
                f'<div class="figures">{figures(written, schedule)}</div>',
                f'<div class="layers">{picture(schedule, prompt, written.depths, most - 1)}</div>',
            ]
        return html

    with gr.Blocks(analytics_enabled=False, title="SkipDecode") as blocks:
        gr.Markdown(INTRODUCTION.format(name=name))
        for said in warnings[:1]:
            gr.Markdown(said)
        prompt = gr.Textbox(label="Prompt", lines=3, max_length=CHARACTERS, autofocus=True)
        with gr.Row():
            as_message = gr.Checkbox(chats, label="As a chat message", visible=chats)
            most = gr.Slider(8, TOKENS, value=LONGEST, step=8, label="Longest text, in tokens")
        with gr.Row():
            start = gr.Button("Write", variant="primary")
            stop = gr.Button("Stop")
        outputs: list[Any] = []
        with gr.Row():
            for speedup in schedules:
                with gr.Column(min_width=280, elem_classes="speed"):
                    gr.Markdown(f"### {speedup:g}x")
                    outputs += [gr.HTML(), gr.HTML(), gr.HTML()]
        first = next(iter(schedules))
        gr.Markdown(LEGEND.format(first=first))
        inputs: list[Any] = [prompt, as_message, most]
        running = start.click(
            write, inputs, outputs, concurrency_limit=PEOPLE, show_progress="hidden", api_name="write"
        )
        stop.click(None, cancels=[running])
    return blocks


def launch(blocks: gr.Blocks, **options: Any) -> None:
    """Serve the page; nothing of it is loaded from elsewhere. ``options`` are those of gradio's ``launch``.

    Raises UsageError if the address or port cannot be listened on.
    """
    theme = gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    options |= {"theme": theme, "css": STYLE, "share": False, "ssr_mode": False, "footer_links": []}
    try:
        blocks.queue(max_size=64).launch(**options)
    except OSError as error:
        raise UsageError(f"the page can listen on no such address and port: {error}") from error


def play(
    name: str,
    adapter: Path | None = None,
    speedups: tuple[float, ...] | None = None,
    *,
    where: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Load a model and serve its page.

    Args:
        name, adapter: as :func:`skipdecode.load` takes them.
        speedups: as :func:`schedules_for` takes them.
        where: ``dtype``, ``device`` and ``revision``, as :func:`skipdecode.load` takes them.
        options: of :func:`launch`.

    Raises:
        SkipDecodeError: the model cannot be loaded, or has no such speeds; or the port is taken.
    """
    where = where or {}
    check_with_model({}, read_generation_config(name, where.get("revision")))
    schedules = schedules_for(read_config(name, where.get("revision"), adapter), adapter_of(name, adapter), speedups)
    model, tokenizer = load(name, adapter=adapter, **where)
    launch(page(model, tokenizer, schedules, name), **options)


if __name__ == "__main__":
    variables = os.environ
    play(
        variables.get("MODEL", "demo"),
        Path(variables["ADAPTER"]) if "ADAPTER" in variables else None,
        tuple(map(float, variables["SPEEDUPS"].split(","))) if "SPEEDUPS" in variables else None,
    )
