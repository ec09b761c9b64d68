"""Model cards, from a checkpoint's or adapter's schedules and an evaluation."""

from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from ..schedule import Schedule

TEMPLATE = Path(__file__).with_name("card.md")
#: Picture of an evaluation's folder that a card shows.
PLOT = "tradeoff.png"


def model_card(
    repo: str,
    schedules: Mapping[float, Schedule],
    *,
    is_adapter: bool,
    base_model: str | None = None,
    results: Path | None = None,
    license: str | None = None,
) -> ModelCard:
    """Card of a checkpoint or an adapter.

    Args:
        repo: its name on the Hub.
        schedules: by target speed-up.
        is_adapter: whether it is an adapter; it then has a ``base_model``.
        base_model: Hub name of the model that it was trained from.
        results: folder that ``skipdecode evaluate`` wrote.
        license: as the Hub names it, such as ``apache-2.0``.
    """
    speeds = [speed for speed in schedules if speed > 1]
    table = None
    if results is not None:  # without the command, which names the user's folders
        lines = (results / "table.md").read_text("utf-8").splitlines(keepends=True)
        table = "".join(line for line in lines if not line.startswith("command: "))
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["skipdecode", "custom_generate"],
        base_model=base_model,
        base_model_relation="adapter" if is_adapter else None,
        license=license,
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=repo.split("/")[-1],
        repo=repo,
        is_adapter=is_adapter,
        model=base_model if is_adapter else repo,
        option=f" --adapter {repo}" if is_adapter else "",
        depths=", ".join(f"{_depths(schedules[speed])} at {speed:g}x" for speed in speeds),
        speeds=", ".join(f"{speed:g}" for speed in speeds),
        speedup=f"{min(speeds, default=1):g}",
        table=table,
        plot=PLOT if results is not None and (results / PLOT).exists() else None,
    )


def _depths(schedule: Schedule) -> str:
    most, least = schedule.max_depth, schedule.min_depth
    return f"{most if most == least else f'{most} to {least}'} of {schedule.num_layers} layers"
