"""``skipdecode play``: the texts are those of ``generate``, each on a clock of its own; the page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gradio_client import Client
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import sync_playwright

from helpers.tiny import run
from skipdecode import generate, load
from skipdecode.data.tokenize import encode_prompts
from skipdecode.errors import UsageError
from skipdecode.loading.load import DEMO
from skipdecode.schedule import Schedule
from skipdecode.web.drawing import marked, picture
from skipdecode.web.play import CHARACTERS, SIDE_BY_SIDE, launch, page, play, schedules_for
from skipdecode.web.turns import Turns
from skipdecode.web.writing import write_side_by_side

PROMPT = "name Zizzi, food English, area riverside ->"
NEW = 24
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DOCS = Path(__file__).parents[1] / "docs" / "images"


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any, dict[float, Schedule]]:
    """The embedded model, its tokenizer and the schedules shown of it."""
    model, tokenizer = load("demo", dtype="float32")
    return model, tokenizer, schedules_for(model.config)


@pytest.fixture(scope="module")
def address(demo: tuple[Any, Any, dict[float, Schedule]]) -> Iterator[str]:
    """Where the page is served."""
    blocks = page(*demo, name="demo")
    launch(blocks, prevent_thread_lock=True, quiet=True)
    yield str(blocks.local_url)
    blocks.close()


def alone(demo: tuple[Any, Any, dict[float, Schedule]], prompt: str = PROMPT, new: int = NEW) -> list[str]:
    """The text of each speed, by a call of its own."""
    model, tokenizer, schedules = demo
    made = [generate(model, tokenizer, [prompt], schedule=each, max_new_tokens=new) for each in schedules.values()]
    return [each.completions[0].text for each in made]


# --- texts in turn


@given(rounds=st.lists(st.integers(1, 12), min_size=1, max_size=4))
@settings(max_examples=20)
def test_one_thread_at_a_time_goes_on(rounds: list[int]) -> None:
    """The one whose clock has run least; and all end, whoever ends first."""
    turns, inside, seen = Turns(range(len(rounds)), threading.Lock()), [], list[bool]()

    def work(number: int) -> None:
        for turn in range(rounds[number]):
            turns.begin(number)
            inside.append(number)
            live = [each for each in range(len(rounds)) if each in turns._live]
            least = min(turns.seconds[each] for each in live)
            seen.append(inside == [number] and turns.seconds[number] == least)
            inside.remove(number)
            turns.end(number, last=turn == rounds[number] - 1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(rounds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert len(seen) == sum(rounds)
    assert all(seen)


def test_texts_are_those_of_generate(demo: tuple[Any, Any, dict[float, Schedule]]) -> None:
    """Only grow, and say what they ran and hold."""
    model, tokenizer, schedules = demo
    (ids,) = encode_prompts(tokenizer, [PROMPT])
    looks = [*write_side_by_side(model, tokenizer, ids, [*schedules.values()], threading.Lock(), max_new_tokens=NEW)]
    assert [each.text for each in looks[-1]] == alone(demo)
    assert all(each.done for each in looks[-1])
    for before, after in pairwise(looks):
        for old, new in zip(before, after, strict=True):
            assert new.tokens >= old.tokens
            assert new.depths[: len(old.depths)] == old.depths
    for written, schedule in zip(looks[-1], schedules.values(), strict=True):
        assert written.depths == tuple(schedule.depth(step) for step in range(len(written.depths)))
        assert written.seconds > 0
    assert looks[-1][0].kv_bytes > looks[-1][-1].kv_bytes > 0


def test_a_reader_that_leaves_stops_the_writing(demo: tuple[Any, Any, dict[float, Schedule]]) -> None:
    """Its threads end at their next token."""
    model, tokenizer, schedules = demo
    (ids,) = encode_prompts(tokenizer, [PROMPT])
    before = {*threading.enumerate()}
    options = {"max_new_tokens": 400, "min_new_tokens": 400}
    texts = write_side_by_side(model, tokenizer, ids, [*schedules.values()], threading.Lock(), **options)
    next(texts)
    mine = {*threading.enumerate()} - before
    texts.close()
    for thread in mine:
        thread.join(60)
    assert not any(thread.is_alive() for thread in mine)


def test_what_goes_wrong_in_a_text_is_raised(demo: tuple[Any, Any, dict[float, Schedule]]) -> None:
    """Rather than an endless wait."""
    model, tokenizer, schedules = demo
    texts = write_side_by_side(model, tokenizer, [5], [*schedules.values()], threading.Lock(), no_such_option=1)
    with pytest.raises(ValueError, match="no_such_option"):
        list(texts)


# --- what is shown


words = st.lists(st.sampled_from(["a", "b", "<b>", "c&d"]), max_size=8).map(" ".join)


@given(text=words, other=words)
def test_marks_change_no_word(text: str, other: str) -> None:
    """Without marks and escapes, the text is there; words of a text like the other are not marked."""
    shown = marked(text, other)
    plain = re.sub(r"</?mark>", "", shown)
    assert plain.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&") == text
    assert "<mark>" not in marked(text, text)


@given(depths=st.lists(st.integers(1, 6), max_size=20).map(lambda each: sorted(each, reverse=True)))
def test_the_picture_has_a_box_for_what_ran(depths: list[int]) -> None:
    """The blue area is the number of layers that the steps ran."""
    schedule = Schedule.from_depths(6, depths or [6])
    drawn = picture(schedule, 5, depths, 20)
    boxes = re.findall(r'class="step" x="[\d.]+" y="\d+" width="([\d.]+)" height="(\d+)"', drawn)
    assert sum(float(width) * int(height) / 4 for width, height in boxes) == sum(depths)


def test_speeds_that_are_shown() -> None:
    """1x and those trained for; as many as fit."""
    model, _ = load("demo")
    assert [*schedules_for(model.config)] == [1, 3, 5]
    assert [*schedules_for(model.config, None, (5, 1))] == [1, 5]
    with pytest.raises(UsageError, match=f"{SIDE_BY_SIDE} speed-ups"):
        schedules_for(model.config, None, (1, 2, 3, 4))
    done = run("play", "demo", "--speedups", "1,2,3,4")
    assert done.returncode == 2


# --- the page


def test_a_checkpoint_that_asks_for_two_passes_is_refused(tmp_path: Path) -> None:
    """At the start, as other commands refuse it, not in the middle of a text."""
    shutil.copytree(DEMO, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"guidance_scale": 1.5}))
    with pytest.raises(UsageError, match="guidance_scale"):
        play(str(tmp_path / "model"))


def test_a_port_that_is_taken_is_said() -> None:
    """Rather than a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("play", "demo", "--port", taken.getsockname()[1])
    assert done.returncode == 2
    assert "can listen on no such address" in done.stderr


def test_people_are_served_at_once(address: str, demo: tuple[Any, Any, dict[float, Schedule]]) -> None:
    """Both get their own text while both are written; what cannot be is said."""
    clients = [Client(address, verbose=False) for _ in range(2)]
    jobs = [
        client.submit(prompt, False, NEW, api_name="/write")
        for client, prompt in zip(clients, (PROMPT, "name Aromi, food Italian ->"), strict=True)
    ]
    for job, prompt in zip(jobs, (PROMPT, "name Aromi, food Italian ->"), strict=True):
        shown = job.result(timeout=120)
        assert [re.sub(r"<[^>]+>", "", html) for html in shown[::3]] == alone(demo, prompt)
    for prompt, said in (("", "a prompt first"), ("a " * CHARACTERS, "at most"), ("a " * (CHARACTERS // 3), "tokens")):
        with pytest.raises(Exception, match=said):
            clients[0].predict(prompt, False, NEW, api_name="/write")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")
def test_in_a_browser(
    address: str, demo: tuple[Any, Any, dict[float, Schedule]], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Types, waits, reads the texts; fits a phone; nothing is loaded from elsewhere, and the console stays empty."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 860})
        said, elsewhere = list[str](), list[str]()
        tab.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: None if request.url.startswith(address) else elsewhere.append(request.url))
        tab.goto(address)
        tab.get_by_label("Prompt").fill(PROMPT)
        tab.get_by_role("button", name="Write").click()
        tab.wait_for_function("document.querySelectorAll('.text[data-state=done]').length == 3", timeout=120_000)
        assert [" ".join(each.inner_text().split()) for each in tab.locator(".text").all()] == alone(demo, new=96)
        assert all("tokens/s" in each.inner_text() for each in tab.locator(".figures").all())
        assert tab.get_by_role("img").count() == 3
        tab.screenshot(path=tmp_path / "play.png")
        if pytestconfig.getoption("--update-golden"):
            shutil.copy(tmp_path / "play.png", DOCS / "play.png")
        schemes: list[tuple[int, Any]] = [(390, "light"), (1280, "dark")]
        for width, scheme in schemes:
            tab.set_viewport_size({"width": width, "height": 860})
            tab.emulate_media(color_scheme=scheme)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()
    assert not said
    assert not [url for url in elsewhere if not url.startswith(("data:", "blob:"))]
