"""What the plugin touches of vLLM is listed, so that another release can be compared before anything runs."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import skipdecode.serving
from skipdecode.serving import cpu_worker, frontend, gpu_worker, plugin, runner_v1, runner_v2, touched
from skipdecode.serving import kv_blocks as blocks


def test_the_tested_release_is_as_the_list_says() -> None:
    """Every function with its parameters, every attribute."""
    assert touched.changes() == []


def test_what_is_gone_or_takes_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module, a method, a parameter, an order, an attribute."""
    engine = "vllm.v1.engine.async_llm.AsyncLLM"
    functions = {
        "vllm.nothing.like_this": "",
        f"{engine}.never": "self",
        f"{engine}.generate": "self prompt depth",
        f"{engine}.__init__": "vllm_config self",
    }
    monkeypatch.setattr(touched, "FUNCTIONS", functions)
    monkeypatch.setattr(touched, "ATTRIBUTES", {engine: "input_processor depths"})
    found = touched.changes()
    assert len(found) == 5
    expected = ("gone", "gone", "prompt, depth is expected", "takes self", "depths")
    assert all(said in words for said, words in zip(expected, found, strict=True))


def overridden() -> set[str]:
    """The methods of vLLM's classes that ours replace, by vLLM's own name."""
    ours: list[type] = [cpu_worker.SkipCPUWorker, gpu_worker.SkipGPUWorker, frontend.TokenTimes]
    ours += [value for value in vars(blocks).values() if inspect.isclass(value) and value.__module__ == blocks.__name__]
    found = set()
    for kind in ours:
        for base in kind.__mro__:
            if base.__module__.startswith("skipdecode"):
                for name, value in vars(base).items():
                    owners = [each for each in kind.__mro__ if each.__module__.startswith("vllm")]
                    owner = next((each for each in owners if name in vars(each)), None)
                    if owner and callable(getattr(value, "__func__", value)) and not hasattr(object, name):
                        found.add(f"{owner.__module__}.{owner.__qualname__}.{name}")
    return found


def test_the_list_has_every_method_that_ours_replace() -> None:
    """Whatever class of vLLM defines it; runners are mixins over classes that are found at run time."""
    names = {name.rpartition(".")[2] for name in touched.FUNCTIONS}
    assert {name.rpartition(".")[2] for name in overridden()} <= names
    for mixin in (runner_v1.SkippingV1, runner_v2.SkippingV2):
        methods = {name: value for name, value in vars(mixin).items() if inspect.isfunction(value)}
        assert {name for name, method in methods.items() if "super()" in inspect.getsource(method)} <= names


def test_the_list_has_every_patch() -> None:
    """Each call of ``patch`` in the plugin names a function of the list."""
    names = {name.rpartition(".")[2] for name in touched.FUNCTIONS} | {"check_and_update_config", "forward"}
    folder, seen = Path(skipdecode.serving.__file__).parent, 0
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "patch":
                name: Any = node.args[1]
                assert name.value in names, f"{file.name}: {name.value}"
                seen += 1
    assert seen > 10


def test_another_release_is_refused_with_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With consent, and where something is gone."""
    patched: list[Any] = []
    monkeypatch.setenv("SKIPDECODE_ALLOW_UNTESTED_VLLM", "1")
    monkeypatch.setattr("vllm.__version__", "9.9.9")
    monkeypatch.setattr(touched, "FUNCTIONS", {"vllm.nothing.like_this": ""})
    monkeypatch.setattr(plugin, "patch", lambda owner, name, ours: patched.append(ours))
    monkeypatch.setattr(plugin, "_patch", lambda: pytest.fail("it patches what has changed"))
    plugin.register()
    ((error,),) = patched[0].args  # the failures that it tells once a model has schedules
    assert "changed in 9.9.9: vllm.nothing.like_this is gone" in str(error)
