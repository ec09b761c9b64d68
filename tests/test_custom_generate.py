"""``custom_generate/``: transformers alone writes what this package writes."""

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

import skipdecode
from helpers.families import LAYERS, build, prompts
from helpers.tiny import TEXTS, run, write_jsonl
from skipdecode import Schedule
from skipdecode.errors import UsageError
from skipdecode.hub.custom_generate import ROOT, sources, write_custom_generate
from skipdecode.hub.generate import generate
from skipdecode.loading.load import DEMO
from skipdecode.model.adapter import Adapter, save_adapter
from skipdecode.model.inspect import gates_of

#: What a user without this package runs; its folder, model, adapter and the calls' options are given as JSON.
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
    """The tokens that each call writes, in a process without this package."""
    places = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", ALONE, json.dumps(asked)]
    done = subprocess.run(command, env=os.environ | places, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_embedded_checkpoint_writes_at_its_speeds(tmp_path: Path) -> None:
    """Greedy, with beams, streamed, at full depth: as ``attach`` and ``generate`` here."""
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
    model, tokenizer = skipdecode.load("demo", dtype="float32")
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    width = inputs["input_ids"].shape[1]
    for call, tokens in zip(calls, found, strict=True):
        skipdecode.attach(model, speedup=call.get("speedup", 5))
        options = {"max_new_tokens": 12, "do_sample": False, "num_beams": call.get("num_beams", 1)}
        rows = 1 if call.get("stream") else 2
        expected = model.generate(**{name: value[:rows] for name, value in inputs.items()}, **options)
        assert tokens == expected[:, width:].tolist()
    assert len({json.dumps(tokens) for tokens in found}) > 2


def test_an_adapter_acts_in_its_model(checkpoint: Path, tmp_path: Path) -> None:
    """The folder of a trained adapter carries the code; the model is loaded as it is."""
    write_jsonl(tmp_path / "prompts.jsonl", ({"prompt": text} for text in TEXTS))
    options = ["--own-texts", 20, "--max-new-tokens", 8, "--speedup", 2, "--max-steps", 1]
    options += ["--learning-rate", 0.5, "--prompts", tmp_path / "prompts.jsonl"]
    done = run("train", checkpoint, *options, "--output", tmp_path / "fast")
    assert done.returncode == 0, done.stderr
    folder = str(tmp_path / "fast")
    calls: list[dict[str, Any]] = [{"adapter": folder, "speedup": 2}, {"adapter": folder, "speedup": 1}]
    found = alone(tmp_path, model=str(checkpoint), folder=folder, prompts=TEXTS[:1], calls=calls)
    model, tokenizer = skipdecode.load(folder, dtype="float32")
    assert gates_of(model).adapter is not None
    inputs = tokenizer(TEXTS[:1], return_tensors="pt", return_token_type_ids=False)
    for call, tokens in zip(calls, found, strict=True):
        skipdecode.attach(model, speedup=call["speedup"])
        expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        assert tokens == expected[:, inputs["input_ids"].shape[1] :].tolist()


def test_an_adapter_acts_again_after_detach(tmp_path: Path) -> None:
    """And after another one has taken its place: what was read before is not taken for what acts."""
    model = build("llama")
    for name, seed in (("a", 0), ("b", 1)):
        torch.manual_seed(seed)
        made = Adapter(model.config.hidden_size, 4, {2.0: Schedule(LAYERS, 4, 4, horizon=1, decay="constant")})
        for weight in made.parameters():
            nn.init.normal_(weight)
        save_adapter(tmp_path / name, made, model, "tiny")
    inputs: dict[str, Any] = prompts()

    def written(**options: Any) -> list[list[int]]:
        return generate(model, **inputs, speedup=2, max_new_tokens=8, do_sample=False, **options).tolist()

    expected = written(adapter=tmp_path / "a")
    assert written() == expected
    other = written(adapter=tmp_path / "b")
    assert other != expected
    assert written(adapter=tmp_path / "a") == expected
    skipdecode.attach(model, adapter=tmp_path / "b")
    assert written(adapter=tmp_path / "a") == expected
    skipdecode.detach(model)
    assert written(adapter=tmp_path / "a") == expected


def test_gates_of_another_copy_are_refused() -> None:
    """As of the installed package, whose adapter would not act."""
    model = build("llama")
    layer = model.model.layers[0]
    layer.forward = type("Gate", (), {"__call__": lambda self, *a, **k: type(layer).forward(layer, *a, **k)})()
    inputs: dict[str, Any] = prompts()
    with pytest.raises(UsageError, match="gates of another copy"):
        generate(model, **inputs, speedup=2)


@pytest.mark.parametrize("name", sorted(sources()))
def test_its_files_are_those_of_the_package(name: str) -> None:
    """But for where they import from; and they import nothing of it that is not beside them."""
    (path,) = [each for each in ROOT.rglob(name) if each.parent.name in ("core", "hub", ROOT.name)]
    ours, theirs = path.read_text().splitlines(), sources()[name].splitlines()
    changed = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    assert all(a.lstrip().startswith("from ..") and b.lstrip().startswith("from .") for a, b in changed)
    beside = [line.split()[1][1:] for line in theirs if line.lstrip().startswith("from .")]
    assert all(f"{module}.py" in sources() for module in beside)
