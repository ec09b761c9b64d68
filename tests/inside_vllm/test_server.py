"""A server of real processes and real clients: texts, names of speeds, refusals, metrics, load, shutdown."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from helpers.engine import Reference, Request, demo_prompts, demo_texts, requests_of
from helpers.server import CHAT, Answer, Server, ask, serve, together
from skipdecode import Schedule, load
from skipdecode.model.adapter import GENERATION, Adapter, save_adapter
from skipdecode.serving.metrics import RequestMetrics
from skipdecode.serving.settings import Serving

NEW = 32
INPUTS = demo_texts()
#: Of a request that names 3x: by the model's name, by the argument, by both.
WAYS = [
    {"model": "demo:3x"},
    {"model": "demo", "vllm_xargs": {"speedup": 3}},
    {"model": "demo:3x", "vllm_xargs": {"speedup": 3}},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model in float32: 1x by default, 5x while more than 8 wait; caching and chunks on, room for few."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "chat.jinja").write_text(CHAT, encoding="utf-8")
    # The time per token is followed, and never so long.
    load = ["--load-speedup", "5", "--load-waiting", "8", "--load-token-ms", "60000"]
    options = ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-num-seqs", "16"]
    options += ["--max-num-batched-tokens", "192", "--kv-cache-memory-bytes", str(40 << 20)]
    options += ["--chat-template", str(folder / "chat.jinja"), "--distributed-executor-backend", "uni"]
    with serve(folder, "--speedup", "1", *load, *options) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    """The ``openai`` package."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def solo() -> Reference:
    """What our own ``generate`` writes for each request alone."""
    return Reference(most_new=48)


@pytest.fixture(scope="module")
def mixed(solo: Reference) -> list[tuple[int, ...]]:
    """Prompts of the demo model, and ids at random."""
    return demo_prompts(solo)


def text_of(solo: Reference, prompt: str, speedup: float) -> str:
    """What our own ``generate`` writes."""
    (tokens,) = solo.texts([Request(tuple(solo.tokenizer(prompt)["input_ids"]), speedup, NEW)])
    return str(solo.tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.mark.parametrize(("name", "expected"), [("demo", (0.7, 1.0)), ("demo:1x", (0.7, 1.0)), ("demo:3x", (0.2, 1.3))])
def test_an_adapters_sampling_is_its_speeds_alone(tmp_path: Path, name: str, expected: Any) -> None:
    """Before the model's, behind the operator's and the request's."""
    model, _ = load("demo", device="cpu")
    save_adapter(tmp_path, Adapter(model.config.hidden_size, 4, {3.0: Schedule(24, 8, 8, 1)}), model, "demo")
    (tmp_path / GENERATION).write_text('{"temperature": 0.2, "top_p": 0.5, "repetition_penalty": 1.2}')
    metrics = RequestMetrics(Serving(model.config, {"adapter": tmp_path, "speedups": [1, 3], "speedup": 1}), "demo")
    metrics.override = {"repetition_penalty": 1.3} if expected[1] != 1 else {}
    for request in (
        CompletionRequest(model=name, prompt="a", top_p=0.6),
        ChatCompletionRequest(model=name, messages=[], top_p=0.6),
        ResponsesRequest(model=name, input="a", top_p=0.6),
    ):
        params = metrics._to_sampling_params(type(request).to_sampling_params, request, 8, {"temperature": 0.7})
        assert (params.temperature, params.repetition_penalty) == expected
        assert params.top_p == 0.6


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


@pytest.mark.parametrize("way", WAYS, ids=["name", "argument", "both"])
def test_responses_and_messages(server: Server, client: Any, solo: Reference, way: Any) -> None:
    """The responses API, at once and in a stream, has no metrics in its answers; the server's count them."""

    async def respond(text: str, stream: bool) -> str:
        options: dict[str, Any] = {"temperature": 0, "max_output_tokens": NEW, "stream": stream, "extra_body": way}
        made = await client.responses.create(model=way["model"], input=text, **options)
        if not stream:
            return str(made.output_text)
        return "".join([event.delta async for event in made if event.type == "response.output_text.delta"])

    before = server.total("skipdecode_requests_total", speedup="3")
    expected = [text_of(solo, text, 3) for text in INPUTS[:2]]
    assert together(respond(INPUTS[0], False), respond(INPUTS[1], True)) == expected
    body = {"messages": [{"role": "user", "content": INPUTS[0]}], "max_tokens": NEW, "temperature": 0} | way
    _, answer = server.post("/v1/messages", body)  # Anthropic's API
    assert [block["text"] for block in json.loads(answer)["content"]] == expected[:1]
    assert server.total("skipdecode_requests_total", speedup="3") == before + 3


#: Path -> the prompt in a request's body.
PROMPTS = {
    "completions": '"prompt": "a"',
    "chat/completions": '"messages": [{"role": "user", "content": "a"}]',
    "responses": '"input": "a"',
}
OURS = "speedup must be one of 1, 2, 3, 4, 5, not"
#: JSON -> what the message says of it.
BAD = dict.fromkeys(("0", "1.234", '"fast"', "[1, 2]", "NaN", "Infinity", "9" * 400), OURS)
BAD["{}"] = "vllm_xargs.speedup"  # vLLM's own check


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
    _, text = server.post("/v1/completions", body)
    one, other = solo.texts([Request(tuple(prompt), 2.0, NEW) for prompt in prompts])
    choices = [tuple(choice["token_ids"]) for choice in json.loads(text)["choices"]]
    assert choices == [one, one, other, other]


def test_metrics_are_what_the_worker_ran(server: Server, client: Any) -> None:
    """Layer-tokens, as computed from schedules, are those that gates counted."""

    def counts() -> list[tuple[float, float]]:
        worker = json.loads(server.post("/collective_rpc", {"method": "skipdecode_layers"})[1])["results"][0]
        metrics = [server.total(f"skipdecode_{name}_total") for name in ("layer_tokens", "full_layer_tokens")]
        return list(zip(metrics, (worker["run"], worker["full"]), strict=True))

    before = counts()
    answers = [
        answer
        for text in INPUTS[:3]
        for speedup in (1, 3, 4)
        for answer in together(ask(client, f"{text} {speedup}", speedup, new=12, stream=True))
    ]
    new = [(metric - old[0], worker - old[1]) for (metric, worker), old in zip(counts(), before, strict=True)]
    for place, of in enumerate(("run", "of")):
        kinds = ("prompt_layer_tokens", "decode_layer_tokens")
        said = sum(answer.summary[kind][of] for answer in answers for kind in kinds)
        assert new[place] == (said, said)
    assert new[0] < new[1]


def test_under_load_new_requests_get_faster(server: Server, client: Any, solo: Reference, mixed: Any) -> None:
    """Only those that named no speed-up, only while others wait; each text is that of the speed it had."""
    speeds = [2.0] * 24 + [None] * 48
    prompts = [*mixed[:24], *mixed[:48]]
    moved_before = server.total("skipdecode_moved_requests_total")
    asked = [ask(client, list(prompt), speed, new=24) for prompt, speed in zip(prompts, speeds, strict=True)]
    answers = together(*asked)
    had = [answer.summary["speedup"] for answer in answers]
    assert had[:24] == [2.0] * 24
    assert 5.0 in had[24:]
    assert set(had[24:]) <= {1.0, 5.0}
    requests = [Request(prompt, speed, 24) for prompt, speed in zip(prompts, had, strict=True)]
    assert [tuple(answer.tokens) for answer in answers] == solo.texts(requests)
    assert server.total("skipdecode_moved_requests_total") - moved_before == had.count(5.0)
    (later,) = together(ask(client, list(mixed[0]), new=8))
    assert later.summary["speedup"] == 1
    assert server.total("skipdecode_under_load") == 0
    assert 0 < server.total("skipdecode_token_milliseconds") < 60000


def test_hundreds_of_requests_and_clients_that_leave(server: Server, client: Any, solo: Reference, mixed: Any) -> None:
    """Every completed answer is its solo answer; no block is lost."""
    source = random.Random(0)
    answers: dict[Request, Answer] = {}
    leavers = 0

    async def one(request: Request) -> None:
        nonlocal leavers
        leaves = source.random() < 0.25
        leavers += leaves
        chunks = source.randint(1, 20) if leaves else 1 << 30
        stream = leaves or source.random() < 0.5
        asked = ask(client, list(request.prompt), request.speedup, new=request.new, stream=stream, chunks=chunks)
        answer = await asked
        if not leaves:
            answers[request] = answer

    async def one_after_the_other(requests: Iterator[Request]) -> None:
        for request in requests:
            await one(request)

    requests = iter(requests_of(mixed, 300, seed=0, speedups=(1.0, 2.0, 3.0, 4.0, 5.0), most=40))
    together(*(one_after_the_other(requests) for _ in range(32)))
    assert leavers > 30
    assert len(answers) > 100
    assert [tuple(answer.tokens) for answer in answers.values()] == solo.texts([*answers])
    for _ in range(100):  # those who left are noticed at the next step
        usage = [server.total(f"vllm:{name}") for name in ("kv_cache_usage_perc", "num_requests_running")]
        if usage == [0, 0]:
            break
        time.sleep(0.1)
    assert usage == [0, 0]


def test_sigterm_lets_requests_end(server: Server, client: Any, solo: Reference, mixed: Any) -> None:
    """Clients that wait get their whole texts; then the server ends, with all its processes. The last test here."""
    requests = [Request(prompt, 2.0, 48) for prompt in mixed[40:56]] * 4  # more than the server takes at once
    below = psutil.Process(server.process.pid).children(recursive=True)

    # vLLM aborts those that come after the signal: it is sent once the engine has all of them.
    taken = [f"vllm:{name}" for name in ("num_requests_running", "num_requests_waiting", "request_success_total")]

    async def terminate() -> None:
        before = server.total(*taken)
        while await asyncio.to_thread(server.total, *taken) < before + len(requests):
            await asyncio.sleep(0)
        server.process.send_signal(signal.SIGTERM)

    *answers, _ = together(*(ask(client, list(r.prompt), 2, new=48) for r in requests), terminate())
    assert [tuple(answer.tokens) for answer in answers] == solo.texts(requests)
    assert server.process.wait(60) == 0
    assert not psutil.wait_procs(below, timeout=60)[1]
