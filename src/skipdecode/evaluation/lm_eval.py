"""Run the tasks of EleutherAI's lm-evaluation-harness with layers skipped (docs/harness.md).

The harness has no plug-ins, so this module wraps its command line and registers one more model:

    python -m skipdecode.evaluation.lm_eval --model skipdecode --model_args pretrained=demo,speedup=3 --tasks …
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator as Batches
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ..data.collator import Collator
from ..errors import SkipDecodeError, UsageError
from ..generation.options import given_schedule
from ..loading.checkpoint_checks import check_tokenizer
from ..loading.device import check_dtype
from ..loading.load import load_tokenizer, read_config, read_weights, refuse_adapter, refuse_gguf, resolve
from ..model.attach import attach, teacher_forced
from ..model.cache import SkipCache
from ..model.cache_name import CACHE
from ..model.config import schedule_for
from ..model.inspect import decoder_layers
from ..schedule import Schedule

logger = logging.getLogger(__name__)


@register_model("skipdecode")
class SkipLM(HFLM):
    """The harness's ``hf`` model with a schedule: contexts run as prompts, continuations as generated positions.

    Args:
        pretrained: directory, hub name, ``demo``, or a model.
        speedup, schedule: give one: a target, or a schedule or its JSON file. Neither: the checkpoint's own schedule.
        full: run every layer.
        options: as ``hf`` takes them.

    Raises:
        UsageError: the options ask for several devices or for the checkpoint's code.
        ModelError: :func:`skipdecode.load` would raise it, for an encoder-decoder model or a damaged checkpoint.
        ScheduleError: the schedule does not fit the model.
    """

    AUTO_MODEL_CLASS = SimpleNamespace(from_pretrained=read_weights)  # hf's would initialize missing weights

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        *,
        speedup: float | None = None,
        schedule: str | Schedule | None = None,
        full: bool = False,
        **options: Any,
    ) -> None:
        if options.get("trust_remote_code"):
            raise UsageError("trust_remote_code would run code of the checkpoint, which skipdecode never does")
        for name in ("parallelize", "tp_plan"):
            if options.get(name):
                raise UsageError(f"{name} spreads a model over several devices, which is not supported: leave it out")
        schedule = given_schedule(1 if full else speedup, schedule)
        options.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")  # hf's is cuda, even without GPUs
        if isinstance(pretrained, str):
            check_dtype(options.get("dtype") or "auto")
            refuse_adapter(pretrained, "lm-eval")
            refuse_gguf(pretrained, "lm-eval")
            pretrained, revision = resolve(pretrained), options.get("revision")
            read_config(pretrained, revision)  # raises for encoder-decoders and damaged files, which hf might load
            load_tokenizer(pretrained, revision)
        super().__init__(pretrained, backend="causal", **options)
        if isinstance(pretrained, str):
            check_tokenizer(pretrained, self.tokenizer, self.model.get_input_embeddings().weight.shape[0])
        layers = len(decoder_layers(attach(self.model)))
        self.schedule = Schedule.full(layers) if full else schedule_for(self.config, speedup, schedule)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Return (log-probability, is greedy) of the continuation of each (texts, context ids, continuation ids)."""
        room = self.max_length + 1  # the last token is predicted, not fed
        if not all(context and 0 < len(continuation) < room for _, context, continuation in requests):
            raise UsageError(f"a request is a context and a continuation of 1 to {self.max_length} tokens")
        cut = sum(len(context) + len(continuation) > room for _, context, continuation in requests)
        if cut:
            logger.warning("%d contexts were cut on the left to fit in %d tokens", cut, self.max_length)
        size, scheduler = override_bs or self.batch_size, None
        if size == "auto":
            size, scheduler = 0, self._batch_scheduler
            self.batch_sizes: dict[int, int] = {}
        # Contexts of similar length share a batch, to save padding.
        order = Batches(requests, sort_fn=lambda request: (-len(request[1]), -len(request[2])))
        answers: list[tuple[float, bool]] = []
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")
        for chunk in order.get_batched(n=size, batch_fn=scheduler):
            answers += self._score([{"prompt_ids": c[len(k) - room :], "response_ids": k} for _, c, k in chunk])
            for (texts, _, _), answer in zip(chunk, answers[-len(chunk) :], strict=True):
                if texts is not None:  # None: a window of a rolling request, which the harness caches as a whole
                    self.cache_hook.add_partial("loglikelihood", texts, answer)
            bar.update(len(chunk))
        bar.close()
        return order.get_original(answers)

    @torch.no_grad()
    def _score(self, rows: Sequence[Mapping[str, list[int]]]) -> list[tuple[float, bool]]:
        """Return (log-probability, is greedy) of each row's response, from one pass that skips what decoding skips."""
        batch = Collator(self.tokenizer.pad_token_id, multiple=1)(rows)
        prompt = batch.pop("prompt_length")
        targets = batch.pop("labels")[:, 1:].to(self.device)
        inputs: dict[str, Tensor] = {key: value.to(self.device) for key, value in batch.items()}
        precision = self.mixed_precision_dtype
        with (
            teacher_forced(self.model, self.schedule, prompt),
            torch.autocast(self.device.type, precision, enabled=precision is not None),
        ):
            logits = self.model(**inputs, use_cache=False, logits_to_keep=targets.shape[1]).logits
        scores = torch.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
        padding = targets < 0
        chosen = scores.gather(2, targets.clamp(min=0)[..., None])[..., 0].masked_fill(padding, 0)
        greedy = (scores.argmax(-1) == targets) | padding
        return list(zip(chosen.sum(1).tolist(), greedy.all(1).tolist(), strict=True))

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        # Also at full depth, because the model may have another default schedule.
        options[CACHE] = SkipCache(self.model, self.schedule)
        return super()._model_generate(context, max_length, stop, **options)

    def get_model_info(self) -> dict[str, Any]:
        """Return the facts that the harness saves with its results, and the schedule."""
        return super().get_model_info() | {"skipdecode_schedule": self.schedule.to_dict()}


def main() -> None:
    """Run the harness's command line; a SkipDecodeError ends it with one line and exit code 2."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except SkipDecodeError as error:
        print(f"skipdecode: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
