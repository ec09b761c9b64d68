"""An upload: what goes to the Hub and what stays, and that it works from there, on a hub of this machine."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from torch.multiprocessing.spawn import start_processes
from transformers import AutoModelForCausalLM

import skipdecode
from helpers.families import LAYERS
from helpers.hub import hub
from helpers.tiny import TEXTS
from skipdecode import Schedule
from skipdecode.errors import FileError, ModelError, UsageError
from skipdecode.hub.push import prepare, upload
from skipdecode.loading.load import DEMO
from skipdecode.model.adapter import Adapter, save_adapter

SCHEDULES = {speed: Schedule.for_speedup(speed, LAYERS) for speed in (2.0, 4.0)}


def round_trips(
    _: int, trips: list[tuple[str, str, dict[str, Any], str | None, list[str]]], folder: Path, url: str
) -> None:
    """Upload folders, load each back by its name on the Hub, generate; in a process of its own, with that hub."""
    places = {"HF_ENDPOINT": url, "HF_HOME": str(folder / "home"), "HF_TOKEN": "hf_test"}
    os.environ.update(places | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"})
    importlib.reload(huggingface_hub.constants)
    found = []
    for source, repo, options, model, prompts in trips:
        prepare(Path(source), repo, folder / "upload" / repo, **options)
        address = upload(folder / "upload" / repo, repo, private=True)
        loaded = skipdecode.load(model or repo, device="cpu", adapter=repo if model else None)
        made = skipdecode.generate(*loaded, prompts, speedup=2, max_new_tokens=8)
        found.append((address, [completion.text for completion in made.completions]))
    (folder / "found.json").write_text(json.dumps(found))


@pytest.fixture
def adapter(checkpoint: Path, tmp_path: Path) -> Path:
    """An adapter of the tiny checkpoint, with what a training leaves beside it."""
    folder = tmp_path / "fast"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    save_adapter(folder, Adapter(model.config.hidden_size, 4, SCHEDULES), model, str(checkpoint))
    for name in ("training.json", "self_generated.jsonl", "checkpoint-10/optimizer.pt", ".cache/x", "runs/events"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(str(folder))
    (folder / "LICENSE").write_text("free")
    return folder


def test_an_adapter_and_a_checkpoint_go_up_and_come_back(adapter: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Nothing private goes along; the adapter's name on the Hub stands for its folder."""
    options = {"base_model": "you/base", "license": "mit"}
    prompts = ["name Zizzi, area riverside ->"]
    trips = [
        (str(adapter), "me/fast", options, str(checkpoint), TEXTS[:3]),
        (str(DEMO), "me/demo", {}, None, prompts),
    ]
    with hub() as served:
        start_processes(round_trips, (trips, tmp_path, served.url), nprocs=1, start_method="fork")
    (first, texts), (second, more) = json.loads((tmp_path / "found.json").read_text())
    assert (first, second) == (f"{served.url}/me/fast", f"{served.url}/me/demo")
    files = served.files["me/fast"]
    top = {name for name in files if "/" not in name}
    assert top == {"README.md", "LICENSE", "adapter.safetensors", "skipdecode_adapter.json"}
    assert {name.split("/")[0] for name in files} - top == {"custom_generate"}
    assert served.private["me/fast"]
    assert json.loads(files["skipdecode_adapter.json"])["base_model"] == "you/base"
    assert str(tmp_path.parent).encode() not in b"".join(files.values())
    assert yaml.safe_load(files["README.md"].decode().split("---")[1])["license"] == "mit"
    assert {"model.safetensors", "tokenizer.json", "README.md"} <= {*served.files["me/demo"]}
    for name, asked, found in ((adapter, TEXTS[:3], texts), ("demo", prompts, more)):
        here = skipdecode.generate(*skipdecode.load(name, device="cpu"), asked, speedup=2, max_new_tokens=8)
        assert found == [completion.text for completion in here.completions]


def test_files_of_any_name_go_along(tmp_path: Path) -> None:
    """Templates, vocabularies and folders that a checkpoint of tomorrow may hold."""
    folder = Path(shutil.copytree(DEMO, tmp_path / "demo"))
    more = ("additional_chat_templates/tool.jinja", "tekken.json", "vocab.tiktoken", "NOTICE")
    for name in more:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    for name in ("pytorch_model.bin", "additional_chat_templates/x.pt", "checkpoint-10/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("a pickle")
    stays = prepare(folder, "me/demo", tmp_path / "out")
    assert stays == ["additional_chat_templates/x.pt", "checkpoint-10", "pytorch_model.bin"]
    assert all((tmp_path / "out" / name).is_file() for name in more)
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_a_folder_that_cannot_be_copied_whole_is_an_error(tmp_path: Path) -> None:
    """With a link to nothing; and the demo's name, which is none of a folder."""
    folder = Path(shutil.copytree(DEMO, tmp_path / "demo"))
    (folder / "vocab.txt").symlink_to(tmp_path / "gone")
    for name in (folder, Path("demo")):
        with pytest.raises(FileError, match=r"demo cannot be copied: push takes a folder .*No such file"):
            prepare(name, "me/demo", tmp_path / f"out of {len(name.parts)}")


@pytest.mark.parametrize(
    ("repo", "options", "match"),
    [
        ("me/fast", {}, "give --base-model: it is USER/NAME"),
        ("fast", {"base_model": "you/base"}, "the repository is USER/NAME"),
        ("me/fast", {"base_model": "/home/me/base"}, "--base-model is USER/NAME"),
    ],
)
def test_names_are_those_of_the_hub(
    repo: str, options: dict[str, Any], match: str, adapter: Path, tmp_path: Path
) -> None:
    """A path would be published, and mean nothing elsewhere."""
    with pytest.raises(UsageError, match=match):
        prepare(adapter, repo, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_what_was_not_trained_is_no_upload(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was not trained to skip layers"):
        prepare(checkpoint, "me/stock", tmp_path / "out")
    with pytest.raises(ModelError, match=r"no config\.json"):
        prepare(tmp_path, "me/none", tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        prepare(DEMO, "me/demo", tmp_path / "out")
