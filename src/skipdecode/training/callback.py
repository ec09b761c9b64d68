"""Skip layers in any training loop: one object, a callback of transformers' and TRL's trainers or a context manager.

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
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ..errors import UsageError
from ..latency.resolve import new_schedule
from ..model.attach import attach, teacher_forced
from ..model.config import config_schedules, set_entry, to_config_entry
from ..model.gate import refuse_packed
from ..schedule import Schedule

#: Outputs that hold a row per head or layer, whose columns are not put back.
BY_HEAD = ("output_attentions", "output_hidden_states")


class Skipping(TrainerCallback):
    """Draws a speed-up for each training step, at which each layer runs only the positions that decoding would run.

    Loss, masks and optimizer stay those of the loop. A row's prompt ends where its labels begin, and runs all layers.
    Prompts of a batch have to end in the same column: rows are moved for the pass, and its outputs back. The model's
    config gets the schedules, so that what the loop saves brings them. Outside steps the model runs all layers.

    Args:
        model: a causal LM, also within PEFT's; None: a trainer's, when its training begins.
        speedups: targets, of which each step draws one; or schedules by target.
        weights: relative frequencies of ``speedups``; None: equal.
        seed: of the draws, which depend on it and on the step's number alone.
        lengths: decode steps of batches that schedules are fitted to; None: the paper's budgets over ``horizon`` steps.
        horizon: about as many tokens as a response has.
        style: further fields of the schedules, such as ``order`` and ``decay``.

    Attributes:
        schedules: by target speed-up; empty before there is a model.

    Raises:
        UsageError: the arguments contradict each other; later, from a pass: rows that hold several texts or responses,
            or no labels.
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
        lengths: Sequence[int] | None = None,
        horizon: int = 128,
        **style: Any,
    ) -> None:
        if not speedups or (weights is not None and len(weights) != len(speedups)):
            raise UsageError("Skipping needs speed-ups, and a weight for each if there are weights")
        if isinstance(speedups, Mapping) and (style or lengths):
            raise UsageError("schedules are given: they know their lengths, order and decay already")
        self.speedups, self.weights, self.seed = speedups, weights, seed
        self.basis = {"basis": lengths or (), "horizon": None if lengths else horizon, **style}
        self.model: Any = None
        self.schedules: dict[float, Schedule] = dict(speedups) if isinstance(speedups, Mapping) else {}
        self._now: Schedule | None = None
        self._passes = ExitStack()  # of the current step: closed after its backward pass
        self._steps = ExitStack()  # of a trainer
        self._under_way: list[tuple[Moved | None, ExitStack]] = []
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
            self.schedules = {float(each): new_schedule(config, each, **self.basis) for each in self.speedups}
        if config_schedules(config) != self.schedules:
            set_entry(config, to_config_entry(self.schedules))
        self.model = model
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)

    def drawn(self, step: int) -> Schedule:
        """Return the schedule of a step, drawn from the seed and the step alone: a resumed run draws the same."""
        dice = random.Random(f"{self.seed} {step}")
        return dice.choices(list(self.schedules.values()), self.weights)[0]

    def step(self, number: int) -> Any:
        """Return a context in which the model's passes, and their backward passes, are those of a training step."""
        return self.at(self.drawn(number))

    @contextmanager
    def at(self, schedule: Schedule | float) -> Iterator[None]:
        """Let the model's passes skip layers by a schedule or a target speed-up, as for a validation loss at it."""
        before, under_way = (self._now, self._passes), len(self._under_way)
        self._now = schedule if isinstance(schedule, Schedule) else self.schedules[schedule]
        self._passes = ExitStack()
        try:
            with self._passes:
                yield
        finally:
            for _, passed in self._under_way[under_way:]:  # passes that raised
                passed.close()
            del self._under_way[under_way:]
            self._now, self._passes = before

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Attach to the trainer's model. Raises UsageError for what cannot skip layers: packing, DataParallel."""
        if getattr(args, "packing", False) or getattr(args, "padding_free", False):
            raise UsageError("packed rows hold several texts, each with depths of its own: packing=False")
        if getattr(args, "n_gpu", 1) > 1:
            raise UsageError("DataParallel's copies share one model's gates: launch a process per GPU")
        self.attach(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a step."""
        self._steps.close()
        self._steps.enter_context(self.step(state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step."""
        self._steps.close()

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin a pass: move rows so that their prompts end in one column, and set the gates."""
        if self._now is None:
            return None
        prompt_length = kwargs.pop("prompt_length", None)
        moved = None
        if prompt_length is None:  # else the rows stand as they have to
            if args:
                raise UsageError("name the model's inputs in training: model(input_ids=…, labels=…)")
            moved = Moved(kwargs)
            kwargs, prompt_length = moved.inputs(), moved.prompt_length
        passed = ExitStack()
        # The backward pass may recompute layers, so the gates stay set until the step's end.
        (self._passes if torch.is_grad_enabled() else passed).enter_context(
            teacher_forced(model, self._now, prompt_length)
        )
        self._under_way.append((moved, passed))
        return args, kwargs

    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        """End a pass: move its outputs' rows back."""
        if self._now is None:
            return None
        moved, passed = self._under_way.pop()
        passed.close()
        return None if moved is None else moved.outputs(output)


class Moved:
    """A batch whose rows are moved so that all prompts end in the same column, and the way back.

    Args:
        kwargs: the model's inputs: ``input_ids`` and ``labels`` (batch, width), maybe ``attention_mask`` and others.

    Raises:
        UsageError: there are no labels; a row's mask or labels have gaps, or it holds several texts.
    """

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        refuse_packed(dict(kwargs))
        ids, labels, given = (kwargs.get(name) for name in ("input_ids", "labels", "attention_mask"))
        mask: Any = ids if given is None else given
        if ids is None or labels is None or not labels.shape == ids.shape == mask.shape:
            raise UsageError(
                "a training pass needs input_ids and labels, and maybe an attention_mask, of the same shape (batch, "
                "width): labels tell where prompts end"
            )
        if kwargs.get("logits_to_keep") or any(kwargs.get(name) for name in BY_HEAD):
            raise UsageError(f"logits_to_keep, {' and '.join(BY_HEAD)} cannot be given: rows are moved for the pass")
        self.kwargs, self.width = kwargs, ids.shape[1]
        self.here = here = torch.ones_like(ids, dtype=torch.bool) if mask is ids else mask.bool()
        learned = (labels != -100) & here
        columns = torch.arange(self.width, device=ids.device)
        start, count = here.int().argmax(1), here.sum(1)
        first = torch.where(learned.any(1), learned.int().argmax(1), start + count)
        if bool((here != ((columns >= start[:, None]) & (columns < (start + count)[:, None]))).any()):
            raise UsageError("a row's attention_mask has gaps: a row holds one text")
        last = torch.where(learned, columns, -1).amax(1)
        if bool((learned.sum(1) != (last - first + 1).clamp(min=0)).any()):
            raise UsageError("a row has labels in several places: it holds one prompt and one response")
        prompt = (first - start).clamp(min=1)  # the first token has no label: nothing stands before it
        self.prompt_length = int(prompt.max())
        # Column c of a moved row is column c - offset of the row that was given.
        self.offset = (self.prompt_length - prompt - start)[:, None]
        size = self.prompt_length + int((count - prompt).max().clamp(min=0))
        source = torch.arange(size, device=ids.device) - self.offset
        self.real = (source >= start[:, None]) & (source < (start + count)[:, None])
        self.source = source.clamp(0, self.width - 1)

    def inputs(self) -> dict[str, Any]:
        """Return the model's inputs with moved rows; padding repeats tokens, which no other attends to."""
        moved = {
            name: value.gather(1, self.source)
            if isinstance(value, Tensor) and value.shape == self.kwargs["input_ids"].shape
            else value
            for name, value in self.kwargs.items()
        }
        mask = self.real.long()
        moved["labels"] = moved["labels"].masked_fill(~self.real, -100)
        return moved | {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}

    def outputs(self, output: Any) -> Any:
        """Return a model's output with the columns of its tensors, such as logits, where they were; padding is 0."""
        rows, size = self.source.shape
        for name, value in output.items() if isinstance(output, Mapping) else ():
            if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == rows:
                short = size - value.shape[1]  # 1: of predicted tokens, without one for the last column
                if short in (0, 1):
                    output[name] = self._back(value, self.here[:, short:])
        return output

    def _back(self, value: Tensor, real: Tensor) -> Tensor:
        source = torch.arange(real.shape[1], device=value.device) + self.offset
        extra = (1,) * (value.ndim - 2)
        index = source.clamp(0, value.shape[1] - 1).view(*source.shape, *extra).expand(-1, -1, *value.shape[2:])
        return value.gather(1, index) * real.reshape(*real.shape, *extra)
