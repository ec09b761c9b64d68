"""A server of real processes and real clients: texts, names of speeds, refusals, metrics, load, shutdown."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from helpers.engine import Reference, Request, demo_texts
from helpers.server import Answer, Server, ask, together

pytest_plugins = ["helpers.served"]
NEW = 32
INPUTS = demo_texts()
#: Of a request that names 3x: by the model's name, by the argument, by both.
WAYS = [
    {"model": "demo:3x"},
    {"model": "demo", "vllm_xargs": {"speedup": 3}},
    {"model": "demo:3x", "vllm_xargs": {"speedup": 3}},
]


@pytest.fixture(autouse=True)
def _up(server: Server, request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever was asked, the server goes on."""
    yield
    if request.node.name != "test_sigterm_lets_requests_end":
        assert server.process.poll() is None


def text_of(solo: Reference, prompt: str, speedup: float) -> str:
    """What our own ``generate`` writes."""
    (tokens,) = solo.texts([Request(tuple(solo.tokenizer(prompt)["input_ids"]), speedup, NEW)])
    return str(solo.tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_generate(client: Any, solo: Reference, mixed: Any, stream: bool) -> None:
    """The ``openai`` package, all speeds at once; each response says which speed it had."""
    requests = [Request(prompt, speedup, NEW) for prompt in mixed[::8] for speedup in (1.0, 2.0, 3.0, 5.0)]
    answers = together(*(ask(client, list(r.prompt), r.speedup, new=NEW, stream=stream) for r in requests))
    assert [tuple(answer.tokens) for answer in answers] == solo.texts(requests)
    assert [answer.summary["speedup"] for answer in answers] == [r.speedup for r in requests]


def test_speeds_are_models(server: Server, client: Any, solo: Reference) -> None:
    """Each speed is listed, and a request to its name writes what the argument would: completions and chats."""
    listed = [model["id"] for model in json.loads(server.get("/v1/models"))["data"]]
    assert listed == ["demo", *(f"demo:{speedup}x" for speedup in (1, 2, 3, 4, 5))]
    asked = [
        ask(client, text, new=NEW, stream=n % 2 > 0, chat=n % 3 > 0, model=f"demo:{1 + n % 5}x")
        for n, text in enumerate(INPUTS[:20])
    ]
    answers = together(*asked)
    assert [answer.text for answer in answers] == [text_of(solo, text, 1 + n % 5) for n, text in enumerate(INPUTS[:20])]
    assert [answer.summary["speedup"] for answer in answers] == [1 + n % 5 for n in range(20)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=["name", "argument", "both"])
def test_responses(server: Server, client: Any, solo: Reference, way: Any, stream: bool) -> None:
    """The responses API has no metrics in its answers; the server's count them."""

    async def respond(text: str) -> str:
        options: dict[str, Any] = {"temperature": 0, "max_output_tokens": NEW, "stream": stream, "extra_body": way}
        made = await client.responses.create(model=way["model"], input=text, **options)
        if not stream:
            return str(made.output_text)
        return "".join([event.delta async for event in made if event.type == "response.output_text.delta"])

    before = server.total("skipdecode_requests_total", speedup="3")
    assert together(*map(respond, INPUTS[:2])) == [text_of(solo, text, 3) for text in INPUTS[:2]]
    assert server.total("skipdecode_requests_total", speedup="3") == before + 2


@pytest.mark.parametrize("way", WAYS, ids=["name", "argument", "both"])
def test_messages(server: Server, solo: Reference, way: dict[str, Any]) -> None:
    """Anthropic's API."""
    body = {"messages": [{"role": "user", "content": INPUTS[0]}], "max_tokens": NEW, "temperature": 0} | way
    status, answer = server.post("/v1/messages", body)
    assert status == 200
    assert [block["text"] for block in json.loads(answer)["content"]] == [text_of(solo, INPUTS[0], 3)]


def test_a_request_that_names_none_gets_the_default(client: Any, solo: Reference, mixed: Any) -> None:
    """1x here, and the response says so."""
    (answer,) = together(ask(client, list(mixed[0]), new=NEW))
    assert tuple(answer.tokens) == solo.texts([Request(mixed[0], 1.0, NEW)])[0]
    layers = answer.summary["decode_layer_tokens"]
    assert answer.summary["speedup"] == 1
    assert layers["run"] == layers["of"] == 24 * (len(answer.tokens) - 1)


#: Path -> the prompt in a request's body.
PROMPTS = {
    "completions": '"prompt": "a"',
    "chat/completions": '"messages": [{"role": "user", "content": "a"}]',
    "responses": '"input": "a"',
}
OURS = "speedup must be one of 1, 2, 3, 4, 5, not"
#: JSON -> what the message says of it.
BAD = dict.fromkeys(("0", "99", "1.234", '"fast"', "[1, 2]", "NaN", "Infinity"), OURS)
BAD |= {"{}": "vllm_xargs.speedup", "9" * 400: "extra_args"}  # vLLM's own checks


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_bad_speedup_is_a_bad_request(server: Server, stream: str, path: str) -> None:
    """HTTP 400 before anything is written, for streams too; a name that is not offered is HTTP 404."""
    for value, said in BAD.items():
        body = f'{{"model": "demo", {PROMPTS[path]}, "stream": {stream}, "vllm_xargs": {{"speedup": {value}}}}}'
        status, text = server.post(f"/v1/{path}", body)
        assert (status, said in text) == (400, True), text
    both = f'{{"model": "demo:2x", {PROMPTS[path]}, "stream": {stream}, "vllm_xargs": {{"speedup": 3}}}}'
    status, text = server.post(f"/v1/{path}", both)
    assert (status, "asks for 2x and vllm_xargs for 3" in text) == (400, True)
    unknown = f'{{"model": "demo:9x", {PROMPTS[path]}, "stream": {stream}}}'
    assert server.post(f"/v1/{path}", unknown)[0] == 404


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_beams_are_a_bad_request(server: Server, path: str) -> None:
    status, text = server.post(f"/v1/{path}", f'{{"model": "demo", {PROMPTS[path]}, "use_beam_search": true, "n": 2}}')
    assert (status, "beam search" in text) == (400, True)


def test_several_texts_of_one_request(server: Server, solo: Reference, mixed: Any) -> None:
    """Two prompts, two texts each: one speed-up for all."""
    prompts = [list(mixed[3]), list(mixed[40])]
    body = {"model": "demo:2x", "prompt": prompts, "n": 2, "max_tokens": NEW, "top_k": 1, "return_token_ids": True}
    before = server.total("skipdecode_requests_total", speedup="2")
    _, text = server.post("/v1/completions", body)
    expected = solo.texts([Request(tuple(prompt), 2.0, NEW) for prompt in prompts])
    choices = [tuple(choice["token_ids"]) for choice in json.loads(text)["choices"]]
    assert choices == [expected[0], expected[0], expected[1], expected[1]]
    assert server.total("skipdecode_requests_total", speedup="2") == before + 4


def test_metrics_are_what_the_worker_ran(server: Server, client: Any) -> None:
    """Layer-tokens, as computed from schedules, are those that gates counted."""

    def worker() -> dict[str, int]:
        _, text = server.post("/collective_rpc", {"method": "skipdecode_layers"})
        counted: dict[str, int] = json.loads(text)["results"][0]
        return counted

    def metrics() -> dict[str, float]:
        names = {"run": "skipdecode_layer_tokens_total", "full": "skipdecode_full_layer_tokens_total"}
        return {name: server.total(series) for name, series in names.items()}

    before, counted = metrics(), worker()
    answers = [
        answer
        for text in INPUTS[:3]
        for speedup in (1, 3, 4)
        for answer in together(ask(client, f"{text} {speedup}", speedup, new=12, stream=True))
    ]
    after, now = metrics(), worker()
    assert after["run"] - before["run"] == now["run"] - counted["run"] == now["needed"] - counted["needed"]
    assert after["full"] - before["full"] == now["full"] - counted["full"]
    kinds = ("prompt_layer_tokens", "decode_layer_tokens")
    assert sum(answer.summary[kind]["run"] for answer in answers for kind in kinds) == after["run"] - before["run"]


def test_under_load_new_requests_get_faster(server: Server, client: Any, solo: Reference, mixed: Any) -> None:
    """Only those that named no speed-up, only while others wait; each text is that of the speed it had."""
    named = [Request(prompt, 2.0, 24) for prompt in mixed[:24]]
    free = [Request(prompt, 1.0, 24) for prompt in mixed[:48]]
    moved_before = server.total("skipdecode_moved_requests_total")
    answers = together(
        *(ask(client, list(r.prompt), 2, new=24) for r in named), *(ask(client, list(r.prompt), new=24) for r in free)
    )
    speeds = [answer.summary["speedup"] for answer in answers]
    assert speeds[:24] == [2.0] * 24
    assert 5.0 in speeds[24:]
    assert set(speeds[24:]) <= {1.0, 5.0}
    had = [Request(r.prompt, speed, 24) for r, speed in zip([*named, *free], speeds, strict=True)]
    assert [tuple(answer.tokens) for answer in answers] == solo.texts(had)
    assert server.total("skipdecode_moved_requests_total") - moved_before == speeds.count(5.0)
    (later,) = together(ask(client, list(mixed[0]), new=8))
    assert later.summary["speedup"] == 1
    assert server.total("skipdecode_under_load") == 0
    assert 0 < server.total("skipdecode_token_milliseconds") < 60000


def test_hundreds_of_requests_and_clients_that_leave(server: Server, client: Any, solo: Reference, mixed: Any) -> None:
    """Every completed answer is its solo answer; no block is lost."""
    count = 300
    source = random.Random(0)
    speeds = [source.choice((None, 1.0, 2.0, 3.0, 4.0, 5.0)) for _ in range(count)]
    requests = [Request(source.choice(mixed), speed or 1.0, source.randint(1, 40)) for speed in speeds]
    ways = source.choices(("answer", "stream", "leave", "leave stream"), (40, 35, 12, 13), k=count)
    patience = [source.uniform(0, 0.5) for _ in range(count)]
    answers: dict[int, Answer] = {}

    async def one(place: int) -> None:
        request, way = requests[place], ways[place]
        options: dict[str, Any] = {"new": request.new, "stream": "stream" in way}
        if way == "leave stream":
            options["chunks"] = 1 + int(40 * patience[place])
        asked = ask(client, list(request.prompt), speeds[place], **options)
        if way != "leave":
            answer = await asked
            if way != "leave stream":
                answers[place] = answer
            return
        try:
            await asyncio.wait_for(asked, patience[place])
        except (asyncio.TimeoutError, TimeoutError):
            return

    async def one_after_the_other(places: Iterator[int]) -> None:
        for place in places:
            await one(place)

    places = iter(range(count))
    together(*(one_after_the_other(places) for _ in range(32)))
    had = [Request(requests[n].prompt, answers[n].summary["speedup"], requests[n].new) for n in sorted(answers)]
    assert [tuple(answers[n].tokens) for n in sorted(answers)] == solo.texts(had)
    assert [r.speedup for n, r in zip(sorted(answers), had, strict=True) if speeds[n]] == [
        speeds[n] for n in sorted(answers) if speeds[n]
    ]
    for _ in range(100):  # those who left are noticed at the next step
        usage = [server.total(f"vllm:{name}") for name in ("kv_cache_usage_perc", "num_requests_running")]
        if usage == [0, 0]:
            break
        time.sleep(0.1)
    assert usage == [0, 0]


def test_sigterm_lets_requests_end(server: Server, client: Any, solo: Reference, mixed: Any) -> None:
    """Clients that wait get their whole texts; then the server ends, with all its processes. The last test here."""
    requests = [Request(prompt, 2.0, 48) for prompt in mixed[40:56]]
    below = psutil.Process(server.process.pid).children(recursive=True)

    async def terminate() -> None:
        while server.total("vllm:num_requests_running") < 8:
            await asyncio.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)

    *answers, _ = together(*(ask(client, list(r.prompt), 2, new=48) for r in requests), terminate())
    assert [tuple(answer.tokens) for answer in answers] == solo.texts(requests)
    assert server.process.wait(60) == 0
    assert not psutil.wait_procs(below, timeout=60)[1]
