"""``skipdecode train``."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from ..errors import ScheduleError, UsageError
from ..files import read_json
from ..training.checkpoints import run_folder
from .console import parse_numbers, parse_speedups, say

#: More of anything than a run can mean; less than what hangs or exhausts the memory.
MANY = 1_000_000
#: Decode steps of one batch; to fit a schedule takes a millisecond or two for each.
LONGEST = 100_000


def train(
    model: Annotated[str | None, Argument(help="Directory, hub name or 'demo'; leave out with --from-config.")] = None,
    output: Annotated[Path, Option(help="Where the trained checkpoint goes.")] = Path("trained"),
    data: Annotated[
        Path, Option(help="Folder with the task's files, or one JSONL/CSV with prompt and response.")
    ] = Path("."),
    task: Annotated[str, Option(help="e2e, reddit_tldr, cnn_dm, or jsonl for any data.")] = "jsonl",
    words: Annotated[int | None, Option(min=1, max=MANY, help="Summaries: cut a source after so many words.")] = None,
    method: Annotated[
        str, Option(help="skipdecode, or a baseline: full, multi_exit, calm, unified, d3, hsd, static, scratch.")
    ] = "skipdecode",
    speedup: Annotated[float | None, Option(help="Train for this one target speed-up.")] = None,
    speedups: Annotated[
        str | None, Option(help="Train one checkpoint for several, e.g. 1,2,3,4,5: one is drawn per step.")
    ] = None,
    weights: Annotated[
        str | None, Option(help="With --speedups: how often each is drawn, e.g. 2,1,1,1,3 (default: equally).")
    ] = None,
    distill: Annotated[
        float, Option(min=0, max=1, help="Weight of distillation from full depth in the loss; 0: none.")
    ] = 0.0,
    distill_on: Annotated[str, Option(help="What is distilled: logits or hidden (the last hidden states).")] = "logits",
    teacher: Annotated[
        str | None, Option(help="Distil from this model (default: from the trained one itself at full depth).")
    ] = None,
    schedule: Annotated[
        Path | None, Option(help="Train for the schedule in this JSON file (--speedup: the name it gets).")
    ] = None,
    horizon: Annotated[
        int | None,
        Option(
            min=1,
            max=MANY,
            help="Generated tokens over which the depth falls by the paper's budgets (default: fit to the data).",
        ),
    ] = None,
    lengths: Annotated[
        str | None, Option(help="Fit to batches of so many decode steps, as calibrate prints them, e.g. 39,36,32.")
    ] = None,
    order: Annotated[
        str | None,
        Option(help="Layer order: top (the default), bottom, even, or a schedule's JSON file to take it from."),
    ] = None,
    decay: Annotated[
        str | None,
        Option(help="Shape of the fall: linear (the default), cosine, exponential, power, step, constant."),
    ] = None,
    from_config: Annotated[Path | None, Option(help="Train from scratch: a transformers config.json.")] = None,
    tokenizer: Annotated[
        str | None, Option(help="With --from-config: take this tokenizer; else BPE is trained on the data.")
    ] = None,
    epochs: Annotated[float, Option(min=0, max=MANY, help="Passes over the data.")] = 3.0,
    max_steps: Annotated[
        int | None, Option(min=1, max=10**9, help="Stop after so many optimizer steps instead.")
    ] = None,
    batch_size: Annotated[int, Option(min=1, max=MANY, help="Rows per process and step.")] = 32,
    accumulation: Annotated[int, Option(min=1, max=MANY, help="Batches per optimizer step.")] = 1,
    learning_rate: Annotated[float, Option(min=0, help="Peak learning rate of AdamW.")] = 5e-5,
    scheduler: Annotated[str, Option(help="Learning-rate schedule, as transformers names it.")] = "cosine",
    warmup_steps: Annotated[
        float, Option(min=0, help="Warm-up steps of the learning rate; below 1, a share of all steps.")
    ] = 0.03,
    weight_decay: Annotated[float, Option(min=0, help="AdamW's weight decay.")] = 0.01,
    adam_beta2: Annotated[float, Option(min=0, max=1, help="AdamW's second beta.")] = 0.999,
    lora: Annotated[int, Option(min=0, help="Rank of LoRA adapters, merged at the end; 0 trains all weights.")] = 0,
    bf16: Annotated[bool, Option("--bf16", help="bfloat16 autocast.")] = False,
    checkpointing: Annotated[
        bool, Option("--checkpointing", help="Gradient checkpointing: less memory, more time.")
    ] = False,
    attention: Annotated[
        str | None, Option(help="eager, sdpa, …; eager trains faster on CPUs at short lengths.")
    ] = None,
    rows: Annotated[int | None, Option(min=1, help="Use only the first so many training rows.")] = None,
    eval_steps: Annotated[int, Option(min=0, help="Evaluate every so many steps; 0: never.")] = 500,
    eval_rows: Annotated[int, Option(min=0, help="Validation inputs used for loss and score.")] = 100,
    save_steps: Annotated[int, Option(min=1, help="Write a checkpoint to resume from every so many steps.")] = 500,
    seed: Annotated[int, Option(min=0, help="Seed of weights, data order and budgets.")] = 0,
    fresh: Annotated[
        bool, Option("--fresh", help="Start anew although OUTPUT holds a checkpoint to resume from.")
    ] = False,
) -> None:
    """Train a model with the schedule on. Started again after a kill, it goes on where it was.

    The result is a stock Hugging Face directory whose config carries the schedule.

    skipdecode train facebook/opt-1.3b --task e2e --data e2e --speedup 5 --output opt-e2e-5x
    """
    from ..core.schedule import Schedule
    from ..data.tasks import get_task
    from ..methods import get_method

    if (model is None) == (from_config is None):
        raise UsageError("give either MODEL or --from-config")
    if speedups and (speedup is not None or schedule):
        raise UsageError("give one of --speedup, --speedups and --schedule")
    if epochs == 0 or adam_beta2 == 1:
        raise UsageError("--epochs must be above 0, and --adam-beta2 below 1")
    form: dict[str, Any] = {}  # only what was asked for: a model that brings schedules keeps them otherwise
    if order is not None:
        form["order"] = _schedule(Path(order)).order if Path(order).is_file() else order
    if decay is not None:
        form["decay"] = decay
    if (schedule or horizon or form) and method != "skipdecode":
        raise UsageError("--schedule, --horizon, --order and --decay are SkipDecode's: other methods have own rules")
    if (teacher or distill_on != "logits") and not distill:
        raise UsageError("--teacher and --distill-on go with --distill")
    if distill and method in ("multi_exit", "calm"):
        raise UsageError(f"{method} has a loss of its own: --distill does not go with it")
    if distill and not teacher and method in ("full", "static", "scratch"):
        raise UsageError(f"{method} always runs all layers it has: to distil, give it a --teacher")
    the_method = get_method(method)
    wanted = parse_speedups(speedups or f"{2 if speedup is None else speedup:g}")
    shares = parse_numbers(weights) if weights else None
    if shares and (len(shares) != len(wanted) or min(shares) < 0 or not 0 < sum(shares) < math.inf):
        raise UsageError(f"--weights needs a number for each of {len(wanted)} speed-ups, not all of them 0")
    if shares and method in ("multi_exit", "calm"):
        raise UsageError(f"{method} trains all exits in every step: --weights does not go with it")
    if not the_method.one_checkpoint_for_all and len(wanted) > 1:
        raise UsageError(f"{method} makes a model per budget: give --speedup")
    fixed = _schedule(schedule) if schedule else None
    steps = _lengths(lengths) if lengths else []
    the_task = get_task(task, max_source_words=words)
    training = the_task.read(data, "train")[:rows]
    validation = the_task.read(data, "validation")[:eval_rows]
    if not training:
        raise UsageError(f"{data} holds no training rows")

    import torch
    from transformers import SchedulerType

    from ..core import checkpoint_config
    from ..core.fitting import batch_lengths, fit
    from ..data.tokenization import encode_response
    from ..generation import loading
    from ..methods.objectives import Distillation
    from ..provenance import fingerprint, identity
    from ..training.trainer import arguments, checkpointing_option
    from ..training.trainer import train as run

    with run_folder(output, model) as folder:
        if folder.finished:
            say(f"{output}: a save that a kill had cut short was finished")
            if model is not None and folder.is_folder_of(model):
                return say(f"{output} holds the trained model; start again to train that one further")
        # What is wrong shows before any weights are loaded.
        config = loading.read_config(str(model)) if from_config is None else loading.new_config(from_config)
        layers = config.get_text_config(decoder=True).num_hidden_layers
        for k in wanted:
            Schedule.for_speedup(k, layers, horizon or 64, **form)
        if scheduler not in set(SchedulerType):
            raise UsageError(f"--scheduler is one of {', '.join(SchedulerType)}, not {scheduler!r}")
        if distill:
            Distillation(distill, distill_on)
        if lora > config.get_text_config(decoder=True).hidden_size:
            raise UsageError(f"--lora {lora} is more than the model's hidden size")
        if fixed is not None and fixed.num_layers != layers:
            raise UsageError(f"{schedule} is for {fixed.num_layers} layers, the model has {layers}")

        every: dict[str, Any] = (
            {"eval_strategy": "steps", "eval_steps": eval_steps} if eval_steps and validation else {}
        )
        if not every:
            say("no validation data, or --eval-steps 0: nothing will be evaluated")
        settings = arguments(
            output_dir=str(output),
            num_train_epochs=epochs,
            max_steps=max_steps or -1,
            per_device_train_batch_size=batch_size,
            per_device_eval_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            learning_rate=learning_rate,
            lr_scheduler_type=scheduler,
            warmup_steps=warmup_steps,
            weight_decay=weight_decay,
            adam_beta2=adam_beta2,
            use_cpu=not torch.accelerator.is_available(),
            bf16=bf16,
            **checkpointing_option(checkpointing),
            save_steps=save_steps,
            logging_steps=20,
            seed=seed,
            **every,
        )

        if from_config is not None:
            texts = [f"{example.prompt} {example.references[0]}" for example in training]
            network, tokens = loading.from_config(from_config, texts, tokenizer, attention, seed)
        else:
            # In float32 whatever the checkpoint holds (--bf16 casts products, not weights); the Trainer moves it.
            network, tokens = loading.load(str(model), dtype="float32", device="cpu", attention=attention)
        vocabulary = fingerprint(*_vocabulary(tokens))
        known = (
            checkpoint_config.trained_schedules(network.config)
            if checkpoint_config.trained_method(network.config) == method
            else {}
        )
        if fixed is not None:
            schedules = {fixed.target if speedup is None else speedup: fixed}
        elif horizon is not None:
            schedules = {k: Schedule.for_speedup(k, layers, horizon, **form) for k in wanted}
        elif not lengths and not form and all(k in known for k in wanted):
            schedules = {k: known[k] for k in wanted}
            say(f"{model} brings schedules for these speed-ups: they stay as they are (--lengths fits new ones)")
        else:
            if not steps:
                responses = encode_response(tokens, [(e.prompt, e.references[0]) for e in training[:5000]])
                steps = batch_lengths([min(len(ids), the_task.max_new_tokens) for ids in responses], batch_size)
            schedules = {
                k: fit(layers, k, steps, **form) if form else the_method.schedule(layers, k, steps) for k in wanted
            }
        record = {
            "model": fingerprint(identity(loading.resolve(str(model))) if from_config is None else config.to_dict()),
            "tokenizer": vocabulary,
            "data": fingerprint(*map(asdict, training)),
            "method": method,
            "budgets": {f"{k:g}": plan.to_dict() for k, plan in schedules.items()},
            "weights": shares and list(shares),
            "distillation": [distill, distill_on, teacher and fingerprint(identity(loading.resolve(teacher)))],
            "batch": [batch_size, accumulation, settings.world_size],
            "learning_rate": [learning_rate, scheduler, warmup_steps],
            "optimizer": [weight_decay, adam_beta2],
            "lora": lora,
            "bf16": bf16,
            "attention": attention,
            "seed": seed,
        }
        torch.manual_seed(seed)
        network = the_method.prepare(network, wanted[0])
        objective = the_method.objective(network, schedules)
        if distill:
            taught = loading.load(teacher, dtype="float32", device="cpu")[0] if teacher else None
            ours, theirs = ((m or network).config.get_text_config(decoder=True) for m in (network, taught))
            if theirs.vocab_size != ours.vocab_size:
                raise UsageError(f"{teacher} has another vocabulary than the model: its logits cannot be learned from")
            if distill_on == "hidden" and theirs.hidden_size != ours.hidden_size:
                raise UsageError(f"{teacher} has hidden states of another width than the model: distil its logits")
            objective = Distillation(distill, distill_on, taught)
        resume = None if fresh else folder.newest(record, say)
        if resume:
            say(f"going on from {resume}")
        run(
            network.train(),
            tokens,
            schedules,
            settings,
            the_task,
            training,
            validation,
            method=method,
            objective=objective,
            weights=shares,
            lora_rank=lora,
            resume=resume,
            record=record,
        )
        say(f"saved to {output}")


def _schedule(path: Path) -> Any:
    """The schedule in a file, which an error names."""
    from ..core.schedule import Schedule

    try:
        return Schedule.from_dict(read_json(path))
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None


def _lengths(text: str) -> list[int]:
    """Decode steps of batches. Raises UsageError."""
    values = parse_numbers(text)
    if not all(1 <= value <= LONGEST and value == int(value) for value in values):
        raise UsageError(f"--lengths are whole numbers of decode steps, 1 to {LONGEST}, not {text[:100]!r}")
    return [int(value) for value in values]


def _vocabulary(tokenizer: Any) -> list[Any]:
    """What decides which ids a text has."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    words = tokenizer.get_vocab() if fast is None else fast.to_str()
    return [type(tokenizer).__name__, tokenizer.special_tokens_map, words]
