"""``custom_generate/``: transformers alone generates what this package generates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

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

#: What a user without this package runs; its folder, model, adapter and the calls' options come as JSON.
ALONE = """
import json, sys
sys.modules["skipdecode"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

asked = json.loads(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(asked["model"], padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
inputs = tokenizer(asked["prompts"], return_tensors="pt", padding=True, return_token_type_ids=False)
same = {"custom_generate": asked["folder"], "trust_remote_code": True, "max_new_tokens": 12, "do_sample": False}
found = []
for options in asked["calls"]:
    if options.pop("stream", False):
        options["streamer"] = TextStreamer(tokenizer)
        written = model.generate(**{name: value[:1] for name, value in inputs.items()}, **same, **options)
    else:
        written = model.generate(**inputs, **same, **options)
    found.append(written[:, inputs["input_ids"].shape[1]:].tolist())
print(json.dumps(found))
"""


def alone(tmp_path: Path, **asked: object) -> list[list[list[int]]]:
    """The tokens that each call generates, in a process without this package."""
    places = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", ALONE, json.dumps(asked)]
    done = subprocess.run(command, env=os.environ | places, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def saved_adapter(folder: Path, model: Any, base: str, seed: int = 0) -> Path:
    """An adapter whose weights matter."""
    torch.manual_seed(seed)
    adapter = Adapter(model.config.hidden_size, 4, SCHEDULES)
    for weight in adapter.parameters():
        nn.init.normal_(weight)
    save_adapter(folder, adapter, model, base)
    return folder


def test_the_demo_model_generates_at_its_speeds(tmp_path: Path) -> None:
    """Greedy, with beams, streamed, the full model, and the slowest trained speed without a word: as here."""
    folder = copytree(DEMO, tmp_path / "demo")
    write_custom_generate(Path(folder))
    prompts = ["name Aromi, food English, near Café Rouge ->", "name Zizzi, area riverside ->"]
    calls: list[dict[str, Any]] = [
        {"speedup": 5},
        {"speedup": 3, "num_beams": 2},
        {"speedup": 5, "stream": True},
        {"speedup": 1},
        {},
    ]
    found = alone(tmp_path, model=str(folder), folder=str(folder), prompts=prompts, calls=calls)
    model, tokenizer = skipdecode.load("demo", dtype="float32", device="cpu")
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    width = inputs["input_ids"].shape[1]
    for call, tokens in zip(calls, found, strict=True):
        skipdecode.attach(model, speedup=call.get("speedup", 2))
        options = {"max_new_tokens": 12, "do_sample": False, "num_beams": call.get("num_beams", 1)}
        rows = 1 if call.get("stream") else 2
        expected = model.generate(**{name: value[:rows] for name, value in inputs.items()}, **options)
        assert tokens == expected[:, width:].tolist()
    assert len({json.dumps(tokens) for tokens in found}) > 2


def test_an_adapter_acts_in_its_model(checkpoint: Path, tmp_path: Path) -> None:
    """The folder of an adapter carries the code; the model is loaded as it is."""
    full = AutoModelForCausalLM.from_pretrained(checkpoint)
    folder = saved_adapter(tmp_path / "fast", full, str(checkpoint))
    write_custom_generate(folder)
    calls: list[dict[str, Any]] = [{"adapter": str(folder), "speedup": 2}, {"adapter": str(folder), "speedup": 1}]
    found = alone(tmp_path, model=str(checkpoint), folder=str(folder), prompts=TEXTS[:1], calls=calls)
    model, tokenizer = skipdecode.load(folder, dtype="float32", device="cpu")
    inputs = tokenizer(TEXTS[:1], return_tensors="pt", return_token_type_ids=False)
    for call, tokens in zip(calls, found, strict=True):
        skipdecode.attach(model, speedup=call["speedup"])
        expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        assert tokens == expected[:, inputs["input_ids"].shape[1] :].tolist()


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
