"""One server for all tests that ask one: starting it takes longer than most of them. They name this as a pytest plugin.

A conftest.py beside them would be a second module of that name for mypy, and a package there would hide vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.engine import Reference, demo_prompts
from helpers.server import CHAT, Server, serve

#: Requests that wait for their first token, above which new ones that named no speed-up get 5x.
LOAD_WAITING = 8


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model in float32: 1x by default, 5x under load; caching and chunks on, room for few."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "chat.jinja").write_text(CHAT, encoding="utf-8")
    # The time per token is followed, and never so long.
    load = ["--load-speedup", "5", "--load-waiting", str(LOAD_WAITING), "--load-token-ms", "60000"]
    options = ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-num-seqs", "16"]
    options += ["--max-num-batched-tokens", "192", "--kv-cache-memory-bytes", str(40 << 20)]
    options += ["--chat-template", str(folder / "chat.jinja"), "--distributed-executor-backend", "uni"]
    with serve(folder, "--speedup", "1", *load, *options) as made:
        yield made


@pytest.fixture(scope="session")
def client(server: Server) -> Any:
    """The ``openai`` package."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture(scope="session")
def solo() -> Reference:
    """What our own ``generate`` writes for each request alone."""
    return Reference(most_new=48)


@pytest.fixture(scope="session")
def mixed(solo: Reference) -> list[tuple[int, ...]]:
    """Prompts of the demo model, and ids at random."""
    return demo_prompts(solo)
