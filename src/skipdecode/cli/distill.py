"""``skipdecode distill``: learn an adapter from self-generated texts."""

from pathlib import Path
from typing import Annotated, Any

from typer import Context, Option

from . import options as o
from .console import say


def distill(
    context: Context,
    model: o.Model,
    speedups: o.Speedups = None,
    output: Annotated[Path, Option(help="Folder for the adapter, its texts and checkpoints.")] = Path("fast"),
    prompts: o.Prompts = None,
    eval_prompts: Annotated[Path | None, Option(help="Prompts like your users', to measure on as well.")] = None,
    num_texts: Annotated[int | None, Option(min=20, help="Self-generated texts; default: 4000.")] = None,
    adapter: o.Adapter = None,
    rank: o.Rank = 256,
    lora_rank: o.LoRARank = 0,
    max_new_tokens: o.MaxNewTokens = None,
    temperature: o.Temperature = None,
    engine: o.Engine = "transformers",
    speedup_weights: o.SpeedupWeights = None,
    bottom_layers: o.BottomLayers = None,
    max_steps: o.MaxSteps = None,
    num_train_epochs: o.Epochs = None,
    batch_size: o.TrainBatchSize = None,
    learning_rate: o.LearningRate = None,
    save_steps: o.SaveSteps = None,
    bf16: o.Bf16 = None,
    seed: o.Seed = 0,
    config: o.Config = None,
    overwrite: o.Overwrite = False,
) -> None:
    """Learn an adapter from self-generated texts; the model stays as it is. The same command resumes.

    skipdecode distill HuggingFaceTB/SmolLM2-135M-Instruct --speedups 1.5,2 --output fast
    """
    from ..training.config import DistillConfig
    from ..training.distill import distill as run

    run(DistillConfig.create(**given(context)), overwrite=overwrite, say=say)


def given(context: Context) -> dict[str, Any]:
    """Options that the user gave; the others are the file's or the configuration's defaults."""
    options = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in context.params.items()
        if name != "overwrite" and getattr(context.get_parameter_source(name), "name", None) != "DEFAULT"
    }
    return options | {"file": options.pop("config", None)}
