"""``skipdecode push``: put a trained checkpoint or adapter on the hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from .console import say

Folder = Annotated[
    Path, Argument(metavar="FOLDER", help="A checkpoint or an adapter, as `skipdecode train` writes it.")
]
Repo = Annotated[str, Argument(metavar="USER/NAME", help="Its repository on the hub; made if it is missing.")]
Base = Annotated[str | None, Option(help="Hub name of the model that it was trained from.")]
Results = Annotated[
    Path | None, Option(help="Folder that `skipdecode evaluate` wrote: its table and plot go on the card.")
]
License = Annotated[str | None, Option(help="Licence of the weights, as the hub names it, e.g. apache-2.0.")]
Private = Annotated[bool, Option("--private", help="Make a new repository private.")]
Prepare = Annotated[Path | None, Option("--prepare", help="Only write what would be uploaded into this new folder.")]


def push(
    folder: Folder,
    repo: Repo,
    base_model: Base = None,
    results: Results = None,
    license: License = None,
    private: Private = False,
    prepare: Prepare = None,
) -> None:
    """Upload weights, schedules, a model card and code with which transformers alone generates at every speed.

    The token is that of `hf auth login`. Nothing else of the folder is uploaded: no own texts, no checkpoints to
    resume from.

    skipdecode push fast USER/fast --base-model HuggingFaceTB/SmolLM2-135M-Instruct --license apache-2.0
    """
    from ..errors import FileError
    from ..hub.push import prepare as write
    from ..hub.push import upload
    from ..training.config import command_of
    from ..training.options import read_run_file

    record = folder / "training.json"
    trained_with = command_of(read_run_file(record)) if record.is_file() else None
    if prepare is not None and prepare.exists() and any(prepare.iterdir()):
        raise FileError(f"{prepare} is not empty: give a new folder")
    with tempfile.TemporaryDirectory() as temporary:
        target = prepare or Path(temporary) / "upload"
        write(
            folder,
            repo,
            target,
            base_model=base_model,
            trained_with=trained_with,
            results=results,
            license=license,
        )
        if prepare is not None:
            say(f"wrote {sum(path.is_file() for path in target.rglob('*'))} files to {target}: README.md is the card")
        else:
            say(f"uploaded to {upload(target, repo, private=private)}")
