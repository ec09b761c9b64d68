"""LangChain's standard tests of chat models, against a server that runs: the same ones pass as against stock vLLM.

    skipdecode serve smollm2 --adapter results/smollm2/adapter --speedups 1,1.5,2 --enable-auto-tool-choice \
        --tool-call-parser hermes --max-model-len 4096                       # or vLLM's own server, and MODEL=smollm2
    pip install langchain-tests langchain-openai                             # in another environment
    MODEL=smollm2:1x pytest tests/torture/langchain_suite.py --noconftest -c /dev/null -o asyncio_mode=auto \
        -o asyncio_default_test_loop_scope=session -o asyncio_default_fixture_loop_scope=session

The tests of tools fail with SmolLM2, which does not write calls that can be read.
"""

from __future__ import annotations

import os
from typing import Any

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestServer(ChatModelIntegrationTests):
    """One model's name of the server at URL."""

    @property
    def chat_model_class(self) -> Any:
        """The client that is tested."""
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """Its arguments."""
        url = os.environ.get("URL", "http://localhost:8000/v1")
        options = {"temperature": 0, "max_tokens": 200, "stream_usage": True}
        return {"model": os.environ["MODEL"], "base_url": url, "api_key": "none", **options}

    @property
    def supports_json_mode(self) -> bool:
        """Whether the tests of JSON run too."""
        return True
