"""The experiments are what they are called: depth rules reach their speed-ups, pruning is skipping, a search finds."""

from __future__ import annotations

import json
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import skipdecode
from depth_rules import RULES
from helpers import tiny
from helpers.families import FAMILIES, build
from helpers.tiny import EXAMPLES
from pruned import prune, small_model
from search import drop_layers
from skipdecode import Schedule
from skipdecode.errors import UnsupportedModel
from skipdecode.loading.load import Checkpoint
from skipdecode.model.config import config_schedules
from skipdecode.model.inspect import decoder_layers

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def run(script: str, *arguments: object) -> None:
    done = tiny.run(*arguments, program=partial(runpy.run_path, str(EXPERIMENTS / script), run_name="__main__"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("rule", RULES)
def test_a_depth_rule_reaches_its_speedup(rule: str) -> None:
    """First and last layer stay, as their papers say; at 1x all layers do."""
    for layers in (24, 32):
        assert RULES[rule](layers, 1, 40).is_full
        for speedup in (2, 3, 4, 5):
            schedule = RULES[rule](layers, speedup, 40)
            assert schedule.layer_ratio(40) == pytest.approx(speedup, rel=0.09)
            assert {0, layers - 1} <= set(schedule.layers(schedule.min_depth))


#: Inputs for each layer from one table; keys of layers that would be gone; layers of a kind that their place decides.
UNCUT = ("gemma3n", "gemma4", "gemma4-shared", "jamba")


@pytest.mark.parametrize("name", FAMILIES)
def test_pruning_is_skipping_in_the_prompt_too(name: str) -> None:
    network = skipdecode.attach(build(name))
    ids = torch.randint(2, 100, (2, 7))
    layers = (0, 3, 6, 7)
    if name in UNCUT:
        with pytest.raises(UnsupportedModel, match="cannot be cut to layers 0, 3, 6, 7"):
            prune(network, layers)
        return
    order = (*layers, *(i for i in range(8) if i not in layers))
    schedule = Schedule(8, 4, 4, 1, decay="constant", order=order)
    with torch.no_grad(), skipdecode.teacher_forced(network, schedule, 0):
        expected = network(ids).logits
    with torch.no_grad():
        torch.testing.assert_close(prune(network, layers)(ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_small_model_from_scratch_shares_the_form_alone() -> None:
    network = build("llama")
    ours, theirs = small_model(network, (0, 7)).state_dict(), prune(network, (0, 7)).state_dict()
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(ours[name], theirs[name])


def test_the_search_drops_what_is_missed_least() -> None:
    """Layer 0 is never tried; of the others those of the least cost go first."""
    cost = [9, 1, 5, 3, 7, 2]

    def kl(schedules: Any) -> list[float]:
        return [sum(cost) - sum(cost[layer] for layer in each.layers(each.max_depth)) for each in schedules]

    found = drop_layers(6, 3, kl)
    assert found.layers(3) == (0, 2, 4)
    assert found.ranking == (0, 2, 4, 3, 5, 1)


def test_checkpoints_are_prepared_and_compared(checkpoint: Path, tmp_path: Path) -> None:
    run("prepare.py", "hsd", checkpoint, tmp_path / "hsd", "--speedups", "2,4", "--steps", 11)
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "hsd").config
    assert config_schedules(config) == {k: RULES["hsd"](8, k, 11) for k in (2.0, 4.0)}
    run("prepare.py", "static", checkpoint, tmp_path / "static-4", "--speedups", 4)
    assert len(decoder_layers(AutoModelForCausalLM.from_pretrained(tmp_path / "static-4"))) == 2
    rows = [f"hsd={tmp_path / 'hsd'}", f"static={tmp_path}/static-{{speedup}}", "d3", "calm"]
    data = tmp_path / "prompts.txt"
    data.write_text("".join(f"{example.prompt}\n" for example in EXAMPLES[:4]))
    options = ("--data", data, "--speedups", 4, "--max-new-tokens", 8, "--timing-rounds", 1)
    run("compare.py", checkpoint, *rows, *options, "--output", tmp_path / "table")
    saved = json.loads((tmp_path / "table" / "table.json").read_text())["rows"]
    assert [row["method"] for row in saved] == ["full", "hsd", "static", "d3", "calm"]
    hsd, static, _, calm = saved[1:]
    assert hsd["schedule"] == Checkpoint.resolve(tmp_path / "hsd").schedules[4.0].to_dict()
    assert static["prompt_layers"] == 2
    assert static["step_layer_ratio"] == static["job_layer_ratio"] == 4
    assert calm["token_layer_ratio"] >= calm["step_layer_ratio"]
    assert calm["threshold_horizon"] == saved[0]["longest_steps"]
    # One pass over a text does not do what CALM does.
    assert ["kl" in row for row in saved] == [row is not calm for row in saved]


def test_a_searched_schedule_is_written(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("".join(f"{example.prompt}\n" for example in EXAMPLES[:4]))
    options = ("--speedup", 1.34, "--max-new-tokens", 6, "--output", tmp_path / "s.json")
    run("search.py", checkpoint, tmp_path / "prompts.txt", *options)
    schedule = Schedule.load(tmp_path / "s.json")
    assert schedule.max_depth == 6
    assert 0 in schedule.layers(6)
