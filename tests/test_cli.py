"""The verbs that show and prove things, on a tiny checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import skipdecode
from skipdecode import Schedule, cache, gate, prefix
from skipdecode.check import CHECKS
from tiny import run, save_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), positions=256)


def test_schedule_shows_saves_and_draws(tmp_path):
    plan = Schedule.for_speedup(3, 24, 40)
    files = ("--png", tmp_path / "s.png", "--save", tmp_path / "s.json")
    done = run("schedule", "--speedup", 3, "--layers", 24, "--horizon", 40, *files)
    assert done.returncode == 0, done.stderr
    assert f"{plan.layer_ratio(40):.2f}x" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("layer")]
    assert sum(row.count("█") for row in rows) == sum(plan.depth(g) for g in range(40))
    assert Schedule.load(tmp_path / "s.json") == plan
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"
    assert Schedule.from_json(run("schedule", "--speedup", 3, "--layers", 24, "--horizon", 40, "--json").stdout) == plan


def test_schedules_and_help_need_no_torch():
    """The first answer comes at once: torch and transformers are imported by the verbs that use them."""
    code = (
        "import sys, skipdecode.cli, skipdecode.schedule; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_check_proves_a_sound_model(checkpoint):
    done = run("check", checkpoint, "--json")
    findings = json.loads(done.stdout)
    assert done.returncode == 0, findings
    assert len(findings) == len(CHECKS)
    assert all(finding["held"] for finding in findings)


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (gate.GateState, "like_output", lambda right, self, hidden: right(self, hidden * 1.01)),
        (gate.GateState, "like_output", lambda right, self, hidden: right(self, hidden * 0)),
        (cache.SkipCache, "begin_layer", lambda right, self, index, width: right(self, index, width) or width),
        (prefix.Prefix, "of_call", lambda right, self, forward, args, kwargs: (args, kwargs)),
    ],
    ids=["scaled", "forgotten", "skipped-layers-run", "uncut"],
)
def test_check_fails_where_skipping_is_broken(checkpoint, monkeypatch, place, name, fault):
    """Hidden states passed on wrongly or not at all, layers that run though skipped, arguments uncut."""
    right = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *arguments: fault(right, *arguments))
    done = run("check", checkpoint, "--json")
    assert done.returncode == 1
    held = {finding["claim"]: finding["held"] for finding in json.loads(done.stdout)}
    assert held["inert at full depth"]
    assert not all(held.values())


@pytest.mark.parametrize("claim", ["a second run writes the same", "a used cache is refused"])
def test_check_finds_what_a_run_leaves_behind(checkpoint, monkeypatch, claim):
    """A model with noise in it; a guard that lets a second prompt in."""
    if claim == "a used cache is refused":
        monkeypatch.setattr(cache.SkipCache, "begin_prompt", lambda self: None)
        monkeypatch.setattr(cache.SkipCache, "_refuse", lambda self, what: None)
    else:
        model, _ = skipdecode.load(str(checkpoint))
        model.get_input_embeddings().register_forward_hook(lambda m, args, output: output + torch.randn_like(output))
        monkeypatch.setattr("skipdecode.loading.load", lambda *args, **kwargs: (model, None))
    done = run("check", checkpoint, "--json")
    assert done.returncode == 1
    assert not {finding["claim"]: finding["held"] for finding in json.loads(done.stdout)}[claim]


def test_check_takes_schedules_that_begin_at_full_depth(checkpoint):
    done = run("check", checkpoint, "--speedup", 1.2, "--json")
    assert done.returncode == 0, done.stdout


def test_a_checkpoint_saved_without_a_cache_still_decodes_with_one(checkpoint, tmp_path):
    for name in ("config.json", "generation_config.json"):
        values = json.loads((checkpoint / name).read_text()) | {"use_cache": False}
        (tmp_path / name).write_text(json.dumps(values))
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    done = run("generate", tmp_path, "--max-new-tokens", 5, "--speedup", 2, stdin=b"the cat\n")
    assert done.returncode == 0, done.stderr
    assert run("check", tmp_path).returncode == 0


def test_demo_times_every_speed_and_draws(checkpoint, tmp_path):
    picture = tmp_path / "demo.png"
    done = run("demo", checkpoint, "--repeats", 1, "--speedups", "1,2,4", "--png", picture, "--json")
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout.splitlines()[-1])
    assert [row["target"] for row in numbers["rows"]] == [1, 2, 4]
    ratios = [row["layer_ratio"] for row in numbers["rows"]]
    assert ratios[0] == 1
    assert ratios == sorted(ratios)
    assert all(row["seconds"] > 0 and row["step_ms"] > 0 for row in numbers["rows"])
    assert picture.stat().st_size > 10_000


def test_demo_needs_the_full_speed_to_compare_with(checkpoint):
    done = run("demo", checkpoint, "--speedups", "2,3")
    assert done.returncode == 2
    assert "needs 1 among them" in done.stderr


def test_library_and_command_line_write_the_same(checkpoint, tmp_path):
    (tmp_path / "in.txt").write_text("the cat\nthe dog sat\n")
    options = ("--max-new-tokens", 7, "--speedup", 2)
    done = run("generate", checkpoint, "--input", tmp_path / "in.txt", *options)
    model, tokenizer = skipdecode.load(str(checkpoint))
    result = skipdecode.generate(
        model, tokenizer, ["the cat", "the dog sat"], speedup=2, max_new_tokens=7, do_sample=False
    )
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == [row.text for row in result.rows]


def test_full_is_the_stock_model(checkpoint):
    model, tokenizer = skipdecode.load(str(checkpoint))
    texts = ["the cat", "the dog sat"]
    full = skipdecode.generate(model, tokenizer, texts, full=True, max_new_tokens=9, do_sample=False)
    gate.detach(model)
    batch = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    stock = model.generate(**batch, max_new_tokens=9, do_sample=False)
    new = stock[:, batch["input_ids"].shape[1] :]
    assert [row.text for row in full.rows] == [tokenizer.decode(r, skip_special_tokens=True).strip() for r in new]
    assert full.cost.layer_ratio == 1


def test_more_positions_than_the_model_has_is_named(checkpoint):
    model, tokenizer = skipdecode.load(str(checkpoint))
    with pytest.raises(ValueError, match="model has 256"):
        skipdecode.generate(model, tokenizer, ["the cat"], max_new_tokens=300)
