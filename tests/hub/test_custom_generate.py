"""``custom_generate/``: transformers alone generates what this package generates."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.spawn import start_processes
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, dynamic_module_utils

import skipdecode
from helpers.families import LAYERS, build, prompts
from helpers.tiny import TEXTS
from skipdecode import Schedule
from skipdecode.hub.custom_generate import ROOT, sources, write_custom_generate
from skipdecode.hub.generate import generate
from skipdecode.loading.load import DEMO
from skipdecode.model.adapter import Adapter, save_adapter

SCHEDULES = {2.0: Schedule(LAYERS, 4, 4, horizon=1, decay="constant")}
SOURCES = sources()


def generate_alone(_: int, calls: list[tuple[str, list[str], dict[str, Any]]], folder: Path) -> None:
    """What a user without this package runs, in a process of its own: the tokens of each call, in ``found.json``."""
    for name in [name for name in sys.modules if name.split(".")[0] == "skipdecode"]:
        sys.modules[name] = None  # type: ignore[assignment]
    dynamic_module_utils.HF_MODULES_CACHE = str(folder / "modules")
    found = []
    for name, texts, options in calls:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        if options.pop("stream", False):
            options["streamer"] = TextStreamer(tokenizer)
        made = model.generate(**inputs, trust_remote_code=True, max_new_tokens=12, do_sample=False, **options)
        found.append(made[:, inputs["input_ids"].shape[1] :].tolist())
    (folder / "found.json").write_text(json.dumps(found))


def saved_adapter(folder: Path, model: Any, base: str, seed: int = 0) -> Path:
    """An adapter whose weights matter."""
    torch.manual_seed(seed)
    adapter = Adapter(model.config.hidden_size, 4, SCHEDULES)
    for weight in adapter.parameters():
        nn.init.normal_(weight)
    save_adapter(folder, adapter, model, base)
    return folder


def test_transformers_alone_generates_what_this_package_generates(checkpoint: Path, tmp_path: Path) -> None:
    """The demo model greedy, with beams, streamed, full, and at its slowest trained speed; an adapter in its model."""
    demo = copytree(DEMO, tmp_path / "demo")
    adapter = saved_adapter(tmp_path / "fast", AutoModelForCausalLM.from_pretrained(checkpoint), str(checkpoint))
    prompts = ["name Aromi, food English, near Café Rouge ->", "name Zizzi, area riverside ->"]
    calls: list[tuple[Path, list[str], dict[str, Any]]] = [
        (demo, prompts, {"speedup": 5}),
        (demo, prompts, {"speedup": 3, "num_beams": 2}),
        (demo, prompts[:1], {"speedup": 5, "stream": True}),
        (demo, prompts, {"speedup": 1}),
        (demo, prompts, {}),
        (checkpoint, TEXTS[:1], {"adapter": str(adapter), "speedup": 2}),
        (checkpoint, TEXTS[:1], {"adapter": str(adapter), "speedup": 1}),
    ]
    for folder in (demo, adapter):
        write_custom_generate(folder)
    asked = []
    for model, texts, options in calls:
        asked.append((str(model), texts, options | {"custom_generate": str(demo if model == demo else adapter)}))
    start_processes(generate_alone, (asked, tmp_path), nprocs=1, start_method="fork")
    found = json.loads((tmp_path / "found.json").read_text())
    loaded = {name: skipdecode.load(name, dtype="float32", device="cpu") for name in (demo, adapter)}
    for (_, texts, options), tokens in zip(calls, found, strict=True):
        model, tokenizer = loaded[adapter if "adapter" in options else demo]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        skipdecode.attach(model, speedup=options.get("speedup", 2))
        beams = options.get("num_beams", 1)
        expected = model.generate(**inputs, max_new_tokens=12, do_sample=False, num_beams=beams)
        assert tokens == expected[:, inputs["input_ids"].shape[1] :].tolist()
    assert len({json.dumps(tokens) for tokens in found}) > 2


def test_an_adapter_stays_until_another_takes_its_place(tmp_path: Path) -> None:
    """And acts again after detach."""
    model = build("llama")
    first, second = (saved_adapter(tmp_path / name, model, "tiny", seed) for seed, name in enumerate("ab"))
    inputs: dict[str, Any] = prompts()

    def generated(**options: Any) -> list[list[int]]:
        return generate(model, **inputs, speedup=2, max_new_tokens=8, do_sample=False, **options).tolist()

    expected = generated(adapter=first)
    assert generated() == expected
    assert generated(adapter=second) != expected
    assert generated(adapter=first) == expected
    skipdecode.detach(model)
    assert generated(adapter=first) == expected


@pytest.mark.parametrize("name", SOURCES)
def test_its_files_are_those_of_the_package(name: str) -> None:
    """But for where they import from; and they import nothing of it that is not beside them."""
    texts = [path.read_text("utf-8").splitlines() for path in ROOT.rglob(name)]
    theirs = SOURCES[name].splitlines()
    (ours,) = [lines for lines in texts if len(lines) == len(theirs) and lines[0] == theirs[0]]
    changed = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    assert all(a.lstrip().startswith("from ..") and b.lstrip().startswith("from .") for a, b in changed)
    beside = [line.split()[1][1:] for line in theirs if line.lstrip().startswith("from .")]
    assert all(f"{module}.py" in SOURCES for module in beside)
