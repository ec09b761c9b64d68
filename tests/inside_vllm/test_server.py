"""A server of real processes and real clients: texts, speeds, refusals, metrics, load."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from openai import APIError, AsyncOpenAI
from skipdecode.evaluation.canary import Distance, metrics_text

import skipdecode
from helpers.engine import Reference, Request
from helpers.server import Server, ask, post, serve, together
from skipdecode.model.config import schedule_for
from skipdecode.model.teacher_forcing import PrefilledBatch

pytest_plugins = ["helpers.served"]
NEW = 32
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_generate(
    client: Any, solo: Reference, mixed: list[tuple[int, ...]], stream: bool
) -> None:
    """The ``openai`` package, all speeds at once; each response says which speed it had."""
    requests = [Request(prompt, speedup, NEW) for prompt in mixed[::8] for speedup in (1.0, 2.0, 3.0, 5.0)]
    answers = together(*(ask(client, list(r.prompt), r.speedup, new=NEW, stream=stream) for r in requests))
    assert [tuple(answer.tokens) for answer in answers] == solo.texts(requests)
    assert [answer.summary["speedup"] for answer in answers] == [r.speedup for r in requests]


@pytest.mark.parametrize("stream", [False, True])
def test_chat(client: Any, solo: Reference, inputs: list[str], stream: bool) -> None:
    """Chat completions take the same argument."""
    requests = [Request(tuple(solo.tokenizer(text)["input_ids"]), 3.0, NEW) for text in inputs[:4]]
    answers = together(*(ask(client, text, 3, new=NEW, stream=stream, chat=True) for text in inputs[:4]))
    expected = [solo.tokenizer.decode(text, skip_special_tokens=True) for text in solo.texts(requests)]
    assert [answer.text for answer in answers] == expected
    assert all(answer.summary["speedup"] == 3 for answer in answers)


@pytest.mark.parametrize("stream", [False, True])
def test_responses(server: Server, client: Any, solo: Reference, inputs: list[str], stream: bool) -> None:
    """The responses API takes it too; its answers have no metrics, the server's count them."""

    async def respond(text: str) -> str:
        options: dict[str, Any] = {"temperature": 0, "max_output_tokens": NEW, "stream": stream}
        made = await client.responses.create(
            model="demo", input=text, **options, extra_body={"vllm_xargs": {"speedup": 3}}
        )
        if not stream:
            return str(made.output_text)
        return "".join([event.delta async for event in made if event.type == "response.output_text.delta"])

    requests = [Request(tuple(solo.tokenizer(text)["input_ids"]), 3.0, NEW) for text in inputs[:4]]
    before = server.total("skipdecode_requests_total", speedup="3")
    expected = [solo.tokenizer.decode(text, skip_special_tokens=True) for text in solo.texts(requests)]
    assert together(*(respond(text) for text in inputs[:4])) == expected
    assert server.total("skipdecode_requests_total", speedup="3") == before + 4


@pytest.mark.parametrize("how", [{"model": "demo:3x"}, {"model": "demo:3x", "vllm_xargs": {"speedup": 3}}])
def test_responses_by_the_models_name(
    server: Server, client: Any, solo: Reference, inputs: list[str], how: dict[str, Any]
) -> None:
    """Streamed too, in another task than that which looks the name up; what is not offered is refused before."""

    async def respond(text: str) -> str:
        made = await client.responses.create(
            model=how["model"], input=text, temperature=0, max_output_tokens=NEW, stream=True, extra_body=how
        )
        return "".join([event.delta async for event in made if event.type == "response.output_text.delta"])

    requests = [Request(tuple(solo.tokenizer(text)["input_ids"]), 3.0, NEW) for text in inputs[:2]]
    expected = [solo.tokenizer.decode(text, skip_special_tokens=True) for text in solo.texts(requests)]
    assert together(*(respond(text) for text in inputs[:2])) == expected
    for name, speedup in (("demo", 99), ("demo:2x", 3)):
        body = {"model": name, "input": "a", "stream": True, "vllm_xargs": {"speedup": speedup}}
        status, answer = post(server, "/v1/responses", json.dumps(body))
        assert status == 400, answer


@pytest.mark.parametrize("how", [{"model": "demo:3x"}, {"model": "demo", "vllm_xargs": {"speedup": 3}}])
def test_messages(server: Server, solo: Reference, inputs: list[str], how: dict[str, Any]) -> None:
    """Anthropic's API, by the model's name and by the argument."""
    requests = [Request(tuple(solo.tokenizer(text)["input_ids"]), 3.0, NEW) for text in inputs[:4]]
    for text, expected in zip(inputs, solo.texts(requests), strict=False):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": NEW, "temperature": 0} | how
        status, answer = post(server, "/v1/messages", json.dumps(body))
        assert status == 200
        written = [block["text"] for block in json.loads(answer)["content"]]
        assert written == [solo.tokenizer.decode(expected, skip_special_tokens=True)]


def test_speeds_are_models(server: Server, client: Any, solo: Reference, inputs: list[str]) -> None:
    """Every client can ask by the model's name alone: each speed is listed, and writes what the argument would."""
    listed = [model["id"] for model in json.loads(server.get("/v1/models"))["data"]]
    assert listed == ["demo", *(f"demo:{speedup}x" for speedup in (1, 2, 3, 4, 5))]
    prompts = [tuple(solo.tokenizer(text)["input_ids"]) for text in inputs[:20]]
    requests = [Request(prompt, 1.0 + n % 5, NEW) for n, prompt in enumerate(prompts)]
    asked = [
        ask(client, text, new=NEW, stream=n % 2 > 0, chat=n % 3 > 0, model=f"demo:{1 + n % 5}x")
        for n, text in enumerate(inputs[:20])
    ]
    answers = together(*asked)
    expected = [solo.tokenizer.decode(text, skip_special_tokens=True) for text in solo.texts(requests)]
    assert [answer.text for answer in answers] == expected
    assert [answer.summary["speedup"] for answer in answers] == [r.speedup for r in requests]


def distances(solo: Reference, prompts: list[tuple[int, ...]], speedup: float) -> torch.Tensor:
    """(3, tokens), of each token but the first of a text: KL, whether it is full depth's, its nats there."""
    stock, _ = skipdecode.load("demo")
    texts, found = solo.texts([Request(prompt, speedup, 24) for prompt in prompts]), []
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([prompt + text])
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "prompt_length": len(prompt)}
        batch["position_ids"] = torch.arange(ids.shape[1])[None]
        with torch.no_grad():
            full = stock(ids).logits[0, len(prompt) : -1].log_softmax(-1)
            here = (
                PrefilledBatch(solo.model, batch)
                .logits(schedule_for(solo.model.config, speedup))[0, :-1]
                .log_softmax(-1)
            )
        wanted = torch.tensor(text[1:])
        nats = -full.gather(1, wanted[:, None])[:, 0]
        found.append(torch.stack([(full.exp() * (full - here)).sum(-1), full.argmax(-1) == wanted, nats]))
    return torch.cat(found, 1)


def test_the_dashboard_and_alerts_ask_for_what_there_is(server: Server, client: Any) -> None:
    """Every metric that they name, with the labels that they name."""
    together(ask(client, "a", 5, new=4))
    lines = server.get("/metrics") + metrics_text([Distance("demo:5x", 5, 1, 1, 0, 1, 0)], 0)
    known: dict[str, set[str]] = {name: set() for name in re.findall(r"^# TYPE ([a-z0-9_:]+) ", lines, re.MULTILINE)}
    for name, labels in re.findall(r"^([a-z][a-z0-9_:]*)(?:{(.*)})? ", lines, re.MULTILINE):
        known.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    files = [DEPLOY / "alerts.yaml", DEPLOY / "grafana" / "dashboard.json"]
    text = "".join(file.read_text("utf-8") for file in files).replace('\\"', '"')
    asked = re.findall(r"\b((?:skipdecode|vllm:)[a-z_:]+)(?:{([^{}]*)})?", text)
    assert len({name for name, _ in asked if name.startswith("skipdecode_")}) > 6
    for name, labels in asked:
        if name.startswith(("skipdecode_", "vllm:")):
            assert name in known, name
            assert {*re.findall(r"(\w+)\W?=", labels)} <= known[name], (name, labels)
    grouped = {label.strip() for found in re.findall(r"by \(([^)]*)\)", text) for label in found.split(",")}
    assert grouped <= set().union(*known.values())


def test_names_that_are_not_offered_or_contradict(server: Server) -> None:
    """No such model, as vLLM says it; the same speed twice is no contradiction; a name holds for its request alone."""

    def ask_for(model: str, speedup: float | None = None) -> tuple[int, str]:
        body: dict[str, Any] = {"model": model, "prompt": "a", "max_tokens": 2}
        if speedup:
            body["vllm_xargs"] = {"speedup": speedup}
        return post(server, "/v1/completions", json.dumps(body))

    assert ask_for("demo:7x")[0] == ask_for("demo:3")[0] == ask_for("demo:3.0x")[0] == 404
    assert ask_for("demo:3x", 3)[0] == 200
    status, said = ask_for("demo:3x", 2)
    assert status == 400
    assert "the model's name asks for 3x and vllm_xargs for 2" in said
    assert json.loads(ask_for("demo")[1])["metrics"]["skipdecode"]["speedup"] == 1


@pytest.mark.parametrize("speedup", [1, 3, 5])
def test_max_tokens_at_the_end_of_the_context(server: Server, mixed: list[tuple[int, ...]], speedup: int) -> None:
    """One less than there is room for, as many, and one more, which vLLM takes for as many; no room is HTTP 400."""
    room, long, reference = 8, sum(mixed, ()), Reference("demo", most_new=8)
    prompts = [long[at : at + 256 - room] for at in range(0, 2000, 100)]
    written = reference.texts([Request(prompt, speedup, room) for prompt in prompts])
    unended = [len(text) == room and text[-1] != reference.tokenizer.eos_token_id for text in written]
    prompt, text = prompts[unended.index(True)], written[unended.index(True)]
    body = {"model": "demo", "temperature": 0, "return_token_ids": True, "vllm_xargs": {"speedup": speedup}}
    for most in (room - 1, room, room + 1):
        status, said = post(server, "/v1/completions", json.dumps(body | {"prompt": prompt, "max_tokens": most}))
        assert status == 200, said
        (choice,) = json.loads(said)["choices"]
        assert (tuple(choice["token_ids"]), choice["finish_reason"]) == (text[:most], "length")
    for length in (256, 257):
        full = body | {"prompt": long[:length], "max_tokens": 1}
        assert post(server, "/v1/completions", json.dumps(full))[0] == 400


def test_a_request_that_names_none_gets_the_default(client: Any, solo: Reference, mixed: list[tuple[int, ...]]) -> None:
    """1x here: full depth, and the response says so."""
    (answer,) = together(ask(client, list(mixed[0]), new=NEW))
    assert tuple(answer.tokens) == solo.texts([Request(mixed[0], 1.0, NEW)])[0]
    layers = answer.summary["decode_layer_tokens"]
    assert answer.summary["speedup"] == 1
    assert layers["run"] == layers["of"] == 24 * (len(answer.tokens) - 1)


OURS = "speedup must be one of 1, 2, 3, 4, 5, not"
#: JSON -> what the message says of it.
BAD = dict.fromkeys(("0", "99", "-3", "1.234", '"fast"', '"3"', "[1, 2]", "NaN", "Infinity", "false"), OURS)
BAD |= {"{}": "vllm_xargs.speedup", "null": "vllm_xargs.speedup", "9" * 400: "extra_args"}  # vLLM's own checks


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", ["false", "true"])
@pytest.mark.parametrize("value", sorted(BAD), ids=lambda value: value[:9])
def test_a_bad_speedup_is_a_bad_request(server: Server, value: str, stream: str, path: str) -> None:
    """HTTP 400 before anything is written, for streams too, with what is allowed."""
    prompt = '"prompt": "a"' if path == "completions" else '"messages": [{"role": "user", "content": "a"}]'
    body = f'{{"model": "demo", {prompt}, "stream": {stream}, "vllm_xargs": {{"speedup": {value}}}}}'
    status, text = post(server, f"/v1/{path}", body)
    message = json.loads(text)["error"]["message"]
    assert status == 400
    assert BAD[value] in message


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ('"vllm_xargs": {"skipdecode": 3}', "skipdecode is no argument"),
        ('"vllm_xargs": {"Speedup": 3}', "Speedup is no argument"),
        ('"vllm_xargs": {"speed_up": 2}', "speed_up is no argument"),
        ('"speedup": 2', "speedup is no argument"),
        ('"use_beam_search": true, "n": 2', "beam search"),
    ],
)
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_what_would_be_ignored_or_not_exact_is_a_bad_request(server: Server, path: str, extra: str, said: str) -> None:
    """Our own arguments cannot be forged, nor written otherwise; beams have no schedule in vLLM."""
    prompts = {"completions": '"prompt": "a"', "responses": '"input": "a"'}
    prompt = prompts.get(path, '"messages": [{"role": "user", "content": "a"}]')
    if path == "responses" and "beam" in extra:
        pytest.skip("it has no beams")
    status, text = post(server, f"/v1/{path}", f'{{"model": "demo", {prompt}, {extra}}}')
    assert status == 400
    assert said in text


def test_a_seed_and_a_prompt_in_pieces(server: Server, client: Any, mixed: list[tuple[int, ...]]) -> None:
    """Several prompts share steps of 192 tokens, so that pieces are cut: the server goes on, texts are the seeds'."""

    async def sampled(prompt: tuple[int, ...]) -> str:
        made = await client.completions.create(
            model="demo", prompt=list(prompt), max_tokens=8, seed=7, extra_body={"vllm_xargs": {"speedup": 3}}
        )
        return str(made.choices[0].text)

    prompts = sorted(mixed, key=len)[-8:]
    at_once = together(*(sampled(prompt) for prompt in prompts))
    assert at_once == [together(sampled(prompt))[0] for prompt in prompts]


def test_several_texts_of_one_request(server: Server, solo: Reference, mixed: list[tuple[int, ...]]) -> None:
    """Two prompts, two texts each: one speed-up for all."""
    prompts = [list(mixed[3]), list(mixed[40])]
    body = {"model": "demo", "prompt": prompts, "n": 2, "max_tokens": NEW, "top_k": 1, "return_token_ids": True}
    before = server.total("skipdecode_requests_total", speedup="2")
    _, text = post(server, "/v1/completions", json.dumps(body | {"vllm_xargs": {"speedup": 2}}))
    expected = solo.texts([Request(tuple(prompt), 2.0, NEW) for prompt in prompts])
    choices = [tuple(choice["token_ids"]) for choice in json.loads(text)["choices"]]
    assert choices == [expected[0], expected[0], expected[1], expected[1]]
    assert server.total("skipdecode_requests_total", speedup="2") == before + 4


def test_curl(server: Server, solo: Reference, inputs: list[str]) -> None:
    """As docs/serving.md shows it, streamed."""
    body = {"model": "demo", "prompt": inputs[0], "max_tokens": NEW, "temperature": 0, "stream": True}
    body["vllm_xargs"] = {"speedup": 5}
    command = ["curl", "-sN", f"{server.url}/v1/completions", "-H", "content-type: application/json"]
    done = subprocess.run([*command, "-d", json.dumps(body)], capture_output=True, text=True, check=True, timeout=60)
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: {")]
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    (tokens,) = solo.texts([Request(tuple(solo.tokenizer(inputs[0])["input_ids"]), 5.0, NEW)])
    assert text == solo.tokenizer.decode(tokens, skip_special_tokens=True)
    assert done.stdout.rstrip().endswith("data: [DONE]")


def test_metrics_are_what_the_worker_ran(server: Server, client: Any, inputs: list[str]) -> None:
    """Layers times tokens, as computed here from schedules, are those that gates counted."""

    def worker() -> dict[str, int]:
        _, text = post(server, "/collective_rpc", '{"method": "skipdecode_layers"}')
        counted: dict[str, int] = json.loads(text)["results"][0]
        return counted

    def metrics() -> dict[str, float]:
        names = {"run": "skipdecode_layer_tokens_total", "full": "skipdecode_full_layer_tokens_total"}
        return {name: server.total(series) for name, series in names.items()}

    before, counted = metrics(), worker()
    answers = [
        answer
        for text in inputs[:3]
        for speedup in (1, 3, 4)
        for answer in together(ask(client, f"{text} {speedup}", speedup, new=12, stream=True))
    ]
    after, now = metrics(), worker()
    assert after["run"] - before["run"] == now["run"] - counted["run"] == now["needed"] - counted["needed"]
    assert after["full"] - before["full"] == now["full"] - counted["full"]
    kinds = ("prompt_layer_tokens", "decode_layer_tokens")
    assert sum(answer.summary[kind]["run"] for answer in answers for kind in kinds) == after["run"] - before["run"]


def test_under_load_new_requests_get_faster(
    server: Server, client: Any, solo: Reference, mixed: list[tuple[int, ...]]
) -> None:
    """Only those that named no speed-up, only while others wait; each text is that of the speed it had."""
    asked = [Request(prompt, 2.0, 24) for prompt in mixed[:24]]
    free = [Request(prompt, 1.0, 24) for prompt in mixed[:48]]
    moved_before = server.total("skipdecode_moved_requests_total")
    answers = together(
        *(ask(client, list(r.prompt), 2, new=24) for r in asked), *(ask(client, list(r.prompt), new=24) for r in free)
    )
    speeds = [answer.summary["speedup"] for answer in answers]
    assert speeds[:24] == [2.0] * 24
    assert {1.0, 5.0} >= set(speeds[24:]) > {1.0} or set(speeds[24:]) == {5.0}
    had = [Request(r.prompt, speed, 24) for r, speed in zip([*asked, *free], speeds, strict=True)]
    assert [tuple(answer.tokens) for answer in answers] == solo.texts(had)
    assert server.total("skipdecode_moved_requests_total") - moved_before == speeds.count(5.0)
    (later,) = together(ask(client, list(mixed[0]), new=4))
    assert later.summary["speedup"] == 1
    assert server.total("skipdecode_under_load") == 0
    together(ask(client, list(mixed[0]), new=8))
    assert 0 < server.total("skipdecode_token_milliseconds") < 60000


@pytest.fixture(autouse=True)
def _up(server: Server) -> Iterator[None]:
    """Whatever was asked, the server goes on."""
    yield
    assert server.process.poll() is None


def test_a_dead_engine_ends_the_server(tmp_path: Path) -> None:
    """SIGKILL: the client that waits gets an error, and the server ends with a code that has it restarted."""
    with serve(tmp_path, "--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(40 << 20)) as made:
        client = AsyncOpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0, timeout=60)

        async def waits() -> None:
            with pytest.raises(APIError):
                await ask(client, "a", 1, new=200)

        async def kills() -> None:
            await asyncio.sleep(0.2)
            children = psutil.Process(made.process.pid).children(recursive=True)
            next(each for each in children if "EngineCore" in " ".join(each.cmdline())).kill()

        together(waits(), kills())
        assert made.process.wait(60) not in (0, None)
