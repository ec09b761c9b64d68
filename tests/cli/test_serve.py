"""``skipdecode serve``: what goes to our plugin, and what to vLLM; servers are in ``tests/serving``."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.tiny import run
from skipdecode.serving import server


def test_own_options_are_taken_and_others_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(server, "serve", lambda *arguments: calls.append(arguments))
    done = run("serve", "demo", "--speedups", "2,3", "--adapter", "fast", "--load-waiting", 8, "--port", 8000)
    assert done.returncode == 0, done.stderr
    own = {"speedups": (2.0, 3.0), "adapter": "fast", "load_waiting": 8}
    assert calls == [("demo", own, ["--port", "8000"])]
