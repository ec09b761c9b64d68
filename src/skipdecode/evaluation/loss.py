"""Compute the loss of responses with layers skipped, and rank layers by how much the loss rises without them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.attach import attach, teacher_forced
from ..core.schedule import Schedule
from ..core.stack import decoder_layers
from ..data.chat import Prompt
from ..data.collation import Collator, encode
from ..data.tasks import Example
from ..files import has_key, read_json, write
from ..generation.results import Completion

#: Tells whether a file's bytes are losses of :class:`LayerOrder`, which may be replaced.
is_losses = has_key("losses_without")


@torch.no_grad()
def response_loss(model: PreTrainedModel, batches: Sequence[Mapping[str, Any]], schedule: Schedule) -> float:
    """Return the mean cross-entropy in nats per response token, with layers skipped as ``schedule`` says."""
    attach(model)
    total, count = 0.0, 0
    for batch in batches:
        labels = batch["labels"][:, 1:]
        with teacher_forced(model, schedule, batch["prompt_length"]):
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
            logits = model(**inputs, logits_to_keep=labels.shape[1], use_cache=False).logits.float()
        losses = cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        total += sum(losses.sum(0).tolist())
        count += int((labels != -100).sum())
    return total / max(count, 1)


def text_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[tuple[Prompt, Completion]], size: int
) -> float:
    """Return how unlikely texts are to a model at full depth, in nats per token: the logarithm of their perplexity.

    Args:
        model: with all its layers.
        texts: with their prompts; the end of a text counts if it has one.
        size: of a batch.
    """
    examples = [Example(prompt, (completion.text,)) for prompt, completion in texts]
    rows: Any = list(encode(examples, tokenizer))
    for row, (_, completion) in zip(rows, texts, strict=True):
        if completion.finish_reason == "length":
            row["response_ids"] = row["response_ids"][:-1]  # it was cut off before an end
    rows = [row for row in rows if row["response_ids"]]
    collate = Collator(tokenizer.pad_token_id)
    batches = [collate(rows[at : at + size]) for at in range(0, len(rows), size)]
    batches = [{k: v.to(model.device) if isinstance(v, torch.Tensor) else v for k, v in b.items()} for b in batches]
    return response_loss(model, batches, Schedule.full(len(decoder_layers(model))))


class LayerOrder:
    """Greedy search for a layer order: drop the layer whose removal raises the loss least, then the next, and so on.

    The prompt keeps all layers, and the bottom layer is never dropped. Dropping one of ``n`` layers takes ``n - 1``
    passes over the batches, a whole search about ``L**2 / 2`` for ``L`` layers.

    Args:
        model: a causal LM, with or without gates.
        batches: from :func:`skipdecode.data.collation.batches_of`.
        file: stores every measured loss, so that an interrupted search resumes; :func:`is_losses` if it exists.
        job: identifies model and data; losses of another job in ``file`` are replaced.
        on_pass: called with the passes done and the passes in all, after each pass of :meth:`down_to`.

    Attributes:
        losses: loss in nats per token by the number of layers left.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batches: Sequence[Mapping[str, Any]],
        *,
        file: Path | None = None,
        job: str = "",
        on_pass: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:
        self._model, self._batches = model, batches
        self._file, self._job, self._on_pass = file, job, on_pass
        self._known = read_losses(file, job) if file is not None else {}
        self._left = list(range(len(decoder_layers(model))))
        self._dropped: list[int] = []
        self.losses = {len(self._left): self._loss(())}

    def down_to(self, depth: int) -> tuple[int, ...]:
        """Drop layers until ``depth`` >= 1 are left; return those in network order, then the dropped, last first."""
        done, total = 0, sum(range(depth, len(self._left)))
        while len(self._left) > depth:
            trials = {}
            for layer in self._left[1:]:
                trials[layer] = self._loss((*self._dropped, layer))
                done += 1
                self._on_pass(done, total)
            best = min(trials, key=trials.__getitem__)
            self._left.remove(best)
            self._dropped.append(best)
            self.losses[len(self._left)] = trials[best]
        return (*self._left, *reversed(self._dropped))

    def _loss(self, dropped: tuple[int, ...]) -> float:
        """Return the loss without the dropped layers, measured at most once."""
        key = ",".join(map(str, sorted(dropped)))
        if key not in self._known:
            count = len(decoder_layers(self._model))
            order = (*(i for i in range(count) if i not in dropped), *dropped)
            depth = count - len(dropped)
            schedule = Schedule(count, depth, depth, horizon=1, decay="constant", order=order)
            self._known[key] = response_loss(self._model, self._batches, schedule)
            if self._file is not None:
                write(self._file, json.dumps({"job": self._job, "losses_without": self._known}) + "\n")
        return self._known[key]


def read_losses(file: Path, job: str) -> dict[str, float]:
    """Read the losses of ``job`` by dropped layers; empty if ``file`` is missing or of another job."""
    values = read_json(file) if file.exists() else {}
    return values["losses_without"] if values.get("job") == job else {}
