"""Conversations: answers do not depend on the prompt that is kept between turns. ``tests/cli`` has whole ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from helpers.tiny import TEXTS, train_tokenizer
from skipdecode import Schedule, SkipCache, attach
from skipdecode.generation.chat import CHAT_SAMPLING, Conversation, PromptCache, sampling_options
from skipdecode.model.cache_name import CACHE

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 320}
SCHEDULES = [Schedule.full(4), Schedule.for_speedup(2, 4)]


@pytest.fixture(scope="module", params=["full", "sliding"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    if request.param == "full":
        return attach(LlamaForCausalLM(LlamaConfig(**SIZES)).eval())
    return attach(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)).eval())


@torch.no_grad()
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_kept_prompt_changes_no_output(model: Any, schedule: Schedule) -> None:
    """Prompts that grow, differ in the middle, or are shorter than the one before; only new tokens are computed."""
    widths: list[int] = []
    prompts = PromptCache(model)
    for ids in ([5, 6, 7], [*range(5, 15)], [*range(5, 20)], [5, 6, 9, *range(8, 18)], [5, 6], [*range(5, 20)]):
        hook = model.get_input_embeddings().register_forward_pre_hook(lambda m, args: widths.append(args[0].shape[1]))
        cache = SkipCache(model, schedule, prefix=prompts.prefix(ids, schedule))
        hook.remove()
        options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
        kept = model.generate(torch.tensor([ids]), **{CACHE: cache}, **options)
        fresh = model.generate(torch.tensor([ids]), **{CACHE: SkipCache(model, schedule)}, **options)
        assert kept.tolist() == fresh.tolist()
    assert widths == ([2, 7, 5, 10, 13] if isinstance(model, LlamaForCausalLM) else [2, 7, 5, 12, 1, 13])


def test_schedules_that_skip_in_the_prompt_start_anew(model: Any) -> None:
    assert PromptCache(model).prefix([5, 6, 7], Schedule(4, 3, 2, 8, prompt_layers=3)) is None


def test_an_interrupted_prompt_is_begun_anew(model: Any) -> None:
    """The cache holds part of it."""

    def stop(module: Any, args: Any) -> None:
        raise KeyboardInterrupt

    prompts = PromptCache(model)
    prompts.prefix([5, 6, 7], SCHEDULES[0])
    hook = model.get_output_embeddings().register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        prompts.prefix([5, 6, 7, 8], SCHEDULES[0])
    hook.remove()
    prefix = prompts.prefix([5, 6, 7, 8], SCHEDULES[0])
    assert prefix is not None
    assert prefix.get_seq_length() == 3


def test_an_answer_that_is_stopped_stays_in_the_conversation(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As far as it was printed."""
    tokenizer = train_tokenizer(TEXTS * 20, 320)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    conversation = Conversation(model, tokenizer, "be brief")
    steps = iter(range(3))

    def stop(module: Any, args: Any) -> None:
        if next(steps, None) is None:
            raise KeyboardInterrupt

    hook = model.get_output_embeddings().register_forward_pre_hook(stop)
    assert conversation.answer("the cat", SCHEDULES[1], max_new_tokens=9) is None
    hook.remove()
    system, user, answer = conversation.messages
    assert (system.content, user.content) == ("be brief", "the cat")
    assert answer.content
    assert capsys.readouterr().out == f"{answer.content}\n"


def test_sampling_is_the_users_then_the_adapters_then_the_models() -> None:
    """Which ``model.generate`` adds; else that of small chat models. Temperature 0 is greedy."""

    def options(config: GenerationConfig, chosen: Any, **sampling: float) -> Any:
        return sampling_options(cast(Any, SimpleNamespace(generation_config=config, sampling=sampling)), chosen)

    greedy, sampled = GenerationConfig(), GenerationConfig(do_sample=True, temperature=0.6, top_p=0.95)
    assert options(greedy, {}) == CHAT_SAMPLING | {"do_sample": True}
    assert options(sampled, {"top_p": 0.5, "temperature": None}) == {"do_sample": True, "top_p": 0.5}
    assert options(sampled, {"top_p": 0.5}, min_p=0.1, top_p=0.7) == {"do_sample": True, "top_p": 0.5, "min_p": 0.1}
    assert options(greedy, {"temperature": 0}) == {"repetition_penalty": 1.1}
    assert options(GenerationConfig(do_sample=True, temperature=0.0), {}) == {}


def test_a_checkpoints_beams_are_set_aside(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They could not be printed as they grow."""
    tokenizer = train_tokenizer(TEXTS * 20, 320)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    monkeypatch.setattr(model.generation_config, "num_beams", 4)
    assert Conversation(model, tokenizer).answer("the cat", SCHEDULES[1], max_new_tokens=3) is not None
