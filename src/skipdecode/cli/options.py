"""Options that several verbs share: one name, one help text."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from ..errors import UsageError

# --- the model and its speed
Model = Annotated[str, Argument(metavar="MODEL", help="Folder, Hub name, GGUF file, adapter's folder, or 'demo'.")]
Adapter = Annotated[Path | None, Option(help="Folder or Hub name of an adapter for MODEL.")]
Speedup = Annotated[float | None, Option(help="Speed; 2 runs half of the layers. Default: slowest trained above 1.")]
Speedups = Annotated[str | None, Option(help="Speeds with commas between; default: the trained ones, if any.")]
Task = Annotated[
    Literal["jsonl", "e2e", "reddit_tldr", "cnn_dm"], Option(help="Prompt format of a data set; jsonl takes any rows.")
]
PromptLayers = Annotated[str | None, Option(help="Layers of the prompt: a number, or max for the first step's.")]
LoRARank = Annotated[int, Option(min=0, help="Rank of LoRA on layers that run above skipped ones; 0: none.")]
Rank = Annotated[int, Option(min=1, help="Rank of low-rank bypasses and bottlenecks.")]

# --- data
Prompts = Annotated[str | None, Option(help="File of prompts: JSONL, CSV, Parquet or lines of text.")]
Data = Annotated[Path, Option(help="Folder with train, validation and test files, or one file.")]
Limit = Annotated[int | None, Option(min=1, help="Use only the first inputs, this many.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace an output that is already there.")]

# --- decoding, by transformers' names
BatchSize = Annotated[int, Option(min=1, help="Sequences decoded together.")]
MaxNewTokens = Annotated[int | None, Option(min=1, help="Most new tokens per sequence; default: the task's, or 128.")]
DoSample = Annotated[bool, Option("--do-sample", help="Sample instead of greedy decoding.")]
Temperature = Annotated[float | None, Option(min=0, help="Sampling temperature.")]
TopP = Annotated[float | None, Option(min=0, max=1, help="Nucleus sampling: total probability of the tokens kept.")]
RepetitionPenalty = Annotated[float | None, Option(min=0, help="Penalty for tokens that occurred; 1 is none.")]
Seed = Annotated[int, Option(help="Random seed.")]

# --- where it runs
Dtype = Annotated[Literal["auto", "float32", "bfloat16", "float16"], Option(help="Dtype of the weights.")]
Device = Annotated[str | None, Option(help="cpu, cuda, …; default: a GPU if there is one.")]
Quantization = Annotated[Literal["int8"] | None, Option(help="8-bit weights and activations, on CPUs.")]
Engine = Annotated[Literal["transformers", "vllm"], Option(help="Library that generates.")]
Bf16 = Annotated[bool | None, Option("--bf16/--no-bf16", help="Compute in bfloat16; default: on GPUs that have it.")]

# --- training, by transformers' names; None: the configuration's default
MaxSteps = Annotated[int | None, Option(min=1, help="Optimizer steps, instead of epochs.")]
Epochs = Annotated[float | None, Option(min=0, help="Passes over the data.")]
TrainBatchSize = Annotated[int | None, Option("--batch-size", min=1, help="Sequences per batch.")]
LearningRate = Annotated[float | None, Option(min=0, help="Peak learning rate.")]
SaveSteps = Annotated[int | None, Option(min=1, help="Steps between checkpoints.")]
SpeedupWeights = Annotated[str | None, Option(help="How much each speed is trained; default: equally.")]
BottomLayers = Annotated[int | None, Option(min=0, help="Bottom layers that are always kept.")]
Config = Annotated[Path | None, Option(help="YAML file of options, also any of TrainingArguments.")]
Json = Annotated[bool, Option("--json", help="Print the result as JSON on the last line.")]


def parse_speedups(text: str | None) -> tuple[float, ...] | None:
    """Parse speeds such as ``"1,1.5,2"``. Raises UsageError for anything else."""
    if text is None:
        return None
    try:
        speedups = tuple(float(part) for part in text.split(","))
    except ValueError:
        speedups = ()
    if not speedups or not min(speedups) >= 1 or len(set(speedups)) < len(speedups):
        raise UsageError(f"--speedups takes distinct numbers of at least 1 with commas between, not {text!r}")
    return speedups
