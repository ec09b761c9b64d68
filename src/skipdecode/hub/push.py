"""Upload of a trained checkpoint or adapter to the Hub, with a card and the code that transformers runs it with."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard

from ..errors import FileError, UsageError
from ..files import write
from ..loading.load import Checkpoint
from ..model.adapter import ABOUT, is_adapter, read_about, read_schedules
from .card import PLOT, model_card
from .custom_generate import write_custom_generate

#: What stays of a trained folder: checkpoints to resume from, texts that were learnt from, options with file names,
#: pickles, hidden files. The card and ``custom_generate`` are written anew.
STAYS = (".*", "checkpoint-*", "*.jsonl*", "training.json", "runs", "*.bin", "*.pt", "custom_generate", "README.md")


def prepare(
    folder: Path, repo: str, target: Path, *, base_model: str | None = None, results: Path | None = None, **card: Any
) -> list[str]:
    """Write what :func:`upload` uploads: the folder, a card, ``custom_generate``; return what stays (:data:`STAYS`).

    Args:
        folder: a checkpoint or an adapter.
        repo: its name on the Hub, USER/NAME.
        target: a new or empty folder.
        base_model: Hub name of the model that it was trained from; None: the name that the adapter holds.
        results: folder that ``skipdecode evaluate`` wrote, for the card.
        card: other arguments of :func:`~.card.model_card`.
    """
    _check_name(repo, "the repository")
    if target.exists() and any(target.iterdir()):
        raise UsageError(f"{target} is not empty: give a new folder")
    adapter = is_adapter(folder)
    schedules = read_schedules(folder) if adapter else Checkpoint.resolve(folder).schedules
    about = read_about(folder) if adapter else {"base_model": None}
    what = "--base-model" if base_model else "the adapter's model is a folder here, so give --base-model: it"
    base_model = base_model or about["base_model"]
    if base_model is not None:
        _check_name(base_model, what)
    if not schedules:
        raise UsageError(f"{folder} was not trained to skip layers: push is for models and adapters that were")
    made = model_card(repo, schedules, is_adapter=adapter, base_model=base_model, results=results, **card)
    try:
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns(*STAYS), dirs_exist_ok=True)
    except OSError as error:  # of a link to nothing too
        raise FileError(f"{folder} cannot be copied: push takes a folder with all its files; {error}") from error
    if adapter:
        write(target / ABOUT, json.dumps(about | {"base_model": base_model}, indent=1) + "\n")
    write_custom_generate(target)
    made.save(target / "README.md")
    if results is not None and (results / PLOT).exists():
        shutil.copyfile(results / PLOT, target / PLOT)
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*"))]
    return [str(name) for name in names if (target / name.parent).exists() and not (target / name).exists()]


def upload(prepared: Path, repo: str, *, private: bool = False) -> str:
    """Upload a folder of :func:`prepare`, after the Hub has checked its card, and return its address.

    Raises UsageError if the Hub refuses the name, the token or the card.
    """
    api = HfApi()
    try:
        ModelCard.load(prepared / "README.md").validate()
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=prepared, commit_message="Upload with skipdecode push")
    except (ValueError, OSError) as error:
        raise UsageError(f"the Hub did not take {repo}: {' '.join(str(error).split())[:300]}") from error
    return f"{api.endpoint}/{repo}"


def _check_name(name: str, what: str) -> None:
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise UsageError(f"{what} is USER/NAME, as on the Hub, not {name!r}")
