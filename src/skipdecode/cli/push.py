"""``skipdecode push``: upload a trained checkpoint or adapter to the Hub."""

import tempfile
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from .console import say


def push(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="A checkpoint or an adapter.")],
    repo: Annotated[str, Argument(metavar="USER/NAME", help="Repository on the Hub; created if missing.")],
    base_model: Annotated[str | None, Option(help="Hub name of the model that it was trained from.")] = None,
    license: Annotated[str | None, Option(help="Licence of the weights, as the Hub names it.")] = None,
    results: Annotated[Path | None, Option(help="Folder that evaluate wrote, for the model card.")] = None,
    private: Annotated[bool, Option("--private", help="Create a private repository.")] = False,
    dry_run: Annotated[Path | None, Option(help="Write the files into this folder instead.")] = None,
) -> None:
    """Upload weights, schedules, a model card and custom_generate. The token is that of `hf auth login`.

    skipdecode push fast USER/fast --base-model HuggingFaceTB/SmolLM2-135M-Instruct --license apache-2.0
    """
    from ..hub.push import prepare, upload

    with tempfile.TemporaryDirectory() as temporary:
        target = dry_run or Path(temporary) / "upload"
        if stays := prepare(folder, repo, target, base_model=base_model, license=license, results=results):
            say(f"left out: {', '.join(stays)}")
        if dry_run is None:
            say(f"uploaded to {upload(target, repo, private=private)}")
        else:
            say(f"wrote {target}; README.md is the card")
