"""``skipdecode canary``: its measure, and what it refuses. tests/inside_vllm/test_server.py asks a real server."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.tiny import run
from skipdecode.evaluation.canary import divergence

logits = st.lists(st.floats(-15, 15), min_size=8, max_size=8)


def likeliest(values: list[float], count: int) -> dict[int, float]:
    """The log-probabilities of the ``count`` likeliest of 8 tokens."""
    whole = math.log(sum(map(math.exp, values)))
    best = sorted(range(8), key=lambda token: -values[token])[:count]
    return {token: values[token] - whole for token in best}


@given(full=logits, here=logits, count=st.integers(1, 8))
def test_the_likeliest_alone_never_tell_of_more_distance(full: list[float], here: list[float], count: int) -> None:
    """It is at least 0, and at most that of the whole vocabulary."""
    p, q = likeliest(full, 8), likeliest(here, 8)
    whole = sum(math.exp(p[token]) * (p[token] - q[token]) for token in p)
    found = divergence(likeliest(full, count), likeliest(here, count))
    assert -1e-4 < found < whole + 1e-4
    assert divergence(p, p) == pytest.approx(0, abs=1e-6)


class Stub(BaseHTTPRequestHandler):
    """Answers each path with what ``answers`` of its server has for it."""

    def do_GET(self) -> None:
        status, body = self.server.answers[self.path]  # type: ignore[attr-defined]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode() if not isinstance(body, str) else body.encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[ThreadingHTTPServer]:
    """A server that lists the model ``m`` at full depth and at 2x, and whose prompts run half of the layers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    choice = {"token_ids": [5, 6], "prompt_logprobs": [None, *[{"5": {"logprob": -0.1}}] * 3]}
    choice["logprobs"] = {"top_logprobs": [{"token_id:5": -0.1}] * 2}
    ran = {"skipdecode": {"prompt_layer_tokens": {"run": 12, "of": 24}}}
    server.answers = {  # type: ignore[attr-defined]
        "/v1/models": (200, {"data": [{"id": "m"}, {"id": "m:1x"}, {"id": "m:2x"}]}),
        "/tokenize": (200, {"tokens": [1, 2]}),
        "/v1/completions": (200, {"choices": [choice], "metrics": ran}),
    }
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Two prompts."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    return file


NAMES = {"data": [{"id": "stock"}]}
CHANGES: list[tuple[str, tuple[int, Any], str]] = [
    ("/v1/models", (200, NAMES), "offers stock, no speeds"),
    ("/v1/models", (200, {"data": [{"id": "m"}, {"id": "m:1x"}]}), "nothing to compare"),
    ("/v1/models", (401, {"error": {"message": "no key"}}), "HTTP 401: no key"),
    ("/v1/models", (200, "<html>"), "no JSON"),
    ("/v1/models", (200, []), "lists no models"),
    ("/tokenize", (404, "<html>not here"), "HTTP 404: <html>not here"),
    ("/v1/completions", (200, {"choices": [{"token_ids": [5], "logprobs": {"top_logprobs": [{}]}}]}), "two tokens"),
    ("/unchanged", (200, {}), "run 50% of the layers"),
]


@pytest.mark.parametrize(("path", "answer", "said"), CHANGES, ids=[said for *_, said in CHANGES])
def test_what_a_server_says_is_passed_on(stub: Any, rows: Path, path: str, answer: tuple[int, Any], said: str) -> None:
    """One line, exit code 2."""
    stub.answers[path] = answer
    done = run("canary", f"http://127.0.0.1:{stub.server_port}/v1/", "--data", rows)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_speeds_that_are_not_offered(stub: Any, rows: Path) -> None:
    """With those that are."""
    done = run("canary", f"http://127.0.0.1:{stub.server_port}", "--data", rows, "--speedups", "2,3,5")
    assert done.returncode == 2
    assert "m:1x, m:2x, not 3x, 5x" in done.stderr


def test_no_prompts(stub: Any, tmp_path: Path) -> None:
    """Rows that are all bad are named, and that none is left."""
    rows = tmp_path / "bad.jsonl"
    rows.write_text('{"prompt": " "}\n')
    done = run("canary", f"http://127.0.0.1:{stub.server_port}", "--data", rows)
    assert done.returncode == 2
    assert "holds no prompts" in done.stderr


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nowhere", "http://[", "http://a b"])
def test_no_server(rows: Path, url: str) -> None:
    """No traceback."""
    done = run("canary", url, "--data", rows)
    assert done.returncode == 2
    assert f"{url}/v1/models does not answer" in done.stderr


def test_another_file_is_not_replaced(rows: Path) -> None:
    """Said before the server is asked."""
    done = run("canary", "nowhere", "--data", rows, "--metrics", rows)
    assert done.returncode == 2
    assert "was not written by skipdecode" in done.stderr
