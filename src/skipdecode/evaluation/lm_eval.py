"""Model ``skipdecode`` of EleutherAI's lm-evaluation-harness, which wraps its command line.

    python -m skipdecode.evaluation.lm_eval --model skipdecode --model_args pretrained=demo,speedup=3 --tasks …

An adapter is a model argument too: ``pretrained=smollm2,adapter=fast,speedup=1.5``.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ..data.collator import Collator
from ..errors import NOT_FINITE, MissingExtra, ModelError, SkipDecodeError, UsageError
from ..loading.load import load
from ..model.attach import attach, teacher_forced
from ..model.cache import SkipCache
from ..model.cache_name import CACHE
from ..model.config import num_layers, trained_schedules
from ..schedule import Schedule, choose_schedule

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import Collator as Batches
except ImportError as error:
    raise MissingExtra("lm-evaluation-harness is not installed: pip install '.[harness]' in a clone") from error

logger = logging.getLogger(__name__)


@register_model("skipdecode")
class SkipLM(HFLM):
    """The harness's ``hf`` model with a schedule: contexts run as prompts, continuations as generated positions.

    Args:
        pretrained: directory, Hub name, adapter, ``demo``, or a model.
        adapter, revision, dtype, device: as :func:`skipdecode.load` takes them.
        speedup: target, in layers; None: the slowest trained one above 1, else 1.
        schedule: a schedule or its JSON file, in place of ``speedup``.
        options: as ``hf`` takes them.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        *,
        adapter: str | None = None,
        revision: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        speedup: float | None = None,
        schedule: str | Schedule | None = None,
        **options: Any,
    ) -> None:
        if isinstance(pretrained, str):
            model, tokenizer = load(pretrained, adapter=adapter, revision=revision, dtype=dtype, device=device)
            options.setdefault("tokenizer", tokenizer)
        else:
            model = attach(pretrained, adapter=adapter)
        super().__init__(model, backend="causal", **options)
        self.pretrained = pretrained if isinstance(pretrained, str) else model.config.name_or_path
        if isinstance(schedule, str):
            schedule = Schedule.load(Path(schedule))
        self.schedule = schedule or choose_schedule(trained_schedules(model), num_layers(model.config), speedup)
        SkipCache(model, self.schedule)  # raises ScheduleError before the first request

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Log-probability of each (texts, context ids, continuation ids), and whether it is what the model would say.

        Contexts are cut on the left to fit in ``max_length`` tokens.
        """
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
        """Answers of :meth:`_loglikelihood_tokens` for one batch, from a pass that skips what decoding skips."""
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
        if scores[~padding].isnan().any():
            raise ModelError(NOT_FINITE)
        chosen = scores.gather(2, targets.clamp(min=0)[..., None])[..., 0].masked_fill(padding, 0)
        greedy = (scores.argmax(-1) == targets) | padding
        return list(zip(chosen.sum(1).tolist(), greedy.all(1).tolist(), strict=True))

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        options[CACHE] = SkipCache(self.model, self.schedule)
        return super()._model_generate(context, max_length, stop, **options)

    def get_model_info(self) -> dict[str, Any]:
        """Facts that the harness saves with its results, and the schedule."""
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
