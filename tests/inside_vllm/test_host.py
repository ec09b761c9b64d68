"""What a step of vLLM costs beside its layers: work that is not done, and a head of 8 bits.

The embedded checkpoint, eager. ``make test-vllm`` runs these in an environment of their own.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from helpers.engine import Reference, Request, check_among_leavers, engine, runner, scheduler, serve
from skipdecode.errors import UnsupportedModel
from skipdecode.serving import blocks, head
from skipdecode.serving import runner as runners
from skipdecode.serving.head import Int8Product, multiplies_int8, quantize_head
from skipdecode.serving.narrow import Groups
from skipdecode.weights.loading import DEMO

SPEEDUPS = (1.0, 2.0, 3.0, 5.0)


def requests_of(count: int, speedups: tuple[float, ...] = SPEEDUPS, new: int = 40) -> list[Request]:
    """Random prompts."""
    source = random.Random(0)
    return [
        Request(tuple(source.choices(range(3, 1000), k=source.randint(8, 30))), source.choice(speedups), new)
        for _ in range(count)
    ]


def test_attentions_metadata_are_made_for_the_layers_of_a_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight buckets of three layers: each part is that of a few layers, and asks only their buckets."""
    asked: list[Counter[int]] = []
    found = Groups.__init__

    def made(self: Groups, *args: Any) -> None:
        found(self, *args)
        asked.append(Counter())
        of, counter = self._of, asked[-1]
        self._of = lambda name: (counter.update([self.groups[name][0]]), of(name))[1]  # type: ignore[method-assign]

    monkeypatch.setattr(Groups, "__init__", made)
    with engine(DEMO) as it:
        built: list[int] = []
        groups = [group for groups in runner(it).attn_groups for group in groups]
        for group in groups:
            of = group.build_metadata
            group.build_metadata = lambda *args, of=of: (built.append(1), of(*args))[1]  # type: ignore[func-returns-value]
        serve(it, requests_of(8))
        whole = runner(it).skip_plan.steps * len(groups)
    assert len(groups) == 8
    assert asked
    assert len(built) - whole == sum(len(counter) for counter in asked) < 0.75 * len(groups) * len(asked)


def test_a_step_that_changes_no_block_asks_no_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request takes blocks once per block of its text and once per bucket that it frees, not at every token."""
    calls: list[str] = []
    found = blocks.BucketManager.allocate_new_blocks

    def counted(self: Any, request_id: str, *args: Any) -> Any:
        calls.append(request_id)
        return found(self, request_id, *args)

    monkeypatch.setattr(blocks.BucketManager, "allocate_new_blocks", counted)
    with engine(DEMO, enable_prefix_caching=True) as it:
        params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True, extra_args={"speedup": 5.0})
        it.add_request("one", TokensPrompt(prompt_token_ids=list(range(3, 23))), params)
        while it.has_unfinished_requests():
            it.step()
        plan, buckets = runner(it).skip_plan, scheduler(it).kv_cache_manager.coordinator.single_type_managers
    assert len(buckets) == 8
    assert plan.steps == 96
    assert len(calls) <= 8 * (1 + 2 * 3 + 8)  # the prompt; each block, begun and full; each bucket's end


def test_the_log_says_at_the_start_what_becomes_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once."""
    lines: list[str] = []
    # vLLM takes handlers away where it makes an engine.
    monkeypatch.setattr(blocks.logger, "info", lambda text, *args: lines.append(text % args))
    with engine(DEMO):
        pass
    assert ["freed as layers retire, in 8 buckets of 3 layers" in text for text in lines] == [True]


def test_reloaded_weights_have_an_int8_head_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes the products of reloaded weights anew, or leaves ours of the old ones."""
    made: list[Any] = []
    monkeypatch.setattr(runners, "quantize_head", made.append)
    with engine(DEMO, additional_config={"skipdecode": {"int8_head": True}}) as it:
        texts = serve(it, requests_of(4)).tokens
        runner(it).reload_weights()
        assert made == [runner(it).model] * 2
        assert serve(it, requests_of(4)).tokens == texts


@pytest.mark.skipif(not multiplies_int8(), reason="needs a CPU that multiplies int8")
def test_an_int8_head_is_near_the_one_it_was_made_of_and_its_rows_stay_alone() -> None:
    """Logits within the rounding of 8 bits; a request's text does not depend on who shares its steps."""
    options = {"skipdecode": {"int8_head": True}}
    requests = requests_of(24)
    with engine(DEMO) as it:
        floats = serve(it, requests)
    with engine(DEMO, additional_config=options) as it:
        model = runner(it).model
        hidden = torch.randn(32, model.lm_head.weight.shape[1], generator=torch.Generator().manual_seed(0))
        logits, exact = model.compute_logits(hidden), hidden @ model.lm_head.weight.T
        exact = exact[:, : logits.shape[1]]
        assert logits.dtype == torch.float32
        assert 0 < (logits - exact).norm() < 0.02 * exact.norm()
        together = serve(it, requests)
        assert together.tokens == {i: serve(it, [request]).tokens[0] for i, request in enumerate(requests)}
    firsts = [floats.tokens[i][0] == together.tokens[i][0] for i in range(len(requests))]
    assert sum(firsts) >= 0.9 * len(firsts)


class Rounded(torch.nn.Module):
    """A head of 8 bits for our own ``generate``."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight, self.product = weight, Int8Product(weight.detach())

    def forward(self, x: Any) -> Any:
        return self.product(x, self.weight, None)


def test_texts_of_an_int8_head_are_those_of_generate_with_that_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in pieces, arrivals and clients that leave. Other CPUs multiply it worse, but alike in both."""
    monkeypatch.setattr(head, "multiplies_int8", lambda: True)
    reference = Reference("demo", most_new=40)
    reference.model.lm_head = Rounded(reference.model.lm_head.weight)
    options = {"skipdecode": {"int8_head": True}}
    with engine(DEMO, additional_config=options, max_num_batched_tokens=24, enable_chunked_prefill=True) as it:
        check_among_leavers(it, requests_of(48), reference, random.Random(2), leave=0.005)


def test_an_int8_head_is_refused_where_it_would_round_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without VNNI or AMX the product loses far more than 8 bits do."""
    monkeypatch.setattr(head, "multiplies_int8", lambda: False)
    with (
        pytest.raises(UnsupportedModel, match="int8_head needs a CPU that multiplies int8"),
        engine(DEMO, additional_config={"skipdecode": {"int8_head": True}}),
    ):
        pass


def test_a_head_that_is_none_of_floats_is_refused() -> None:
    """With the option's name, before any request."""
    with pytest.raises(UnsupportedModel, match="int8_head: Linear has no LM head of floats"):
        quantize_head(torch.nn.Linear(2, 2))
