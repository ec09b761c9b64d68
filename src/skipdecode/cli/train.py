"""``skipdecode train``: fine-tune all weights with the schedule on."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Context, Option

from . import options as o
from .console import say
from .distill import given


def train(
    context: Context,
    model: o.Model,
    data: o.Data = Path("."),
    task: o.Task = "jsonl",
    speedups: o.Speedups = None,
    output: Annotated[Path, Option(help="Folder for the checkpoint.")] = Path("trained"),
    method: Annotated[
        Literal["skipdecode", "multi_exit"], Option(help="SkipDecode, or the baseline multi-layer exit.")
    ] = "skipdecode",
    speedup_weights: o.SpeedupWeights = None,
    order: Annotated[str | None, Option(help="Layers kept: top, bottom, even, or a ranking of all.")] = None,
    bottom_layers: o.BottomLayers = None,
    decay: Annotated[str, Option(help="Fall of the depth: constant, linear, cosine, exponential, power, step.")] = (
        "constant"
    ),
    horizon: Annotated[int | None, Option(min=1, help="Tokens over which the depth falls, with --decay.")] = None,
    prompt_layers: o.PromptLayers = None,
    distill_weight: Annotated[float, Option(min=0, max=1, help="Weight of the KL divergence from the teacher.")] = 0.0,
    teacher: Annotated[str | None, Option(help="Model to distil from; default: this one at 1x.")] = None,
    max_steps: o.MaxSteps = None,
    num_train_epochs: o.Epochs = None,
    batch_size: o.TrainBatchSize = None,
    learning_rate: o.LearningRate = None,
    save_steps: o.SaveSteps = None,
    eval_steps: Annotated[int | None, Option(min=0, help="Steps between evaluations; 0 is never.")] = None,
    bf16: o.Bf16 = None,
    seed: o.Seed = 0,
    config: o.Config = None,
    overwrite: o.Overwrite = False,
) -> None:
    """Fine-tune all weights with layers skipped. The same command resumes.

    skipdecode train facebook/opt-1.3b --task e2e --data e2e --speedups 1,2,5 --output opt-e2e
    """
    from ..training.config import TrainConfig
    from ..training.train import train as run

    run(TrainConfig.create(**given(context)), overwrite=overwrite, say=say)
