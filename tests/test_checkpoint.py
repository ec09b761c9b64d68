"""The embedded checkpoint is what its model card says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from skipdecode.data.inputs import read_items
from transformers import AutoModelForCausalLM

import skipdecode
from skipdecode.data.tasks import get_task
from skipdecode.loading.load import DEMO
from skipdecode.model.config import config_schedules

DATA = Path(__file__).parents[2] / "shared" / "data" / "e2e"


def figures() -> dict[tuple[int, str], float]:
    """BLEU and ROUGE-L by target speed-up, from the metadata of the model card."""
    results = ModelCard.load(DEMO / "README.md").data.eval_results
    assert results is not None
    return {(int(result.dataset_args["speedup"]), result.metric_type): result.metric_value for result in results}


def test_it_is_a_small_stock_opt_of_24_layers() -> None:
    """At most 25 MB, and schedules for 1x to 5x in its config."""
    files = list(DEMO.glob("*.safetensors"))
    assert 0 < sum(file.stat().st_size for file in files) <= 25e6
    model = AutoModelForCausalLM.from_pretrained(DEMO)
    assert type(model).__name__ == "OPTForCausalLM"
    assert model.config.num_hidden_layers == 24
    assert list(config_schedules(model.config)) == [1, 2, 3, 4, 5]


def test_it_names_the_restaurant_at_every_speed() -> None:
    """A text at each speed ends by itself and says what was asked for."""
    model, tokenizer = skipdecode.load()
    inputs = {"mr": "name[The Mill], eatType[pub], food[English], area[riverside]"}
    prompt = str(get_task("e2e").example(inputs).prompt)
    for speedup in (1, 2, 3, 4, 5):
        (found,) = skipdecode.generate(
            model, tokenizer, [prompt], speedup=speedup, max_new_tokens=60, do_sample=False
        ).completions
        assert found.finish_reason == "stop"
        assert "The Mill" in found.text
        assert "riverside" in found.text


@pytest.mark.parametrize(("speedup", "bleu", "rouge_l"), [(1, 71.90, 72.40), (5, 73.23, 73.58)])
def test_scores_on_the_rows_that_lie_beside_the_tests(speedup: int, bleu: float, rouge_l: float) -> None:
    """32 of the test inputs with all their references, always: one text that another CPU rounds otherwise is within 1.

    Written alone or in a batch, which is left-padded, a text is the same.
    """
    task = get_task("e2e")
    items = read_items(str(Path(__file__).parent / "data" / "e2e_32.csv"), task)
    assert len(items) == 32
    model, tokenizer = skipdecode.load()
    options: dict[str, Any] = {"speedup": speedup, "max_new_tokens": task.max_new_tokens, "do_sample": False}
    result = skipdecode.generate(model, tokenizer, [item.prompt for item in items], **options)
    scores = task.score([row.text for row in result.completions], [item.references for item in items])
    assert scores["bleu"] == pytest.approx(bleu, abs=1)
    assert scores["rouge_l"] == pytest.approx(rouge_l, abs=1)
    assert result.stats.layer_ratio == pytest.approx(speedup, rel=0.1)
    alone = skipdecode.generate(model, tokenizer, [items[0].prompt], **options)
    assert alone.completions[0].text == result.completions[0].text


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="the E2E release is not beside the checkout (docs/training.md)")
@pytest.mark.usefixtures("stemmed_once")
@pytest.mark.parametrize("speedup", [1, 5])
def test_scores_are_the_cards(speedup: int) -> None:
    """All 630 test inputs, greedy; other CPUs may round another way now and then, hence the 0.3."""
    task = get_task("e2e")
    examples = task.read(DATA, "test")
    model, tokenizer = skipdecode.load()
    prompts = [example.prompt for example in examples]
    options: dict[str, Any] = {"speedup": 1, "batch_size": 210} if speedup == 1 else {"speedup": speedup}
    result = skipdecode.generate(
        model, tokenizer, prompts, max_new_tokens=task.max_new_tokens, do_sample=False, **options
    )
    scores = task.score([row.text for row in result.completions], [example.references for example in examples])
    assert scores["bleu"] == pytest.approx(figures()[speedup, "bleu"], abs=0.3)
    assert scores["rouge_l"] == pytest.approx(figures()[speedup, "rouge"], abs=0.3)
    assert result.stats.layer_ratio == pytest.approx(speedup, rel=0.03)


def test_the_card_states_every_speed() -> None:
    """The card alone: its figures are checked above, all of them where the data is, on 32 inputs everywhere."""
    assert {speedup for speedup, _ in figures()} == {1, 2, 3, 4, 5}
    assert len(figures()) == 10


def test_the_card_claims_that_no_speed_costs_half_a_point() -> None:
    """The card alone, as above."""
    card = figures()
    assert card[1, "bleu"] >= 65.5
    for (_, metric), value in card.items():
        assert value >= card[1, metric] - 0.5
