"""The page of ``skipdecode play``: one prompt at two or three speeds, side by side."""

import difflib
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from html import escape
from typing import Any

import gradio as gr
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.tokenize import encode_prompts
from ..errors import SkipDecodeError, UsageError
from ..generation.generate import NaNCheck, end_token_ids
from ..loading.device import synchronize
from ..model.cache import SkipCache, total_kv_bytes
from ..model.cache_name import CACHE
from ..schedule import Schedule

#: Longest prompt in characters, and longest output in tokens.
MAX_CHARACTERS = 8000
MAX_NEW_TOKENS = 512
#: Seconds between two updates of the page.
REFRESH = 0.15
STYLE = """
.text {white-space: pre-wrap; overflow-wrap: anywhere; min-height: 6em; line-height: 1.5}
.text mark {background: #ffd54d; color: #222; border-radius: 2px}
.figures {display: flex; flex-wrap: wrap; gap: .2em 1.2em; font-variant-numeric: tabular-nums; font-size: .9em}
"""


class TokenStream:
    """A sequence that grows by one token for each :meth:`step`.

    ``options`` are those of ``model.generate``. Random numbers are the same at every speed.

    Attributes:
        ids: token ids of the prompt and of the text, (1, positions).
        seconds: seconds of computing, the prompt's included.
        done: whether the last token ends the sequence.
    """

    def __init__(self, model: PreTrainedModel, ids: Sequence[int], schedule: Schedule, **options: Any) -> None:
        self.model = model
        self.schedule = schedule
        self.cache = SkipCache(model, schedule)
        self.ids = torch.tensor([ids], device=model.device)
        self.prompt_length = len(ids)
        self.seconds = 0.0
        self.done = False
        config = deepcopy(model.generation_config)
        config.update(**options)
        self._sample = config.do_sample
        self._process = model._get_logits_processor(config, len(ids), device=str(model.device))
        self._random = torch.Generator(model.device).manual_seed(0)
        self._ends = end_token_ids({}, config)
        self._new = self.ids

    @property
    def tokens(self) -> list[int]:
        """The generated token ids."""
        return self.ids[0, self.prompt_length :].tolist()

    @torch.no_grad()
    def step(self) -> None:
        """Generate the next token. Raises ModelError for NaN logits."""
        start = time.perf_counter()
        output = self.model(input_ids=self._new, use_cache=True, logits_to_keep=1, **{CACHE: self.cache})
        logits = NaNCheck()(self.ids, output.logits[:, -1].float())
        scores = self._process(self.ids, logits)
        if self._sample:
            self._new = torch.multinomial(scores.softmax(-1), 1, generator=self._random)
        else:
            self._new = scores.argmax(-1, keepdim=True)
        self.ids = torch.cat([self.ids, self._new], dim=1)
        self.done = int(self._new) in self._ends
        synchronize(self.model.device)
        self.seconds += time.perf_counter() - start


def side_by_side(outputs: Sequence[TokenStream], max_new_tokens: int, machine: threading.Lock) -> Iterator[None]:
    """Generate all outputs in turn; the next is always the one that has computed least.

    Yields after each :data:`REFRESH` seconds, and at the end. ``machine`` is held for each token, so that several
    visitors take turns.
    """
    shown = time.perf_counter()
    while running := [each for each in outputs if not each.done]:
        output = min(running, key=lambda each: each.seconds)
        with machine:
            output.step()
        output.done = output.done or len(output.tokens) >= max_new_tokens
        if time.perf_counter() - shown > REFRESH:
            yield
            shown = time.perf_counter()
    yield


def mark_differences(text: str, reference: str, finished: bool) -> str:
    """``text`` as HTML, with the words marked that ``reference``, as far as it is finished, does not have there."""
    words = re.findall(r"\s+|\S+", text)
    others = re.findall(r"\s+|\S+", reference)
    compared = len(words) if finished else min(len(words), len(others))
    matcher = difflib.SequenceMatcher(None, others, words[:compared], autojunk=False)
    html = ""
    for kind, _, _, start, end in matcher.get_opcodes():
        part = escape("".join(words[start:end]))
        html += part if kind == "equal" or not part.strip() else f"<mark>{part}</mark>"
    return html + escape("".join(words[compared:]))


def render(output: TokenStream, first: TokenStream, text: str, reference: str) -> list[str]:
    """HTML of one output: its text and its figures."""
    depths = output.cache.step_depths
    layers = output.schedule.num_layers
    depth = sum(depths) / len(depths) if depths else layers
    rate = len(output.tokens) / output.seconds if output.seconds else 0.0
    figures = (
        f"{len(output.tokens)} tokens",
        f"{rate:.1f} tokens/s",
        f"{depth:.1f} of {layers} layers a step",
        f"KV cache {total_kv_bytes(output.cache) / 1e6:.1f} MB",
    )
    spans = "".join(f"<span>{each}</span>" for each in figures)
    return [
        f'<div class="text">{mark_differences(text, reference, first.done)}</div>',
        f'<div class="figures">{spans}</div>',
    ]


def page(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    schedules: Mapping[float, Schedule],
    name: str,
    max_new_tokens: int = 96,
    **options: Any,
) -> gr.Blocks:
    """The page: a prompt above, an output at each speed below. Outputs are compared with the first.

    ``options`` are those of ``model.generate``, for sampling.
    """
    machine = threading.Lock()
    is_chat = tokenizer.chat_template is not None
    speeds = [f"{speedup:g}x" for speedup in schedules]
    chosen = {name: value for name, value in options.items() if name != "do_sample"}
    how = ", ".join(f"{name} {value:g}" for name, value in chosen.items()) or "as the model's generation_config says"

    def generate(text: str, as_message: bool, length: int) -> Iterator[list[str]]:
        prompt: Any = [{"role": "user", "content": text}] if as_message else text
        try:
            if not text.strip():
                raise UsageError("type a prompt first")
            (ids,) = encode_prompts(tokenizer, [prompt])
            outputs = [TokenStream(model, ids, schedule, **options) for schedule in schedules.values()]
            for _ in side_by_side(outputs, length, machine):
                texts = [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in outputs]
                rows = [render(o, outputs[0], text, texts[0]) for o, text in zip(outputs, texts, strict=True)]
                yield [html for row in rows for html in row]
        except SkipDecodeError as error:
            raise gr.Error(str(error), print_exception=False) from None

    with gr.Blocks(analytics_enabled=False, title="SkipDecode") as blocks:
        gr.Markdown(f"# SkipDecode\n{name}: one prompt at {', '.join(speeds)}. Decoding: {how}.")
        prompt = gr.Textbox(label="Prompt", lines=3, max_length=MAX_CHARACTERS, autofocus=True)
        with gr.Row():
            as_message = gr.Checkbox(is_chat, label="As a chat message", visible=is_chat)
            length = gr.Slider(8, MAX_NEW_TOKENS, value=max_new_tokens, step=8, label="Max new tokens")
        with gr.Row():
            start = gr.Button("Generate", variant="primary")
            stop = gr.Button("Stop")
        outputs: list[Any] = []
        with gr.Row():
            for speed in speeds:
                with gr.Column(min_width=280):
                    gr.Markdown(f"### {speed}")
                    outputs += [gr.HTML(), gr.HTML()]
        gr.Markdown(
            f"Marked: words that {speeds[0]} did not generate. The speeds take turns, so tokens per second are what "
            "each would have alone."
        )
        inputs: list[Any] = [prompt, as_message, length]
        running = start.click(
            generate, inputs, outputs, concurrency_limit=8, show_progress="hidden", api_name="generate"
        )
        stop.click(None, cancels=[running])
    return blocks


def launch(blocks: gr.Blocks, **options: Any) -> None:
    """Serve the page. ``options`` are gradio's. Nothing is loaded from elsewhere."""
    theme = gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    blocks.queue(max_size=64).launch(theme=theme, css=STYLE, share=False, ssr_mode=False, footer_links=[], **options)
