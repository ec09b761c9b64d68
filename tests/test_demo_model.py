"""The demo model is what its model card says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import skipdecode
from skipdecode.data.examples import merge_references, read_examples
from skipdecode.data.metrics import Bleu, RougeL
from skipdecode.data.tasks import get_task
from skipdecode.loading.load import DEMO
from skipdecode.model.config import config_schedules


def test_it_is_a_small_stock_opt_of_24_layers() -> None:
    """At most 25 MB, and schedules for 1x to 5x in its config."""
    assert 0 < sum(file.stat().st_size for file in DEMO.glob("*.safetensors")) <= 25e6
    model = AutoModelForCausalLM.from_pretrained(DEMO)
    assert type(model).__name__ == "OPTForCausalLM"
    assert model.config.num_hidden_layers == 24
    assert list(config_schedules(model.config)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("speedup", "bleu", "rouge_l"), [(1, 71.90, 72.40), (5, 73.23, 73.58)])
def test_its_scores_on_32_test_inputs(speedup: int, bleu: float, rouge_l: float) -> None:
    """One text that another CPU rounds otherwise is within 1; alone or in a left-padded batch, a text is the same."""
    task = get_task("e2e")
    items = merge_references(read_examples(Path(__file__).parent / "data" / "e2e_32.csv", task))
    assert len(items) == 32
    model, tokenizer = skipdecode.load("demo")
    options: dict[str, Any] = {"speedup": speedup, "max_new_tokens": task.max_new_tokens}
    result = skipdecode.generate(model, tokenizer, [item.prompt for item in items], **options)
    texts = [row.text.strip() for row in result.completions]
    references = [item.references for item in items]
    assert Bleu().score(texts, references) == pytest.approx(bleu, abs=1)
    assert RougeL().score(texts, references) == pytest.approx(rouge_l, abs=1)
    assert result.stats.layer_ratio == pytest.approx(speedup, rel=0.1)
    alone = skipdecode.generate(model, tokenizer, [items[0].prompt], **options)
    assert alone.completions[0].text == result.completions[0].text
