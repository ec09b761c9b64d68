"""Fine-tuning with the schedule on: the code behind ``skipdecode train``."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset
from safetensors.torch import save_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.collator import Collator, encoded
from ..data.examples import merge_references, read_examples, split_references
from ..data.tasks import Example, Task, get_task
from ..errors import DataError, FileError, ModelError, UsageError
from ..generation.batches import max_positions
from ..hub.custom_generate import write_custom_generate
from ..loading.load import Checkpoint
from ..model.config import config_schedules, num_layers, set_entry, to_config_entry, trained_method
from ..schedule import Schedule, choose_schedule
from .config import TrainConfig, claim_output
from .losses import Distillation, ExitLoss, Objective
from .self_generated import Say, log
from .trainer import SkipTrainer, TextCollator


def train(config: TrainConfig, *, overwrite: bool = False, say: Say = log) -> None:
    """Fine-tune all weights with the schedule on, and save a stock model whose config holds the schedules.

    A killed run resumes from its newest checkpoint in ``config.output``, and ends with the weights of an unbroken run;
    with ``overwrite`` it starts anew. ``say`` receives messages for the user.

    Raises:
        SkipDecodeError: options, model, data or output folder do not fit.
        DivergedError: the loss is not finite; earlier checkpoints stay.
    """
    checkpoint = Checkpoint.resolve(config.model)
    if checkpoint.adapter is not None:
        raise UsageError(f"{config.model} is an adapter: train its model, or distill")
    task = get_task(config.task, config.prompt_column, config.response_column, config.prompt_share)
    learned = split_references(read_examples(config.data, task, "train"))
    args = config.arguments()
    held_out = [] if args.eval_strategy == "no" else read_validation(config, task, say)
    last = claim_output(config, checkpoint.fingerprint, overwrite)
    model = checkpoint.load(dtype="float32", device="cpu", attn_implementation=config.attn_implementation)
    tokenizer = checkpoint.tokenizer
    check_saving(model, tokenizer)
    schedules = choose_schedules(config, model.config)
    set_entry(model.config, to_config_entry(schedules, config.method))
    trainer = SkipTrainer(
        model=model,
        args=args,
        schedules=schedules,
        weights=config.speedup_weights,
        objective=make_objective(config, model),
        **trainer_data(model, tokenizer, learned, held_out, say),
    )
    run(trainer, last, say)
    model.config.use_cache = True  # the Trainer turns it off
    if trainer.is_world_process_zero():
        save(model, tokenizer, Path(config.output))
        say(f"saved to {config.output}")


def read_validation(config: TrainConfig, task: Task, say: Say) -> list[Example]:
    """At most ``max_eval_samples`` validation examples; none if the data is one file, or has no such split."""
    if Path(config.data).is_file():
        return []
    try:
        return merge_references(read_examples(config.data, task, "validation"))[: config.max_eval_samples]
    except DataError as error:
        say(f"nothing is evaluated: {error}")
        return []


def choose_schedules(config: TrainConfig, model_config: Any) -> dict[float, Schedule]:
    """Schedules to train for: those the model was trained for, unless the user chose others; else new ones."""
    style = config.style | ({"order": "bottom"} if config.method == "multi_exit" else {})
    known = config_schedules(model_config)  # raises for a damaged entry, whatever the method
    trained = known if trained_method(model_config) == config.method else {}
    layers = num_layers(model_config)
    return {speedup: choose_schedule(trained, layers, speedup, **style) for speedup in config.speedups}


def make_objective(config: TrainConfig, model: PreTrainedModel) -> Objective:
    """Loss that the run minimises. Raises UsageError if the teacher has another vocabulary."""
    if config.method == "multi_exit":
        return ExitLoss(model, config.exit_share)
    if not config.distill_weight:
        return Objective()
    if config.teacher is None:
        return Distillation(config.distill_weight)
    teacher = Checkpoint.resolve(config.teacher)
    sizes = {each.get_text_config(decoder=True).vocab_size for each in (model.config, teacher.config)}
    if len(sizes) > 1:
        raise UsageError(f"{config.teacher} has another vocabulary than the model: its logits cannot be learned from")
    return Distillation(config.distill_weight, teacher.load(dtype="float32", device="cpu"))


def check_saving(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError if transformers would refuse to save what goes with the weights."""
    try:
        model.generation_config.validate(strict=True)  # what the Trainer changes is saved only if this holds
        with TemporaryDirectory() as folder:
            model.config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except Exception as error:  # of transformers, or of a tokenizer's own code
        raise ModelError(f"the trained model could not be saved: {' '.join(str(error).split())}") from error


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save model and tokenizer. If that fails, the weights alone go into ``folder/recovery``, and FileError says so."""
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_custom_generate(folder)
    except Exception as error:  # whatever it is, the weights must not be lost
        (folder / "recovery").mkdir(exist_ok=True)
        save_model(model, str(folder / "recovery" / "model.safetensors"))
        raise FileError(f"saving failed ({error}): the trained weights are in {folder / 'recovery'}") from error


def trainer_data(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    learned: Sequence[Example],
    held_out: Sequence[Example],
    say: Say,
    *,
    as_written: bool = False,
) -> dict[str, Any]:
    """The Trainer's arguments for examples to learn from and to evaluate with; ``as_written``: by the model itself.

    Examples longer than the model's positions are left out. Raises DataError if none is left.
    """
    limit = max_positions(model.config) or sys.maxsize

    def encode(examples: Sequence[Example]) -> Dataset:
        rows = encoded(examples, tokenizer, limit, as_written=as_written)
        if not rows:
            raise DataError(f"no example fits the model's {limit} positions")
        if len(rows) < len(examples):
            say(f"{len(examples) - len(rows):,} examples are left out: over {limit:,} tokens, the model's positions")
        return Dataset.from_list(rows)

    return {
        "processing_class": tokenizer,
        "data_collator": (TextCollator if as_written else Collator)(tokenizer.pad_token_id, max_length=limit),
        "train_dataset": encode(learned),
        "eval_dataset": encode(held_out) if held_out else None,
    }


def run(trainer: SkipTrainer, last: Path | None, say: Say) -> None:
    """Train from checkpoint ``last``, or from the start; raise a signal again that stopped the run."""
    if last is not None:
        say(f"resuming from {last}")
    with trainer.stop:
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    if trainer.stop.number is not None:
        signal.raise_signal(trainer.stop.number)
        raise KeyboardInterrupt
