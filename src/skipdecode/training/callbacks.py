"""What happens around training steps: the bar, the seeds, and what is refused before the first of them."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, set_seed
from transformers.trainer_callback import ProgressCallback

from ..errors import FileError, JobError
from .checkpoints import RunFolder
from .sampler import draw


class TrainingBar(ProgressCallback):
    """One bar with the loss and the tokens per second."""

    training_bar: Any

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Loss and rate go beside the bar, everything else (evaluation) on a line of its own."""
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix_str(f"loss {logs['loss']:.4f}, {logs['tokens_per_second']:,.0f} tokens/s")
        else:
            super().on_log(args, state, control, logs=logs, **kwargs)

    def close(self) -> None:
        """Ends the bar's line, whatever ended the training."""
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None


class StepSeed(TrainerCallback):
    """Seeds all generators at the start of each optimizer step, so that dropout is a function of seed and step.

    transformers brings back a checkpoint's random state, but evaluation draws from it too, at steps that may be others
    in the resumed run.
    """

    def __init__(self, process: int = 0) -> None:
        self.process = process

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called before the first batch of a step."""
        set_seed(draw("step", args.seed, state.global_step, self.process))


class Steps(TrainerCallback):
    """Says before the first step what stands against the last one."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called when the number of steps is known."""
        if state.global_step > state.max_steps:
            raise JobError(
                f"{args.output_dir} holds a checkpoint of step {state.global_step}, past the {state.max_steps} asked "
                "for: give another --output, or --no-resume to drop it"
            )
        path = self.folder.foreign(state.max_steps)
        if path is not None:
            raise FileError(f"{path} is not this run's: move it away, or give another --output")
