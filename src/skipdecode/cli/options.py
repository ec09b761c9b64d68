"""Options of the command line, defined once so that all commands use the same names, ranges and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from ..errors import UsageError

#: Largest accepted number of tokens, rows or words: more is a slip that would fill the memory or never end.
MOST = 1_000_000

#: Panels of the help texts.
DATA, LENGTH, SAMPLING, MACHINE = "Data", "Text", "Sampling and beams", "Machine"

# --- the model and its schedule
Model = Annotated[
    str,
    Argument(
        metavar="MODEL",
        help="Directory, hub name, GGUF file, or 'demo' for the model in the package.",
        show_default=False,
    ),
]
Adapter = Annotated[
    Path | None,
    Option(help="Folder or hub name of an adapter for MODEL. MODEL may be the folder itself: it names its model."),
]
Speedup = Annotated[
    float | None,
    Option(help="Target layer reduction: 3 runs a third of the layers (default: the fastest one trained, else 2)."),
]
ScheduleFile = Annotated[Path | None, Option(help="A schedule's JSON file instead.")]
Full = Annotated[bool, Option("--full", help="The unmodified model.")]
Order = Annotated[str | None, Option(help="Layer order: top, bottom or even (default: the model's, else top).")]
Decay = Annotated[
    Literal["linear", "cosine", "exponential", "power", "step", "constant"] | None,
    Option(help="How the depth falls (default: the model's, else linear)."),
]
PromptLayers = Annotated[
    str | None, Option(help="Layers that the prompt runs: a number, or max for as many as step 0 (default: all).")
]
Clock = Annotated[
    Literal["layers", "step", "job"],
    Option(help="What a speed-up is of: layers, or with --profile a decode step's or the whole job's seconds."),
]
ProfileFile = Annotated[Path | None, Option("--profile", help="What skipdecode profile measured on this machine.")]

# --- data
Input = Annotated[str, Option(help="JSONL or CSV with prompts, lines of text, or - for standard input.")]
Prompts = Annotated[
    list[str] | None, Option("--prompt", help="A prompt instead of an input; may be repeated. Its text is printed.")
]
Output = Annotated[str, Option(help="JSONL, in the input's order; - for standard output.")]
Data = Annotated[
    Path, Option(help="Folder with the task's files, one JSONL or CSV file, or with --task a hub data set.")
]
Task = Annotated[
    Literal["jsonl", "e2e", "reddit_tldr", "cnn_dm"],
    Option(help="jsonl takes any rows; the others are data sets with a prompt format.", rich_help_panel=DATA),
]
Format = Annotated[
    Literal["jsonl", "csv", "text"] | None,
    Option(help="The input's format, if its name does not tell.", rich_help_panel=DATA),
]
PromptColumn = Annotated[
    str | None, Option(help="Column of the prompts, if not prompt, messages or text.", rich_help_panel=DATA)
]
ResponseColumn = Annotated[
    str | None, Option(help="Column of the responses, if not response or completion.", rich_help_panel=DATA)
]
PromptShare = Annotated[
    float | None,
    Option(
        min=0,
        max=0.99,
        help="Plain text: this share of its words is the prompt; 0: the begin-of-text token alone.",
        rich_help_panel=DATA,
    ),
]
Chat = Annotated[
    bool,
    Option(
        "--chat", help="Each prompt is a user's message: apply the tokenizer's chat template.", rich_help_panel=DATA
    ),
]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace an output, finished or not, that is already there.")]

Limit = Annotated[int | None, Option(min=1, max=MOST, help="Take only the first so many inputs.")]

# --- decoding, by the names that transformers gives its options
BatchSize = Annotated[int, Option(min=1, max=MOST, help="Rows decoded together.")]
MaxNewTokens = Annotated[int | None, Option(min=1, max=MOST, help="Default: the task's (jsonl 128, e2e 80).")]
MinNewTokens = Annotated[int | None, Option(min=0, max=MOST, rich_help_panel=LENGTH)]
RepetitionPenalty = Annotated[float | None, Option(min=0.001, max=1000, rich_help_panel=LENGTH)]
NoRepeatNgramSize = Annotated[int | None, Option(min=0, max=MOST, rich_help_panel=LENGTH)]
Stop = Annotated[
    list[str] | None, Option("--stop", help="End a text at this string; may be repeated.", rich_help_panel=LENGTH)
]
DoSample = Annotated[
    bool,
    Option("--do-sample", help="Sample instead of taking the likeliest token.", rich_help_panel=SAMPLING),
]
Temperature = Annotated[float | None, Option(min=0.001, max=1000, rich_help_panel=SAMPLING)]
TopP = Annotated[float | None, Option(min=1e-6, max=1, rich_help_panel=SAMPLING)]
TopK = Annotated[int | None, Option(min=0, max=MOST, rich_help_panel=SAMPLING)]
SamplingSeed = Annotated[int, Option(min=0, help="Seed of the sampling.", rich_help_panel=SAMPLING)]
NumBeams = Annotated[int | None, Option(min=1, max=1000, rich_help_panel=SAMPLING)]

# --- where it runs
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"], Option(help="Type of the weights.", rich_help_panel=MACHINE)
]
Device = Annotated[str | None, Option(help="cpu, cuda, …; a GPU if there is one.", rich_help_panel=MACHINE)]
Revision = Annotated[str | None, Option(help="Branch, tag or commit of a hub model.", rich_help_panel=MACHINE)]
Quantization = Annotated[
    Literal["int8"] | None, Option(help="Layers and head multiply in 8 bits (CPUs).", rich_help_panel=MACHINE)
]
Prepack = Annotated[
    bool,
    Option("--prepack", help="Keep weights in the layout of the CPU's products: faster.", rich_help_panel=MACHINE),
]
Attention = Annotated[
    str | None,
    Option("--attn-implementation", help="eager, sdpa, … (default: transformers').", rich_help_panel=MACHINE),
]

OffloadTo = Annotated[
    Literal["auto", "disk", "cpu"] | None,
    Option("--offload", help="Where layers are kept that do not fit into memory.", rich_help_panel=MACHINE),
]
MaxMemory = Annotated[
    float | None, Option(min=0, help="GiB that the weights may take: offload the rest.", rich_help_panel=MACHINE)
]
OffloadFolder = Annotated[
    Path | None, Option(help="For offloaded weights that are converted when they are read.", rich_help_panel=MACHINE)
]
EngineName = Annotated[
    Literal["transformers", "vllm"],
    Option("--engine", help="What runs the model: transformers' loop, or vLLM (CPUs).", rich_help_panel=MACHINE),
]
RayWorkers = Annotated[
    int | None,
    Option("--ray", min=1, max=MOST, help="So many workers on a Ray cluster, else here.", rich_help_panel=MACHINE),
]

# --- results
Json = Annotated[bool, Option("--json", help="The result as JSON on the last line of standard output.")]


def style_options(
    order: str | None = None, decay: str | None = None, prompt_layers: str | None = None
) -> dict[str, int | str]:
    """Return those of the schedule fields ``order``, ``decay`` and ``prompt_layers`` that the user gave."""
    from ..schedule import parse_prompt_layers

    fields = {"order": order, "decay": decay, "prompt_layers": parse_prompt_layers(prompt_layers)}
    return {name: value for name, value in fields.items() if value is not None}


def parse_numbers(text: str, option: str = "--speedups", kind: type[int | float] = float) -> tuple[Any, ...]:
    """Parse distinct numbers of at least 1, like ``"1,2.5,5"``. Raises UsageError, naming ``option``, for others."""
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(1 <= value <= MOST for value in values) or len(set(values)) < len(values):
        what = "whole numbers" if kind is int else "numbers"
        raise UsageError(f"{option} takes distinct {what} of at least 1 with commas between, not {text!r}")
    return values
