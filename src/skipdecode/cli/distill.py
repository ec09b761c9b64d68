"""``skipdecode distill``: learn an adapter from texts that the model writes itself."""

from __future__ import annotations

from typing import Annotated, Literal

from typer import Option

from . import options as o
from . import train as t
from .console import say

TEXTS = "Self-generated texts"


def distill(
    model: o.Model,
    speedups: t.Speedups = None,
    output: Annotated[str | None, Option(help="Folder for the adapter and checkpoints; default: fast.")] = None,
    config: t.Config = None,
    overwrite: o.Overwrite = False,
    prompts: Annotated[
        str | None, Option(help="File of prompts; default: the model's own.", rich_help_panel=TEXTS)
    ] = None,
    task: t.Task = None,
    num_texts: Annotated[
        int | None, Option(min=20, help="Texts to write; default 4000.", rich_help_panel=TEXTS)
    ] = None,
    max_new_tokens: Annotated[int | None, Option(min=2, help="Longest text, in tokens.", rich_help_panel=TEXTS)] = None,
    temperature: Annotated[float | None, Option(min=1e-6, help="Sampling temperature.", rich_help_panel=TEXTS)] = None,
    engine: Annotated[
        Literal["transformers", "vllm"] | None, Option(help="Library that writes the texts.", rich_help_panel=TEXTS)
    ] = None,
    adapter: Annotated[str | None, Option(help="Begin with this adapter's layers and weights.")] = None,
    adapter_rank: Annotated[int | None, Option(min=1, help="Rank of low-rank bypasses; default 256.")] = None,
    speedup_weights: t.Weights = None,
    order: t.Order = None,
    warmup_layers: t.Warmup = None,
    max_steps: t.MaxSteps = None,
    num_train_epochs: t.Epochs = None,
    batch_size: t.BatchSize = None,
    learning_rate: t.Rate = None,
    save_steps: t.SaveSteps = None,
    eval_steps: t.EvalSteps = None,
    bf16: t.Bf16 = None,
    seed: t.Seed = None,
) -> None:
    """Learn an adapter from self-generated texts; the model stays as it is. The same command resumes a killed run.

    skipdecode distill HuggingFaceTB/SmolLM2-135M-Instruct --speedups 1.5,2 --output fast
    """
    options = dict(locals())
    from ..training.config import DistillConfig
    from ..training.distill import distill as run

    run(DistillConfig.create(**t.given(options)), overwrite=overwrite, say=say)
