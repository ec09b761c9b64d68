"""Trainer callbacks: a progress bar, a seed per step, and a checkpoint when a signal stops the run."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback, set_seed
from transformers.trainer_callback import ProgressCallback

from .sampler import draw


class TrainingBar(ProgressCallback):
    """transformers' progress bar, with losses, tokens per second and the time left on standard error."""

    training_bar: Any

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the bar, whose time left is estimated from the mean of all steps, as steps differ."""
        super().on_train_begin(args, state, control, **kwargs)
        self.current_step = state.global_step
        if self.training_bar is not None:
            self.training_bar.smoothing = 0
            self.training_bar.initial = self.training_bar.n = self.current_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the losses and the tokens per second in ``logs``."""
        if self.training_bar is not None:
            shown = [
                f"{name} {value:.4g}" for name, value in logs.items() if name.endswith(("loss", "tokens_per_second"))
            ]
            self.training_bar.write(f"step {state.global_step:,}: {', '.join(shown)}", file=sys.stderr)

    def close(self) -> None:
        """Close the bar, also after an error."""
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None


class StepSeed(TrainerCallback):
    """Seeds all generators at the start of each optimizer step, so that dropout depends on seed and step alone.

    A checkpoint's random state is not enough: evaluation draws from it too, maybe at other steps in a resumed run.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate and save as often as this run says: a checkpoint's state has what the run before it said."""
        state.compute_steps(args, state.max_steps)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seed all random generators from the run's seed, the step and the process."""
        set_seed(draw("step", args.seed, state.global_step, args.process_index))


class StopBySignal(TrainerCallback):
    """Context manager in which SIGINT or SIGTERM ends training with a checkpoint after the current step.

    It then raises the signal again on exit, for the previous handler; if that raises nothing, KeyboardInterrupt.
    A second signal goes to the previous handler at once.
    """

    def __init__(self, accelerator: Accelerator, say: Callable[[str], object]) -> None:
        self.accelerator = accelerator
        self.say = say
        self.number = 0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> StopBySignal:
        if threading.current_thread() is threading.main_thread():
            numbers = (signal.SIGINT, signal.SIGTERM)
            self.before = {number: signal.signal(number, self._stop) for number in numbers}
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._restore()
        if self.number and kind is None:
            signal.raise_signal(self.number)
            raise KeyboardInterrupt

    def _stop(self, number: int, _: object) -> None:
        if self.number:
            self._restore()
            signal.raise_signal(number)
        self.number = number
        self.say("stopping with a checkpoint after this step (once more: at once, without)")

    def _restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop all processes after the same step, whichever of them got the signal."""
        if self.accelerator.num_processes > 1:
            number = torch.tensor([self.number], device=self.accelerator.device)
            self.number = int(self.accelerator.gather(number).max())
        if self.number:
            control.should_save = control.should_training_stop = True
