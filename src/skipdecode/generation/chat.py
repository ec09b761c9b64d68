"""A conversation in the terminal, whose turns share the keys and values of their prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer
from transformers.cache_utils import DynamicLayer

from ..data.chat import Chat, Message
from ..data.tokenize import encode_prompts
from ..loading.load import Checkpoint
from ..model.cache import RECURRENT, SkipCache
from ..model.cache_name import CACHE
from ..schedule import Schedule
from .generate import generate_ids
from .stats import GenerationStats

#: Sampling of small chat models where the checkpoint's generation_config has none: SmolLM2's model card, and a penalty.
CHAT_SAMPLING = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}


def sampling_options(checkpoint: Checkpoint, chosen: Mapping[str, float | None]) -> dict[str, Any]:
    """Options of ``model.generate``: those chosen, else the adapter's, the model's, or :data:`CHAT_SAMPLING`.

    A temperature of 0 is greedy decoding.
    """
    config = checkpoint.generation_config
    options = dict(checkpoint.sampling or ({} if config.do_sample else CHAT_SAMPLING))
    options |= {name: value for name, value in chosen.items() if value is not None}
    if options.get("temperature", config.temperature) == 0:
        return {name: value for name, value in options.items() if name == "repetition_penalty"}
    return {"do_sample": True, **options}


class PromptCache:
    """The keys and values of one prompt, kept for a later prompt that begins as it did.

    Args:
        model: a causal LM with gates attached. The prompt runs all layers, without the adapter.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._ids: list[int] = []
        self._cache = DynamicCache(config=model.config)

    @torch.no_grad()
    def prefix(self, ids: Sequence[int], schedule: Schedule) -> DynamicCache | None:
        """A cache of all but the last of ``ids``; None if this model or schedule cannot start from one."""
        ids = list(ids[:-1])
        runs_all = not schedule.prompt_decay and schedule.deepest == schedule.num_layers
        if not ids or not runs_all or any(isinstance(layer, RECURRENT) for layer in self._cache.layers):
            return None
        pairs = zip(self._ids, ids, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self._ids), len(ids)))
        if same < len(self._ids) and all(type(layer) is DynamicLayer for layer in self._cache.layers):
            self._cache.crop(same - len(self._ids))
        elif same < len(self._ids) or not self._ids:  # a sliding window forgets; a pass may have been interrupted
            self._cache, same = DynamicCache(config=self.model.config), 0
        self._ids = []  # until the pass is whole
        if same < len(ids):
            new_ids = torch.tensor([ids[same:]], device=self.model.device)
            self.model(input_ids=new_ids, use_cache=True, logits_to_keep=1, **{CACHE: self._cache})
        self._ids = ids
        return self._cache


class Printer(TextStreamer):
    """Prints a text as it is generated, and keeps it."""

    text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print and keep ``text``."""
        self.text += text
        super().on_finalized_text(text, stream_end)


class Conversation:
    """A conversation with a model that has gates attached, in a terminal."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.prompts = PromptCache(model)
        self.messages: Chat = () if system is None else (Message("system", system),)

    def answer(self, text: str, schedule: Schedule, **options: Any) -> GenerationStats | None:
        """Stats of the answer to ``text``, which is printed as it is generated; None if Ctrl-C stopped it.

        ``options`` are those of ``model.generate``. Raises what :func:`~skipdecode.generate` does.
        """
        asked = (*self.messages, Message("user", text))
        (ids,) = encode_prompts(self.tokenizer, [asked])
        printer = Printer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        stats = None

        def start(model: PreTrainedModel) -> SkipCache:
            return SkipCache(model, schedule, prefix=self.prompts.prefix(ids, schedule))

        try:
            options |= {"streamer": printer, "num_beams": 1}  # beams would not stream
            output = generate_ids(self.prompts.model, self.tokenizer, [ids], start, 1, seed=0, **options)
            stats = output.stats
        except KeyboardInterrupt:
            printer.end()
        self.messages = (*asked, Message("assistant", printer.text))
        return stats
