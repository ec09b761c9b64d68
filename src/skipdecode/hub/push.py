"""Put a trained checkpoint or adapter on the hub, with its card and the code that transformers runs it with."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig

from ..errors import FileError, UsageError
from ..model.adapter import ABOUT, WEIGHTS, is_adapter, read_about, read_schedules
from ..model.config import config_schedules, is_trained
from .card import model_card
from .custom_generate import write_custom_generate

#: The base of errors of the HTTP library that the hub's client uses.
NO_ANSWER: Any = HfHubHTTPError.__bases__[0]
#: What is uploaded of a checkpoint's folder; never optimizer states, own texts or a run's options, which name files.
CHECKPOINT = """config.json generation_config.json *.safetensors *.safetensors.index.json tokenizer*
special_tokens_map.json added_tokens.json vocab.* *.model merges.txt chat_template.* LICENSE*""".split()


def prepare(
    folder: Path, repo: str, target: Path, *, base_model: str | None = None, results: Path | None = None, **more: Any
) -> None:
    """Write into ``target`` what :func:`push` uploads.

    Args:
        folder: a checkpoint or an adapter.
        repo: its name on the hub, USER/NAME.
        target: a new or empty folder.
        base_model: hub name of the model that it was trained from; None: the name that the adapter holds.
        results: folder that ``skipdecode evaluate`` has written, for the card.
        more: what else :func:`~.card.model_card` takes.

    Raises:
        UsageError: ``repo`` is no such name, a checkpoint was not trained to skip layers, or an adapter's base model is
            not known by its name on the hub.
        FileError: ``folder`` holds neither a checkpoint nor an adapter, or ``results`` no evaluation.
    """
    _check_name("the repository", repo)
    if base_model:
        _check_name("--base-model", base_model)
    adapter = is_adapter(folder)
    if adapter:
        about = read_about(folder)
        base_model = base_model or _hub_name(about["base_model"])
        if base_model is None:
            raise UsageError(
                f"the adapter was trained on {about['base_model']}: --base-model says what that is called on the hub"
            )
        schedules = read_schedules(folder)
    else:
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise FileError(f"{folder} holds no checkpoint in safetensors, and no adapter")
        try:
            config = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise FileError(f"{folder / 'config.json'} cannot be used: {' '.join(str(error).split())[:300]}") from error
        if not is_trained(config):
            raise UsageError(f"{folder} was not trained to skip layers: push is for models and adapters that were")
        schedules = config_schedules(config)
    more |= {"results": results, "evaluated": folder.resolve().name}
    card = model_card(repo, schedules, is_adapter=adapter, base_model=base_model, **more)
    target.mkdir(parents=True, exist_ok=True)
    if adapter:
        (target / ABOUT).write_text(json.dumps(about | {"base_model": base_model}, indent=1) + "\n")
        shutil.copyfile(folder / WEIGHTS, target / WEIGHTS)
    else:
        for file in {path for pattern in CHECKPOINT for path in folder.glob(pattern) if path.is_file()}:
            shutil.copyfile(file, target / file.name)
    write_custom_generate(target)
    card.save(target / "README.md")
    if results is not None and (results / "tradeoff.png").exists():
        shutil.copyfile(results / "tradeoff.png", target / "tradeoff.png")


def push(prepared: Path, repo: str, *, private: bool = False) -> str:
    """Upload a folder of :func:`prepare`, after the hub has checked its card, and return its address.

    Raises UsageError if the hub refuses the name, the token, or the card.
    """
    api = HfApi()
    try:
        ModelCard.load(prepared / "README.md").validate()
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=prepared, commit_message="Upload with skipdecode push")
    except (ValueError, OSError, NO_ANSWER) as error:
        raise UsageError(f"the hub did not take {repo}: {' '.join(str(error).split())[:400]}") from error
    return f"{api.endpoint}/{repo}"


def _check_name(what: str, name: str) -> None:
    if _hub_name(name) is None:
        raise UsageError(f"{what} is USER/NAME, as on the hub, not {name!r}")


def _hub_name(name: str) -> str | None:
    """Return ``name`` if it has the form USER/NAME; else None."""
    return name if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) else None
