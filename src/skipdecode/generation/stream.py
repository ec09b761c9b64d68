"""One sequence, generated a token at a time: for chat and for outputs side by side."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer

from ..errors import ModelError
from ..loading.device import synchronize
from ..model.cache import RECURRENT, SkipCache
from ..model.cache_name import CACHE
from ..schedule import Schedule

#: Sampling options of a stream, in the order in which they act.
PROCESSORS = {
    "repetition_penalty": RepetitionPenaltyLogitsProcessor,
    "temperature": TemperatureLogitsWarper,
    "top_p": TopPLogitsWarper,
}
#: Sampling of small chat models where the checkpoint's generation_config has none: SmolLM2's model card, and a penalty.
CHAT_SAMPLING = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}


def sampling_defaults(config: GenerationConfig) -> dict[str, float]:
    """Return the sampling options of a checkpoint that samples, else :data:`CHAT_SAMPLING`."""
    if not config.do_sample:
        return dict(CHAT_SAMPLING)
    values = {name: getattr(config, name) for name in PROCESSORS}
    return {name: value for name, value in values.items() if value is not None}


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
        """Return a cache of all but the last of ``ids``; None if this model or schedule cannot start from one."""
        ids = list(ids[:-1])
        runs_all = not schedule.prompt_decay and schedule.deepest == schedule.num_layers
        if not ids or not runs_all or any(isinstance(layer, RECURRENT) for layer in self._cache.layers):
            return None
        pairs = zip(self._ids, ids, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self._ids), len(ids)))
        if same < len(self._ids):
            if any(type(layer) is not DynamicLayer for layer in self._cache.layers):  # a sliding window forgets
                same = 0
            cache = DynamicCache(config=self.model.config)
            for old, new in zip(self._cache.layers, cache.layers, strict=True):
                if same:
                    new.update(old.keys[..., :same, :], old.values[..., :same, :])
            self._cache = cache
        self._ids = []  # until the pass is whole
        if same < len(ids):
            new_ids = torch.tensor([ids[same:]], device=self.model.device)
            self.model(input_ids=new_ids, use_cache=True, logits_to_keep=1, **{CACHE: self._cache})
        self._ids = ids
        return self._cache


class TokenStream:
    """A sequence that grows by one token for each :meth:`step`.

    Args:
        model: a causal LM with gates attached.
        ids: token ids of the prompt.
        schedule: the layers that each step runs.
        sampling: ``temperature``, ``top_p`` and ``repetition_penalty``; without a temperature above 0, greedy.
        prefix: a cache of the first tokens of ``ids``, at most all but the last.
        seed: of the random numbers, the same at every speed.

    Attributes:
        seconds: seconds of computing, the prompt's included.
        done: whether the last token ends the sequence.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ids: Sequence[int],
        schedule: Schedule,
        sampling: Mapping[str, float] | None = None,
        *,
        prefix: DynamicCache | None = None,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.schedule = schedule
        self.cache = SkipCache(model, schedule, prefix=prefix)
        self.ids = torch.tensor([ids], device=model.device)
        self.prompt_length = len(ids)
        self.seconds = 0.0
        self.done = False
        sampling = dict(sampling or {})
        self._do_sample = sampling.get("temperature", 0) > 0
        if not self._do_sample:
            sampling = {name: value for name, value in sampling.items() if name == "repetition_penalty"}
        kinds = [kind(sampling[name]) for name, kind in PROCESSORS.items() if name in sampling]
        self._processors = LogitsProcessorList(kinds)
        self._random = torch.Generator(model.device).manual_seed(seed)
        self._computed = prefix.get_seq_length() if prefix is not None else 0
        ends = model.generation_config.eos_token_id
        self._ends = {ends} if isinstance(ends, int) else set(ends or ())

    @property
    def tokens(self) -> list[int]:
        """Return the generated token ids."""
        return self.ids[0, self.prompt_length :].tolist()

    @torch.no_grad()
    def step(self) -> int:
        """Generate the next token and return its id. Raises ModelError for NaN logits."""
        start = time.perf_counter()
        new = self.ids[:, self._computed :]
        output = self.model(input_ids=new, use_cache=True, logits_to_keep=1, **{CACHE: self.cache})
        scores = self._processors(self.ids, output.logits[:, -1].float())
        if scores.isnan().any():
            raise ModelError("the model's logits are NaN: use a lower speed, or float32 or bfloat16")
        if self._do_sample:
            token = torch.multinomial(scores.softmax(-1), 1, generator=self._random)
        else:
            token = scores.argmax(-1, keepdim=True)
        self._computed = self.ids.shape[1]
        self.ids = torch.cat([self.ids, token], dim=1)
        self.done = int(token) in self._ends
        synchronize(self.model.device)
        self.seconds += time.perf_counter() - start
        return int(token)
