"""Skipping: layers are skipped in any training loop, by a callback of transformers' and TRL's trainers or a context.

trainer = SFTTrainer(model, callbacks=[Skipping(speedups=(1, 2, 3))], …)

skipping = Skipping(model, speedups=(1, 2, 3))
for number, batch in enumerate(loader):
    with skipping.step(number):
        loss = model(**batch).loss
        accelerator.backward(loss)
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ..errors import UsageError
from ..model.attach import attach, teacher_forced
from ..model.config import config_schedules, num_layers, set_entry, to_config_entry
from ..model.gate import refuse_packed
from ..schedule import Schedule, choose_schedule


class Skipping(TrainerCallback):
    """Draws a speed for each training step, at which each layer runs only the positions that decoding would run.

    Loss, masks and optimizer stay those of the loop. A row's prompt ends where its labels begin, and runs all layers.
    The model's config gets the schedules, so that what the loop saves holds them. Outside steps all layers run.

    Args:
        model: a causal LM, also inside a PEFT model. None: the trainer's, when its training begins.
        speedups: targets, of which each step draws one; or schedules by target.
        weights: relative frequencies of ``speedups``; None: equal.
        seed: of the draws, which depend on it and on the step's number alone.
        style: fields of new schedules: ``order``, ``warmup``; ``decay`` and ``horizon`` for depths that fall.

    Attributes:
        schedules: by target speed-up; empty before there is a model.

    Raises:
        UsageError: the arguments contradict each other; in a pass: the rows have no labels, or hold several texts.
        UnsupportedModel: the model cannot skip layers exactly.
        ScheduleError: a schedule cannot be made, or does not fit the model.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        speedups: Sequence[float] | Mapping[float, Schedule] = (1.0, 2.0),
        weights: Sequence[float] | None = None,
        seed: int = 0,
        **style: Any,
    ) -> None:
        if not speedups or (weights is not None and len(weights) != len(speedups)):
            raise UsageError("Skipping needs speed-ups, and as many weights, if any")
        if isinstance(speedups, Mapping) and style:
            raise UsageError(f"schedules have their own {', '.join(style)}: give one of the two")
        self.speedups = speedups
        self.weights = weights
        self.seed = seed
        self.style = style
        self.model: Any = None
        self.schedules: dict[float, Schedule] = dict(speedups) if isinstance(speedups, Mapping) else {}
        self._schedule: Schedule | None = None
        self._aligned: AlignedRows | None = None  # of the newest pass
        self._pass = ExitStack()  # gates of the newest pass: they stay for its backward pass, which may recompute
        self._step = ExitStack()  # the trainer's step
        if model is not None:
            self.attach(model)

    def attach(self, model: nn.Module) -> None:
        """Put gates on the model, and the schedules into its config; the callback does so when training begins."""
        if model is self.model:
            return
        if self.model is not None:
            raise UsageError("this Skipping belongs to another model: make one for each")
        config: Any = attach(model).config
        if not self.schedules:
            trained = config_schedules(config)
            for speedup in self.speedups:
                self.schedules[float(speedup)] = choose_schedule(trained, num_layers(config), speedup, **self.style)
        if config_schedules(config) != self.schedules:
            set_entry(config, to_config_entry(self.schedules))
        self.model = model
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)

    def drawn(self, step: int) -> Schedule:
        """Schedule of a step: a resumed run draws the same."""
        dice = random.Random(f"{self.seed} {step}")
        return dice.choices(list(self.schedules.values()), self.weights)[0]

    def step(self, number: int) -> AbstractContextManager[None]:
        """Context of a training step: its forward and backward passes belong inside."""
        return self.at(self.drawn(number))

    @contextmanager
    def at(self, schedule: Schedule | float) -> Iterator[None]:
        """Context in which the model's passes skip layers by a schedule or a target, as for a validation loss."""
        before = self._schedule
        self._schedule = schedule if isinstance(schedule, Schedule) else self.schedules[schedule]
        try:
            yield
        finally:
            self._pass.close()
            self._schedule = before

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Attach to the trainer's model. Raises UsageError for packed rows and for DataParallel."""
        if getattr(args, "packing", False) or getattr(args, "padding_free", False):
            raise UsageError("packed rows hold several texts, each with depths of its own: packing=False")
        if getattr(args, "n_gpu", 1) > 1:
            raise UsageError("DataParallel's copies share one model's gates: launch a process per GPU")
        self.attach(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a step."""
        self._step.close()
        self._step.enter_context(self.step(state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step."""
        self._step.close()

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._schedule is None:
            return None
        prompt_length = kwargs.pop("prompt_length", None)
        self._aligned = None
        if prompt_length is None:  # else a Collator has aligned the prompts
            if args:
                raise UsageError("name the model's inputs in training: model(input_ids=…, labels=…)")
            self._aligned = AlignedRows(kwargs)
            kwargs = self._aligned.inputs()
            prompt_length = self._aligned.prompt_length
        self._pass.close()
        self._pass.enter_context(teacher_forced(model, self._schedule, prompt_length))
        return args, kwargs

    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        if self._schedule is None or self._aligned is None:
            return None
        return self._aligned.outputs(output)


class AlignedRows:
    """Rows that are shifted so that all prompts end in the same column, and the way back for the outputs.

    Args:
        kwargs: the model's inputs: ``input_ids`` and ``labels`` (batch, width), maybe ``attention_mask`` and others.

    Attributes:
        prompt_length: width of the prompt block after the shift.

    Raises:
        UsageError: there are no labels; a row's mask or labels have gaps, or it holds several texts.
    """

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        refuse_packed(dict(kwargs))
        ids = kwargs.get("input_ids")
        labels = kwargs.get("labels")
        if ids is None or labels is None or labels.shape != ids.shape:
            raise UsageError("a training pass needs input_ids, and labels of the same shape to show where prompts end")
        for name in ("logits_to_keep", "output_attentions", "output_hidden_states"):
            if kwargs.get(name):
                raise UsageError(f"{name} cannot be given: rows are shifted for the pass")
        mask = kwargs.get("attention_mask")
        self.mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        learned = (labels != -100) & self.mask
        if not learned.any():
            raise UsageError("no row of the batch has a label: there is nothing to learn")
        columns = torch.arange(ids.shape[1], device=ids.device)
        start = self.mask.int().argmax(1)
        end = start + self.mask.sum(1)
        first = torch.where(learned.any(1), learned.int().argmax(1), end)
        last = torch.where(learned, columns, -1).amax(1)
        if (self.mask != ((columns >= start[:, None]) & (columns < end[:, None]))).any():
            raise UsageError("a row's attention_mask has gaps: a row holds one text")
        if (learned.sum(1) != (last - first + 1).clamp(min=0)).any():
            raise UsageError("a row has labels in several places: it holds one prompt and one response")
        prompt = (first - start).clamp(min=1)  # no logits predict the first token
        self.kwargs = kwargs
        self.prompt_length = int(prompt.max())
        # Column c of a shifted row is column c - shift of the given row.
        self.shift = (self.prompt_length - prompt - start)[:, None]
        size = self.prompt_length + int((end - start - prompt).max().clamp(min=0))
        source = torch.arange(size, device=ids.device) - self.shift
        self.real = (source >= start[:, None]) & (source < end[:, None])
        self.source = source.clamp(0, ids.shape[1] - 1)

    def inputs(self) -> dict[str, Any]:
        """Inputs with shifted rows; padding repeats tokens, which no other attends to."""
        shifted = dict(self.kwargs)
        for name, value in self.kwargs.items():
            if isinstance(value, Tensor) and value.shape == self.mask.shape:
                shifted[name] = value.gather(1, self.source)
        shifted["labels"] = shifted["labels"].masked_fill(~self.real, -100)
        shifted["attention_mask"] = self.real.long()
        shifted["position_ids"] = (shifted["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return shifted

    def outputs(self, output: Any) -> Any:
        """The model's output with the columns of its tensors, such as logits, where they were; padding is 0."""
        rows, size = self.source.shape
        for name, value in output.items() if isinstance(output, Mapping) else ():
            if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == rows:
                missing = size - value.shape[1]  # 1: one per predicted token, none for the last column
                if missing in (0, 1):
                    output[name] = self._back(value, self.mask[:, missing:])
        return output

    def _back(self, value: Tensor, real: Tensor) -> Tensor:
        source = (torch.arange(real.shape[1], device=value.device) + self.shift).clamp(0, value.shape[1] - 1)
        per_column = (*source.shape, *[1] * (value.ndim - 2))
        index = source.view(per_column).expand(-1, -1, *value.shape[2:])
        return value.gather(1, index) * real.view(per_column)
