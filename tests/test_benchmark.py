"""The clock compares equal numbers of steps, and says where its figures cannot be trusted."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import skipdecode
from helpers.tiny import TEXTS, run, save_checkpoint
from skipdecode import Schedule
from skipdecode.errors import ModelError
from skipdecode.generation.stats import GenerationOutput, GenerationStats
from skipdecode.latency.timing import Comparison, Timing, alternate, compare, forced, remarks, shown, typical_steps


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and rows for it."""
    folder = save_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    rows = [{"prompt": text[: 9 + i], "response": text[10:]} for i, text in enumerate(TEXTS)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_every_row_takes_the_steps_it_is_told(checkpoint: Path) -> None:
    """F13: whatever stops texts of the model, batches left-padded: steps and tokens are equal at every speed."""
    model, tokenizer = skipdecode.load(str(checkpoint))
    # Whatever it would write, it now ends at once, and with any of two tokens.
    first = model.generate(tokenizer("the", return_tensors="pt").input_ids, max_new_tokens=1, do_sample=False)[0, -1]
    model.generation_config.eos_token_id = [int(first), 1]
    common: dict[str, Any] = {"batch_size": 3, "max_new_tokens": 20, "do_sample": False}
    prompts = [text[: 9 + i] for i, text in enumerate(TEXTS[:8])]
    plans = {
        1.0: Schedule.full(8),
        2.0: Schedule.for_speedup(2, 8, 6, decay="linear"),
        4.0: Schedule.for_speedup(4, 8, 6, decay="linear"),
    }
    for steps in (1, 7):
        runs = {
            k: partial(skipdecode.generate, model, tokenizer, prompts, schedule=plan, **common | forced(steps))
            for k, plan in plans.items()
        }
        timings = alternate(runs, 1)
        for k, timing in timings.items():
            assert timing.result.lengths == [steps] * 3
            assert timing.stats.tokens == len(prompts) * (steps + 1)
            clock = compare(timings[1.0], timing)
            assert clock.layer_ratio == pytest.approx(plans[k].layer_ratio(steps))
            assert clock.ratio == pytest.approx(timings[1.0].seconds_per_1k / timing.seconds_per_1k)
            assert clock.decode_ratio == pytest.approx(timings[1.0].step_ms / timing.step_ms)


def timing(lengths: list[int], tokens: int, seconds: float) -> Timing:
    """A run that took this long."""
    steps = sum(lengths)
    cost = GenerationStats(8, rows=len(lengths), tokens=tokens, seconds=seconds, steps=steps, layer_steps=8 * steps)
    return Timing(GenerationOutput(cost, lengths=lengths), seconds, seconds / 2)


def test_a_straggler_is_refused_not_counted() -> None:
    """F13: full ran 127 steps for 245 tokens, the arm 34 for 139: no ratio comes of that."""
    with pytest.raises(ModelError, match="245 and 139 tokens"):
        compare(timing([100, 27], 245, 2.0), timing([17, 17], 139, 1.0))
    equal = compare(timing([20, 20], 42, 2.0), timing([20, 20], 42, 1.0))
    assert equal == Comparison(2, 2, 1)


def test_more_than_the_layers_saved_is_marked_and_so_are_few_rows() -> None:
    """F13: no figure exceeds the layer ratio by luck without saying so."""
    assert [shown(*pair) for pair in ((2.31, 2.3), (2.3, 2.3), (2.304, 2.299), (0.9, 1))] == [
        "2.31x*",
        "2.30x",
        "2.30x",
        "0.90x",
    ]
    assert set(remarks(["1.00x", "2.31x*"], 64, 10)) == {"*"}
    assert set(remarks(["1.00x"], 31, 10)) == set(remarks(["1.00x"], 64, 4)) == {"rough"}
    assert not remarks(["1.00x"], 32, 5)
    assert [typical_steps(lengths) for lengths in ([0], [9, 1, 5], [4, 8])] == [1, 5, 4]


@pytest.mark.slow
def test_one_row_of_the_table_is_of_one_run(checkpoint: Path, tmp_path: Path) -> None:
    """F13: seconds per token and clock cannot contradict, and both stand beside the layers of the same steps."""
    options = ("--max-new-tokens", 12, "--limit", 6, "--repeats", 1, "--timing-rows", 6, "--batch-size", 4)
    methods = ("--speedups", "2,4", "--methods", "skipdecode,unified")
    done = run("evaluate", checkpoint, "--data", checkpoint, "--output", tmp_path, *options, *methods, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    full, *rows = result["rows"]
    assert full["job_clock_ratio"] == full["step_clock_ratio"] == full["timed_step_layer_ratio"] == 1
    for row in rows:
        assert row["timed_steps"] == full["timed_steps"]
        assert (row["timed_rows"], row["timed_batches"]) == (6, 2)
        per_token = row["full_job_seconds_per_1k_tokens"] / row["job_seconds_per_1k_tokens"]
        assert row["job_clock_ratio"] == pytest.approx(per_token, rel=2e-3)
        assert row["step_clock_ratio"] == pytest.approx(row["full_step_ms"] / row["step_ms"], rel=2e-2)
        predicted = Schedule.from_dict(row["schedule"]).layer_ratio(row["timed_steps"])
        assert row["timed_step_layer_ratio"] == pytest.approx(predicted, rel=1e-3)
        assert 1 < row["timed_job_layer_ratio"] < row["timed_step_layer_ratio"]  # the prompt runs all layers
    table = (tmp_path / "table.md").read_text()
    assert "rough: the clock is that of 6 inputs and 2 timed batches" in table
    assert f"{full['timed_steps']} decode steps" in table
    ratios = [(row[f"{what}_clock_ratio"], row["timed_step_layer_ratio"]) for row in rows for what in ("step", "job")]
    assert "x* " in table or not any(clock > layers + 0.01 for clock, layers in ratios)
    assert "rough" in done.stderr
