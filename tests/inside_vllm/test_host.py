"""What a step of vLLM costs beside its layers: work that is not done.

The embedded checkpoint, eager. ``make test-vllm`` runs these in an environment of their own.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from helpers.engine import Request, engine, runner, scheduler, serve
from skipdecode.loading.load import DEMO
from skipdecode.serving import kv_blocks as blocks
from skipdecode.serving.attention import Groups

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
            group.build_metadata = lambda *args, of=of, **more: (built.append(1), of(*args, **more))[1]  # type: ignore[func-returns-value]
        serve(it, requests_of(8))
        whole = runner(it).skip_context.steps * len(groups)
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
        plan, buckets = runner(it).skip_context, scheduler(it).kv_cache_manager.coordinator.single_type_managers
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
