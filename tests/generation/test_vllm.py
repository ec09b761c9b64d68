"""Jobs with vLLM: options in its terms. tests/inside_vllm/test_offline.py has the texts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from skipdecode import Schedule
from skipdecode.errors import MissingExtra, UsageError
from skipdecode.generation.job import GenerationJob
from skipdecode.generation.vllm import sampling_params, stats_of
from skipdecode.loading.load import Checkpoint

#: A checkpoint that asks for nothing but where texts end.
PLAIN = GenerationConfig(eos_token_id=2)


def params(defaults: GenerationConfig = PLAIN, **options: Any) -> dict[str, Any]:
    return sampling_params({"max_new_tokens": 9} | options, defaults)


def test_greedy_is_greedy_whatever_the_checkpoint_says() -> None:
    """Its sampling options mean nothing without ``do_sample``; its repetition penalty does."""
    found = params(GenerationConfig(do_sample=True, temperature=0.7, top_k=5, repetition_penalty=1.2))
    assert found["temperature"] == 0
    assert "top_k" not in found
    assert found["repetition_penalty"] == 1.2


def test_sampling_takes_options_then_the_checkpoint_then_transformers_defaults() -> None:
    """Top-k is 50 where nobody says anything: transformers' default, not vLLM's."""
    found = params(GenerationConfig(temperature=0.7, top_p=0.9), do_sample=True, top_p=0.5, min_new_tokens=3)
    assert (found["temperature"], found["top_p"], found["top_k"], found["min_p"]) == (0.7, 0.5, 50, 0)
    assert (found["max_tokens"], found["min_tokens"]) == (9, 3)
    assert sampling_params({}, PLAIN)["max_tokens"] == 20


def test_texts_end_where_transformers_ends_them() -> None:
    """By the option, else by the checkpoint's generation_config; a text holds the stop string that ended it."""
    assert params()["stop_token_ids"] == [2]
    assert params(GenerationConfig(eos_token_id=[2, 5]))["stop_token_ids"] == [2, 5]
    assert params(eos_token_id=4)["stop_token_ids"] == [4]
    assert params(GenerationConfig())["stop_token_ids"] == []
    assert params()["ignore_eos"] is True
    assert params()["detokenize"] is False
    found = params(GenerationConfig(stop_strings=["b"]), stop_strings="a")
    assert (found["stop"], found["include_stop_str_in_output"], "detokenize" in found) == ("a", True, False)
    assert params(GenerationConfig(stop_strings=["b"]))["stop"] == ["b"]


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"no_repeat_ngram_size": 3},
        {"do_sample": True, "typical_p": 0.5},
        {"forced_eos_token_id": 7},
        {"logits_processor": [object()]},
        {"bad_words_ids": [[4]]},
    ],
)
def test_what_vllm_lacks_is_refused_by_name(options: dict[str, Any]) -> None:
    """Never left out in silence; values that ask for nothing are taken."""
    *_, name = options
    with pytest.raises(UsageError, match=f"{name}: vLLM has nothing like it"):
        params(**options)
    assert params(num_beams=1, no_repeat_ngram_size=0, typical_p=None) == params()


def test_a_row_is_counted_as_if_it_were_alone() -> None:
    """Without padding, with the steps of its own text."""
    schedule = Schedule.from_depths(8, [6, 4, 2], prompt_layers=7)
    stats = stats_of(schedule, [3, 5], [1, 5])
    assert (stats.rows, stats.tokens, stats.steps, stats.row_steps) == (2, 6, 4, 4)
    assert stats.layer_steps == stats.row_layers == 6 + 4 + 2 + 2
    assert (stats.prompt_positions, stats.prompt_layer_positions) == (8, 7 * 8)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"load": {"quantization": "int8"}}, UsageError, "quantization does not go with the engine vllm"),
        ({"load": {"offload": "disk"}}, UsageError, "offload does not go"),
        ({"options": {"num_beams": 3, "max_new_tokens": 4}}, UsageError, "num_beams"),
        ({}, MissingExtra, r"pip install '\.\[vllm\]'"),
    ],
)
def test_a_job_that_vllm_cannot_run_is_refused(
    checkpoint: Path, options: dict[str, Any], error: Any, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    options = {"options": {"max_new_tokens": 4}} | options
    with pytest.raises(error, match=match):
        GenerationJob(Checkpoint.resolve(checkpoint), ["the cat"], engine="vllm", **options).run()
