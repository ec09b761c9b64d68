"""Make a model card from what a run has written: its options, the evaluation's table, the schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..errors import FileError
from ..files import read_json
from ..schedule import Schedule

#: Keys of an evaluation's rows, and what the hub calls them.
METRICS = {
    "bleu": ("bleu", "BLEU"),
    "rouge_l": ("rouge", "ROUGE-L"),
    "kl": ("kl", "KL from full depth on its greedy texts, nats per token"),
    "top_1": ("accuracy", "share of full depth's most likely tokens on its greedy texts, %"),
    "agreement": ("rouge", "ROUGE-L with full depth's text, %"),
}

BODY = """\
# {name}

## Description

{what}
[SkipDecode](https://arxiv.org/abs/2307.02628) (Del Corro et al., 2023) gives each position of a batch a number of
layers that never grows as text is generated: {layers}. Full depth (`speedup=1`) runs all layers{untouched}.

## Base model

{base}

## Model compatibility

{compatible}

## Additional arguments

- `speedup` (`float`, optional): how many times fewer layers a generated token runs; {speedups}. 1 runs all layers.
  The default is the fastest.
- `adapter` (`str`, optional): folder or hub name of an adapter for the model, to act on positions that skip layers.

## Output type changes

None: `generate` returns what it always returns.

## Example usage

{example}
{training}{evaluation}"""

EXAMPLE = """\
With transformers alone:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{model}")
tokenizer = AutoTokenizer.from_pretrained("{model}", padding_side="left")
inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
options = {{"custom_generate": "{repo}", "trust_remote_code": True, "speedup": {speedup}{argument}}}
print(tokenizer.batch_decode(model.generate(**inputs, **options, max_new_tokens=100)))
```

With the package; `serve` is vLLM, a speed per request:

    skipdecode generate {model}{option} --speedup {speedup} --input prompts.jsonl
    skipdecode serve {model}{option}
"""


def model_card(
    repo: str,
    schedules: Mapping[float, Schedule],
    *,
    is_adapter: bool,
    base_model: str | None = None,
    trained_with: str | None = None,
    results: Path | None = None,
    evaluated: str | None = None,
    license: str | None = None,
    datasets: Sequence[str] = (),
) -> ModelCard:
    """Return the card of a checkpoint or an adapter.

    Args:
        repo: its name on the hub.
        schedules: by target speed-up.
        is_adapter: whether it is an adapter; ``base_model`` is then given.
        base_model: hub name of what it was trained from.
        trained_with: the command.
        results: folder that ``skipdecode evaluate`` has written.
        evaluated: the name of the checkpoint's folder, whose results these have to be.
        license: as the hub names it, e.g. ``apache-2.0``.
        datasets: hub names of what it was trained on.

    Raises:
        FileError: ``results`` holds no table of ``skipdecode evaluate``, or one of other models.
    """
    table = None if results is None else _table(results, is_adapter, evaluated)
    name, speeds = repo.split("/")[-1], [speed for speed in schedules if speed > 1]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["skipdecode", "custom_generate"],
        base_model=base_model,
        base_model_relation="adapter" if is_adapter else None,
        datasets=list(datasets) or None,
        license=license,
        model_name=name if table else None,
        eval_results=_results(table, datasets) if table else None,
    )
    what = "An adapter that taught the base model to write with fewer layers per token."
    filled = {
        "name": name,
        "what": what if is_adapter else "A language model that was trained to write with fewer layers per token.",
        "layers": ", ".join(f"{_depths(schedules[speed])} at {speed:g}x" for speed in speeds) or "all",
        "untouched": ": the base model, bit for bit" if is_adapter else "",
        "base": f"[{base_model}](https://huggingface.co/{base_model})" if base_model else "None is named.",
        "compatible": f"The adapter is for `{base_model}` alone; another model's weights are refused."
        if is_adapter
        else "`custom_generate` works for most decoder-only models of transformers; those that cannot skip layers "
        "exactly are refused with a reason. A model that was not trained for it writes poor text.",
        "speedups": f"trained: {', '.join(f'{speed:g}' for speed in speeds)}" if speeds else "none was trained",
        "example": EXAMPLE.format(
            repo=repo,
            model=base_model if is_adapter else repo,
            speedup=f"{max(speeds, default=1):g}",
            argument=f', "adapter": "{repo}"' if is_adapter else "",
            option=f" --adapter {repo}" if is_adapter else "",
        ),
        "training": f"\n## Training\n\n    {trained_with}\n" if trained_with else "",
        "evaluation": _evaluation(results) if results else "",
    }
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{BODY.format(**filled)}")


def _depths(schedule: Schedule) -> str:
    deepest, least = schedule.max_depth, schedule.min_depth
    span = f"{deepest}" if deepest == least else f"{deepest} to {least}"
    return f"{span} of {schedule.num_layers} layers"


def _table(results: Path, is_adapter: bool, evaluated: str | None) -> dict[str, Any]:
    table = read_json(results / "table.json")
    if not isinstance(table, dict) or not {"about", "rows"} <= table.keys():
        raise FileError(f"{results} holds no table of skipdecode evaluate")
    told = [(row.get("model"), row.get("target")) for row in table["rows"]]
    models = {model for model, _ in (told[1:] if is_adapter else told)}  # an adapter's 1x is its base
    if len(models) > 1 or len({*told[1:]}) < len(told[1:]):
        raise FileError(f"{results} compares models, methods or schedules: a card takes one model, each speed once")
    if other := models - {evaluated or None}:
        raise FileError(f"{results} has the results of {other.pop()}, not of {evaluated}: evaluate that folder")
    return table


def _results(table: Mapping[str, Any], datasets: Sequence[str]) -> list[EvalResult]:
    """Return each score of each row, with what it was measured on."""
    rows = table["about"]["rows"]
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=next(iter(datasets), "own"),
            dataset_name=rows,
            dataset_config=f"{row['target']:g}x",  # the hub's library puts results of one configuration together
            dataset_args={"speedup": row["target"]},
            metric_type=METRICS[key][0],
            metric_name=f"{METRICS[key][1]} at {row['target']:g}x",
            metric_value=round(row[key], 3),
        )
        for row in table["rows"]
        for key in METRICS
        if key in row
    ]


def _evaluation(results: Path) -> str:
    plot = "![quality against speed](tradeoff.png)\n\n" if (results / "tradeoff.png").exists() else ""
    lines = (results / "table.md").read_text("utf-8").splitlines(keepends=True)
    table = "".join(line for line in lines if not line.startswith("command: "))  # it names the user's folders
    return f"\n## Evaluation\n\n{plot}{table}"
