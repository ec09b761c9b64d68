"""Skipping: layers are skipped in any training loop, by a callback of transformers' and TRL's trainers or a context.

trainer = SFTTrainer(model, callbacks=[Skipping(speedups=(1, 2, 3))], …)

skipping = Skipping(model, speedups=(1, 2, 3))
for number, batch in enumerate(loader):
    with skipping.step(number):
        loss = model(**batch).loss
        accelerator.backward(loss)
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import TrainerCallback

from ..errors import UsageError
from ..model.attach import attach, teacher_forced
from ..model.config import config_schedules, num_layers, set_entry, speedup_key, to_config_entry
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
        current: that of passes now; None: all layers run.

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
        if isinstance(speedups, Mapping) and style:
            raise UsageError(f"schedules have their own {', '.join(style)}: give one of the two")
        if not 0 < len(speedups) == len(set(speedups)):
            raise UsageError(f"speedups are one or more, each once: not {tuple(speedups)}")
        if weights is not None and not (len(weights) == len(speedups) and min(weights) >= 0 < sum(weights) < torch.inf):
            raise UsageError(f"weights are a number for each speedup, 0 or more and not all 0: not {weights}")
        self.speedups = speedups
        self.weights = weights
        self.seed = seed
        self.style = style
        self.model: Any = None
        self.schedules: dict[float, Schedule] = dict(speedups) if isinstance(speedups, Mapping) else {}
        self.current: Schedule | None = None
        self._restore: Callable[[Any], Any] | None = None  # columns of the newest pass's outputs
        self._pass = ExitStack()  # gates of the newest pass: they stay for its backward pass, which may recompute
        if model is not None:
            self.attach(model)

    def attach(self, model: nn.Module) -> None:
        """Put gates on the model, and the schedules into its config; the callback does so when training begins."""
        if model is self.model:
            return
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
        before = self.current
        if not isinstance(schedule, Schedule) and schedule not in self.schedules:
            raise UsageError(f"there is no speed {schedule}: give one of {', '.join(map(speedup_key, self.schedules))}")
        self.current = schedule if isinstance(schedule, Schedule) else self.schedules[schedule]
        try:
            yield
        finally:
            self._pass.close()
            self.current = before

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Attach to the trainer's model. Raises UsageError for packed rows and for DataParallel."""
        if getattr(args, "packing", False) or getattr(args, "padding_free", False):
            raise UsageError("packed rows hold several texts, each with depths of its own: packing=False")
        if getattr(args, "n_gpu", 1) > 1:
            raise UsageError("DataParallel's copies share one model's gates: launch a process per GPU")
        self.attach(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a step."""
        self.current = self.drawn(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step."""
        self._pass.close()
        self.current = None

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.current is None:
            return None
        prompt_length = kwargs.pop("prompt_length", None)
        self._restore = None
        if prompt_length is None:  # else a Collator has aligned the prompts
            kwargs, prompt_length, self._restore = align(kwargs)
        self._pass.close()
        self._pass.enter_context(teacher_forced(model, self.current, prompt_length))
        return args, kwargs

    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        return self._restore(output) if self.current and self._restore else None


def align(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], int, Callable[[Any], Any]]:
    """Inputs whose rows are rolled so that all prompts end in one column, that column, and the way back for outputs.

    Args:
        inputs: the model's: ``input_ids`` and ``labels`` (batch, width), maybe ``attention_mask`` and others.

    Raises:
        UsageError: there are no labels, or a row has several responses.
        CacheError: a row holds several texts.
    """
    refuse_packed(inputs)
    ids, labels = inputs["input_ids"], inputs.get("labels")
    if labels is None or labels.shape != ids.shape:
        raise UsageError("a training pass needs labels of the ids' shape, to show where prompts end")
    for name in ("logits_to_keep", "output_attentions", "output_hidden_states"):
        if inputs.get(name):
            raise UsageError(f"{name} cannot be given: rows are rolled for the pass")
    learned = (labels != -100).int()
    if not learned.any():
        raise UsageError("no row of the batch has a label: there is nothing to learn")
    if (pad(learned, (1, 0)).diff().eq(1).sum(1) > 1).any():
        raise UsageError("a row has labels in several places: it holds one prompt and one response")
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask.long()
    width = ids.shape[1]
    end = width - mask.flip(1).argmax(1)
    first = torch.where(learned.any(1), learned.argmax(1), end)
    first = torch.maximum(first, mask.argmax(1) + 1)  # no logits predict a text's first token
    prompt_length = int(first.max())
    shifts = (prompt_length - first).tolist()
    wider = max(prompt_length + int((end - first).max()) - width, 0)

    rolled = {**inputs, "attention_mask": mask}
    for name, value in rolled.items():
        if isinstance(value, Tensor) and value.shape == ids.shape:
            rolled[name] = roll_rows(pad(value, (0, wider), value=-100 if name == "labels" else 0), shifts)
    rolled["position_ids"] = (rolled["attention_mask"].cumsum(1) - 1).clamp(min=0)

    def restore(output: Any) -> Any:
        for name, value in output.items():
            if isinstance(value, Tensor) and value.ndim > 1 and len(value) == len(shifts):
                missing = width + wider - value.shape[1]  # 1: one per predicted token, none for the last column
                if missing in (0, 1):
                    output[name] = roll_rows(value, [-shift for shift in shifts])[:, : width - missing]
        return output

    return rolled, prompt_length, restore


def roll_rows(rows: Tensor, shifts: Sequence[int]) -> Tensor:
    """Each row of ``rows`` (batch, width, …) rolled right by its number of columns."""
    return torch.stack([row.roll(shift, 0) for row, shift in zip(rows, shifts, strict=True)])
