"""``skipdecode train``: fine-tune a model with the schedule on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from . import options as o
from .console import say

DATA, LAYERS, TRAINER = "Data", "Speeds and layers", "Trainer"

# --- options that distill has too
Task = Annotated[
    str | None, Option(help="Prompt format of a data set: e2e, reddit_tldr or cnn_dm.", rich_help_panel=DATA)
]
Speedups = Annotated[str | None, Option(help="Speeds with commas between: 1,2,3.")]
Weights = Annotated[str | None, Option(help="How often or how much each speed is trained.", rich_help_panel=LAYERS)]
Order = Annotated[str | None, Option(help="Layers kept: top, bottom, even, or a ranking.", rich_help_panel=LAYERS)]
Warmup = Annotated[int | None, Option(min=0, help="Bottom layers always kept.", rich_help_panel=LAYERS)]
Config = Annotated[Path | None, Option(help="YAML file of options, those of TrainingArguments too.")]
MaxSteps = Annotated[int | None, Option(min=1, help="Optimizer steps, in place of epochs.", rich_help_panel=TRAINER)]
Epochs = Annotated[float | None, Option(min=0, help="Passes over the data; default 3.", rich_help_panel=TRAINER)]
BatchSize = Annotated[int | None, Option(min=1, help="Examples per process and batch.", rich_help_panel=TRAINER)]
Accumulation = Annotated[int | None, Option(min=1, help="Batches per optimizer step.", rich_help_panel=TRAINER)]
Rate = Annotated[float | None, Option(min=0, help="Peak learning rate.", rich_help_panel=TRAINER)]
SaveSteps = Annotated[int | None, Option(min=1, help="Steps between checkpoints.", rich_help_panel=TRAINER)]
EvalSteps = Annotated[int | None, Option(min=0, help="Steps between evaluations; 0: none.", rich_help_panel=TRAINER)]
Bf16 = Annotated[bool | None, Option("--bf16", help="Compute in bfloat16.", rich_help_panel=TRAINER)]
Seed = Annotated[int | None, Option(help="Random seed.", rich_help_panel=TRAINER)]


def train(
    model: o.Model,
    data: Annotated[str | None, Option(help="Rows with responses: folder, file, or Hub data set.")] = None,
    speedups: Speedups = None,
    output: Annotated[str | None, Option(help="Folder for the model and checkpoints; default: trained.")] = None,
    config: Config = None,
    overwrite: o.Overwrite = False,
    task: Task = None,
    prompt_column: Annotated[str | None, Option(help="Column of the prompts.", rich_help_panel=DATA)] = None,
    response_column: Annotated[str | None, Option(help="Column of the responses.", rich_help_panel=DATA)] = None,
    method: Annotated[
        Literal["skipdecode", "multi_exit"] | None,
        Option(help="SkipDecode, or the baseline multi-layer exit.", rich_help_panel=LAYERS),
    ] = None,
    speedup_weights: Weights = None,
    order: Order = None,
    warmup_layers: Warmup = None,
    decay: Annotated[
        str | None, Option(help="Fall of the depth: constant, linear, cosine, …", rich_help_panel=LAYERS)
    ] = None,
    horizon: Annotated[
        int | None, Option(min=1, help="Steps of the fall; default: fitted.", rich_help_panel=LAYERS)
    ] = None,
    prompt_layers: Annotated[
        str | None, Option(help="Layers of the prompt: number or max.", rich_help_panel=LAYERS)
    ] = None,
    distill_weight: Annotated[float | None, Option(min=0, max=1, help="Weight of the KL divergence from 1x.")] = None,
    teacher: Annotated[str | None, Option(help="Model to distil from, in place of 1x.")] = None,
    max_steps: MaxSteps = None,
    num_train_epochs: Epochs = None,
    batch_size: BatchSize = None,
    gradient_accumulation_steps: Accumulation = None,
    learning_rate: Rate = None,
    warmup_steps: Annotated[
        float | None, Option(min=0, help="Warm-up steps, or their share.", rich_help_panel=TRAINER)
    ] = None,
    save_steps: SaveSteps = None,
    eval_steps: EvalSteps = None,
    bf16: Bf16 = None,
    seed: Seed = None,
    report_to: Annotated[str | None, Option(help="Tracker: tensorboard, wandb, …", rich_help_panel=TRAINER)] = None,
) -> None:
    """Fine-tune all weights with layers skipped. The same command resumes a killed run.

    skipdecode train facebook/opt-1.3b --task e2e --data e2e --speedups 1,2,5 --output opt-e2e
    """
    options = dict(locals())
    from ..training.config import TrainConfig
    from ..training.train import train as run

    run(TrainConfig.create(**given(options)), overwrite=overwrite, say=say)


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Options that the user gave, as ``create`` takes them."""
    values = {name: value for name, value in options.items() if value is not None and name != "overwrite"}
    return values | {"file": values.pop("config", None)}
