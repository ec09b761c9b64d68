"""The page of ``skipdecode play``."""

from __future__ import annotations

import importlib
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from skipdecode import Schedule, generate, load
from skipdecode.data.tokenize import encode_prompts
from skipdecode.errors import ModelError

PROMPT = "name Zizzi, food English, area riverside ->"
NEW = 24
SCHEDULES = {1.0: Schedule.full(24), 3.0: Schedule.for_speedup(3, 24)}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    return load("demo", dtype="float32")


@pytest.fixture(scope="module")
def web() -> Any:
    """The module under test, with gradio: seconds, for the one worker that runs these tests."""
    return importlib.import_module("skipdecode.web.play")


@pytest.fixture(scope="module")
def address(web: Any, demo: tuple[Any, Any]) -> Iterator[str]:
    blocks = web.page(*demo, SCHEDULES, "demo", NEW)
    web.launch(blocks, prevent_thread_lock=True, quiet=True)
    yield str(blocks.local_url)
    blocks.close()


def expected(demo: tuple[Any, Any]) -> list[str]:
    made = [generate(*demo, [PROMPT], schedule=each, max_new_tokens=NEW) for each in SCHEDULES.values()]
    return [each.completions[0].text for each in made]


def visible(html: str) -> str:
    return re.sub(r"<[^>]+>", "", html)


@pytest.fixture
def stream(web: Any, demo: tuple[Any, Any]) -> Callable[..., Any]:
    def eight_steps(schedule: Schedule, **options: Any) -> Any:
        made = web.TokenStream(demo[0], encode_prompts(demo[1], [PROMPT])[0], schedule, **options)
        for _ in range(8):
            made.step()
        return made

    return eight_steps


def test_a_greedy_stream_is_what_generate_generates(demo: tuple[Any, Any], stream: Callable[..., Any]) -> None:
    schedule = Schedule(24, 16, 8, 6, prompt_layers=20, prompt_decay=3)
    made = stream(schedule)
    (expected,) = generate(*demo, [PROMPT], schedule=schedule, max_new_tokens=8).completions
    assert demo[1].decode(made.tokens) == expected.text
    assert made.cache.step_depths == [schedule.depth(g) for g in range(7)]


def test_options_act_as_in_generate(demo: tuple[Any, Any], stream: Callable[..., Any]) -> None:
    options: dict[str, Any] = {"repetition_penalty": 1.5}
    (expected,) = generate(*demo, [PROMPT], schedule=SCHEDULES[3.0], max_new_tokens=8, **options).completions
    assert demo[1].decode(stream(SCHEDULES[3.0], **options).tokens) == expected.text
    likeliest = stream(SCHEDULES[3.0], do_sample=True, top_k=1)
    assert likeliest.tokens == stream(SCHEDULES[3.0]).tokens
    hot = [stream(SCHEDULES[3.0], do_sample=True, temperature=9.0).tokens for _ in range(2)]
    assert hot[0] == hot[1] != likeliest.tokens


def test_nan_never_becomes_a_token(demo: tuple[Any, Any], stream: Callable[..., Any]) -> None:
    made = stream(SCHEDULES[3.0])
    head = demo[0].get_output_embeddings()
    handle = head.register_forward_hook(lambda module, args, output: output * torch.nan)
    with pytest.raises(ModelError, match="NaN"):
        made.step()
    handle.remove()
    assert len(made.tokens) == 8


@pytest.mark.slow
def test_the_page_shows_what_generate_generates(demo: tuple[Any, Any], address: str) -> None:
    from gradio_client import Client

    shown = Client(address, verbose=False).predict(PROMPT, False, NEW, api_name="/generate")
    assert [visible(html) for html in shown[::2]] == expected(demo)
    assert "24.0 of 24 layers" in visible(shown[1])
    assert "8.0 of 24 layers" in visible(shown[3])


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_visitor_sees_both_outputs(demo: tuple[Any, Any], address: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.goto(address)
        tab.get_by_label("Prompt").fill(PROMPT)
        tab.get_by_role("button", name="Generate").click()
        for number, text in enumerate(expected(demo)):
            box = tab.locator(".text").nth(number)
            box.filter(has_text=text.strip()[-20:]).wait_for()
            assert box.inner_text().split() == text.split()
        browser.close()


def test_the_speeds_take_turns_by_time(web: Any) -> None:
    """The next token is always that of the output that has computed least."""

    class Fake:
        def __init__(self, cost: int) -> None:
            self.cost, self.seconds, self.tokens, self.done = cost, 0, [0], False

        def step(self) -> None:
            self.seconds += self.cost
            self.tokens.append(0)

    slow, fast = Fake(3), Fake(1)
    gaps: list[float] = []
    for each in (slow, fast):
        step = each.step
        each.step = lambda step=step: (step(), gaps.append(abs(slow.seconds - fast.seconds)))  # type: ignore[assignment,func-returns-value,misc]
    outputs: Any = [slow, fast]
    for _ in web.side_by_side(outputs, 10, threading.Lock()):
        pass
    assert max(gaps[:8]) <= 3
    assert slow.done
    assert fast.done


@pytest.mark.parametrize(
    ("text", "reference", "marks"),
    [
        ("a b c d", "a b c d", []),
        ("a b c d e f g h", "a x", ["b c d e f g h"]),
        ("a\nb c", "a\nx c", ["b"]),
        ("a <b>", "a", ["&lt;b&gt;"]),
        ("", "a b", []),
    ],
)
def test_words_are_marked_that_the_reference_lacks(web: Any, text: str, reference: str, marks: list[str]) -> None:
    html = web.mark_differences(text, reference, finished=True)
    assert " ".join(re.findall(r"<mark>\s*(.*?)</mark>", html)).split() == " ".join(marks).split()
    assert visible(html).replace("&lt;", "<").replace("&gt;", ">") == text


def test_words_beyond_an_unfinished_reference_are_not_marked(web: Any) -> None:
    assert "<mark>" not in web.mark_differences("a b c d", "a b", finished=False)
    assert "<mark>" in web.mark_differences("a b c d", "a b", finished=True)
