"""``skipdecode distill``: learn an adapter from self-generated texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from . import options as o
from .console import say


def distill(
    model: o.Model,
    speedups: o.Speedups = None,
    output: Annotated[Path, Option(help="Folder for the adapter, its texts and checkpoints.")] = Path("fast"),
    prompts: o.Prompts = None,
    num_texts: Annotated[int | None, Option(min=20, help="Self-generated texts; default: 4000.")] = None,
    adapter: o.Adapter = None,
    rank: o.Rank = 256,
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
    bf16: o.Bf16 = False,
    seed: o.Seed = 0,
    config: o.Config = None,
    overwrite: o.Overwrite = False,
) -> None:
    """Learn an adapter from self-generated texts; the model stays as it is. The same command resumes.

    skipdecode distill HuggingFaceTB/SmolLM2-135M-Instruct --speedups 1.5,2 --output fast
    """
    options = locals()
    from ..training.config import DistillConfig
    from ..training.distill import distill as run

    run(DistillConfig.create(**chosen(options)), overwrite=overwrite, say=say)


def chosen(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given, by the configuration's names; the others stay the file's or the defaults."""
    import click

    context = click.get_current_context()
    given = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in options.items()
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }
    given.pop("overwrite", None)
    return given | {"file": given.pop("config", None)}
