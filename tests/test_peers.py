"""benchmarks/peers: what engines are asked, what comes back, and the report, on the engines of our own environment."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import skipdecode
from peers import checkpoint
from peers.catalogue import BASELINE, ENGINES, call, choose
from peers.engines.vllm_int8 import write_int8
from peers.measure import Places, Settings, measure
from peers.processes import EngineFailed, Running
from peers.report import agreement, markdown, save, summaries
from peers.run import main
from skipdecode import Schedule
from skipdecode.errors import UsageError

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "benchmarks" / "peers"
SETTINGS = Settings("opt-tiny", prompt_tokens=7, new_tokens=6, rounds=2, threads=1, precision="float32")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """A checkpoint of the tiny shape, no environments but ours, and a report to come."""
    folder = tmp_path_factory.mktemp("peers")
    checkpoint.write("opt-tiny", folder / "opt-tiny")
    return Places(folder, folder / "none", folder / "output")


@pytest.fixture(scope="module")
def rows(places: Places) -> list[dict[str, Any]]:
    """Real rounds of the engines that live here, and one that is not installed."""
    engines = ["transformers-static", "skipdecode", "vllm-eager", "economize"]
    return list(measure(SETTINGS, engines, [1, 3], places, lambda text: None))


@pytest.mark.slow
def test_engines_of_one_checkpoint_write_the_same_tokens(rows: list[dict[str, Any]]) -> None:
    """At full depth they are the baseline's; ours come at every speed, of which each has rounds of its own."""
    cells = [cell for cell in summaries(rows) if "failed" not in cell]
    assert {(cell["engine"], cell["speedup"], cell["batch"]) for cell in cells} == {
        *(("transformers-static", 1, batch) for batch in (1, 3)),
        *(("skipdecode", speedup, batch) for speedup in (1, 2, 3, 5) for batch in (1, 3)),
    }
    assert all(cell["agreement"] == 1 for cell in cells)
    for row in rows:
        if "failed" not in row:
            assert len(row["rounds"]) == len(row["baseline_rounds"]) == SETTINGS.rounds
            assert all(timed["prompt_seconds"] > 0 and timed["peak_rss"] > 1e8 for timed in row["rounds"])
            assert [len(tokens) for tokens in row["tokens"]] == [SETTINGS.new_tokens] * row["batch"]
            assert {"torch", "python"} <= set(row["versions"])
    written = {row["speedup"]: row["tokens"] for row in rows if row["engine"] == "skipdecode" and row["batch"] == 3}
    assert written[1] != written[5]  # the schedule of the call was run


@pytest.mark.slow
def test_what_cannot_run_is_a_row_with_its_reason(rows: list[dict[str, Any]]) -> None:
    """Neither an engine that is not installed nor one without the family is left out in silence."""
    reasons = {row["engine"]: row["failed"] for row in rows if "failed" in row}
    assert "environments.sh vllm" in reasons["vllm-eager"]
    assert "not opt" in reasons["economize"]
    text = markdown(summaries(rows), {})
    assert all(f"- not run: {engine}: {reason}" in text for engine, reason in reasons.items())


@pytest.mark.slow
def test_finished_cells_are_kept(rows: list[dict[str, Any]], places: Places) -> None:
    """The same command times nothing again; other settings are not mixed in."""
    said: list[str] = []
    again = list(measure(SETTINGS, ["skipdecode", "transformers-static"], [1, 3], places, said.append))
    finished = [row for row in rows if "failed" not in row]
    assert not said
    assert sorted(map(json.dumps, again)) == sorted(map(json.dumps, finished))
    other = Settings("opt-tiny", 7, 5, 2, 1, "float32")
    with pytest.raises(UsageError, match="other settings"):
        list(measure(other, ["skipdecode"], [1], places, said.append))


def test_a_process_sleeps_unless_it_is_asked_and_says_why_it_fails(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped between calls, so that nothing of it runs beside the engine that is timed; gone at the end."""
    interpreter = stub(tmp_path)
    monkeypatch.setattr("peers.processes.python", lambda *_: interpreter)
    with Running(ENGINES[BASELINE], {"threads": 1}, places.environments, tmp_path / "log") as running:
        assert _stops(running)
        answer = running.ask(checkpoint.prompts("opt-tiny", 2, 4), 3, {})
        assert [len(row) for row in answer["tokens"]] == [3, 3]
        assert _stops(running)
        for _ in range(3):  # what comes after its end fails for the first reason
            with pytest.raises(EngineFailed, match="unexpected"):
                running.ask([[5]], 3, {"unexpected": 1})
            running._process.wait(60)
    assert not Path(f"/proc/{running._process.pid}").exists()


def stub(folder: Path) -> Path:
    """What stands for the interpreter of an engine: it answers with zeros, and imports nothing that takes time."""
    program = "from peers.protocol import serve; serve(lambda job: lambda prompts, new: [[0] * new for _ in prompts])"
    path = folder / "stub"
    path.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{program}'\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_an_engine_that_dies_is_a_failed_row_of_every_batch(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it sleeps: it is not asked again, and the run goes on to its report."""
    interpreter = stub(tmp_path)
    monkeypatch.setattr("peers.processes.python", lambda *_: interpreter)
    started: list[Running] = []

    class Watched(Running):
        """Known to this test."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            started.append(self)

    def kill(said: str) -> None:
        if "batch 1" in said and "round 1" in said:
            os.killpg(started[1]._process.pid, signal.SIGKILL)

    monkeypatch.setattr("peers.measure.Running", Watched)
    settings = Settings("opt-tiny", prompt_tokens=4, new_tokens=3, rounds=1, threads=1, precision="float32")
    rows = list(measure(settings, ["transformers-static"], [1, 2, 3], replace(places, output=tmp_path), kill))
    assert [(row["batch"], row["failed"]) for row in rows] == [(n, "it ended with code -9") for n in (1, 2, 3)]


@pytest.mark.slow
def test_no_engine_outlives_the_one_that_asks_it(tmp_path: Path) -> None:
    """Not even where that is killed, and the engine is asleep."""
    job = {"threads": 1}
    program = (
        "import os, signal, sys; from pathlib import Path; from peers import processes; "
        "from peers.catalogue import ENGINES; from peers.processes import Running; "
        f"processes.python = lambda *_: Path({str(stub(tmp_path))!r}); "
        f"engine = Running(ENGINES['transformers'], {job}, Path('none'), Path({str(tmp_path / 'log')!r})); "
        "print(engine._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", program]
    paths = {"PYTHONPATH": f"{ROOT / 'src'}:{PEERS.parent}"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | paths, check=False)
    engine = Path("/proc") / done.stdout.strip() / "stat"
    assert done.returncode == -signal.SIGKILL, done.stderr
    for _ in range(2000):  # against hanging only
        if not engine.exists() or engine.read_text(encoding="utf-8").rpartition(") ")[2][0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("it is still there")


def _stops(running: Running) -> bool:
    """Whether the process is stopped, now or soon: a signal takes effect when its process would run next."""
    for _ in range(2000):  # against hanging only
        state = Path(f"/proc/{running._process.pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0]
        if state == "T":
            return True
        time.sleep(0.05)
    return False


def test_an_engine_that_prints_is_understood_and_one_that_writes_too_little_is_not(tmp_path: Path) -> None:
    """Its prints go to standard error; rows of another length than asked for are an error, not a speed."""
    program = (
        "from peers.protocol import serve\n"
        "def load(job):\n"
        "    print('loading', flush=True)\n"
        "    return lambda prompts, new_tokens: [[0] * min(new_tokens, 4) for _ in prompts]\n"
        "serve(load)\n"
    )
    asked: list[dict[str, Any]] = [{"prompts": [[1]], "new_tokens": new, "options": {}} for new in (4, 5)]
    lines = "".join(json.dumps(line) + "\n" for line in ({}, *asked))
    done = subprocess.run(
        [sys.executable, "-c", program], input=lines, capture_output=True, text=True, cwd=PEERS.parent, check=True
    )
    versions, four, five = map(json.loads, done.stdout.splitlines())
    assert set(versions) == {"versions"}
    assert four["tokens"] == [[0] * 4]
    assert "5 new tokens were asked for" in five["error"]
    assert "loading" in done.stderr


def _row(engine: str, seconds: list[tuple[float, float]], baseline: list[tuple[float, float]]) -> dict[str, Any]:
    """A row of (prompt, job) seconds by round, of four rows with eleven new tokens each."""
    clocks = [[{"prompt_seconds": p, "job_seconds": j, "peak_rss": 2e9} for p, j in m] for m in (seconds, baseline)]
    head = {"shape": "opt-tiny", "engine": engine, "precision": "bfloat16", "speedup": 1, "batch": 4}
    return head | {"settings": {"new_tokens": 11}, "versions": {}, "rounds": clocks[0], "baseline_rounds": clocks[1]}


def test_ratios_are_of_the_rounds_beside_each_other() -> None:
    """A machine that is twice as slow in one round moves no ratio; decoding leaves the prompt out."""
    row = _row("vllm", [(1, 3), (2, 6), (1, 3)], [(2, 6), (4, 12), (2, 6)])
    (cell,) = summaries([row])
    assert cell["decode_ratio"] == cell["job_ratio"] == cell["prompt_ratio"] == 2
    assert cell["decode_tokens_per_second"] == 4 * 10 / 2
    assert cell["job_tokens_per_second"] == 4 * 11 / 3
    assert cell["step_ms"] == 200
    assert cell["decode_spread"] == 1


def test_a_clock_that_cannot_tell_decoding_from_the_prompt_gives_no_speed() -> None:
    """A job that took no longer than its prompt alone is noise, and says so."""
    (cell,) = summaries([_row("vllm", [(1, 0.9), (1, 3), (1, 3)], [(2, 6)] * 3)])
    assert not {name for name in cell if name.startswith(("decode", "step"))}
    assert "too short" in markdown([cell], {})


def test_the_report_holds_every_cell(tmp_path: Path) -> None:
    """In all three files; a cell that failed has its reason in each."""
    failed = {"shape": "opt-tiny", "engine": "openvino", "precision": "bfloat16", "speedup": 1, "batch": 4}
    cells = summaries([_row("vllm", [(1, 3)], [(2, 6)]), failed | {"failed": "out of memory"}])
    save(cells, {"machine": "this one"}, tmp_path)
    texts = {name: (tmp_path / f"table.{name}").read_text(encoding="utf-8") for name in ("md", "csv", "json")}
    assert all("vllm" in text and "out of memory" in text for text in texts.values())
    assert [row["engine"] for row in json.loads(texts["json"])["rows"]] == ["vllm", "openvino"]
    assert "20.0 (2.00x)" in texts["md"]


def test_agreement_counts_up_to_the_first_difference() -> None:
    """What comes after it follows from other texts."""
    assert agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 0, 4], [5, 6, 7, 8]]) == 6 / 8


@pytest.mark.parametrize("new_tokens", [16, 64, 128])
@pytest.mark.parametrize("speedup", [2, 3, 5])
def test_economize_can_run_the_depths_of_a_call(speedup: int, new_tokens: int) -> None:
    """Its formula: a linear fall from the first to the last step, rounded to even; and no bottom layer is kept."""
    schedule = Schedule.from_dict(call(speedup, 24, new_tokens)["schedule"])
    progress = (torch.arange(new_tokens).float() / (new_tokens - 1)).clamp(0, 1)
    depths = (schedule.max_depth - (schedule.max_depth - schedule.min_depth) * progress).round().long()
    assert [schedule.depth(step) for step in range(new_tokens)] == depths.tolist()
    assert schedule.layers(schedule.min_depth)[0] == 24 - schedule.min_depth
    assert call(1, 24, new_tokens) == {}


def test_engines_are_chosen_by_name_or_all() -> None:
    """The baseline is beside all of them anyway; a name that is none is refused with those that are."""
    assert choose(["vllm-eager", "skipdecode", "vllm-eager"]) == ["vllm-eager", "skipdecode"]
    assert choose(["all"]) == [name for name in ENGINES if name != BASELINE]
    with pytest.raises(UsageError, match=r"no engine 'vlm'.*openvino"):
        choose(["vlm"])


def test_bad_options_are_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One line, exit code 2."""
    assert main(["--engines", "vlm", "--output", str(tmp_path)]) == 2
    assert main(["--shape", "opt-1.4b", "--engines", "vllm", "--work", str(tmp_path)]) == 2
    assert "opt-1.3b" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--new-tokens", "1"])
    assert not list(tmp_path.iterdir())


def test_the_checkpoint_ends_no_text_and_names_every_token(places: Places) -> None:
    """Logits of special tokens are zero; CTranslate2 is given names instead of ids."""
    model, tokenizer = skipdecode.load(str(places.work / "opt-tiny"), dtype="float32", device="cpu")
    prompts = checkpoint.prompts("opt-tiny", 3, 9)
    assert checkpoint.prompts("opt-tiny", 2, 9) == prompts[:2]
    assert min(map(min, prompts)) >= checkpoint.FIRST
    logits = model(torch.tensor(prompts)).logits
    assert not logits[..., : checkpoint.FIRST].any()
    assert (logits.amax(-1) > 1).all()
    assert sorted(tokenizer.get_vocab().values()) == list(range(model.config.vocab_size))
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == checkpoint.END


def test_int8_weights_are_the_nearest(places: Places, tmp_path: Path) -> None:
    """Half a step of each row's scale at most; embeddings and norms stay as they are."""
    folder = write_int8(places.work / "opt-tiny", tmp_path / "int8")
    whole, rounded = (load_file(path / "model.safetensors") for path in (places.work / "opt-tiny", folder))
    matrices = [name for name in rounded if rounded[name].dtype == torch.int8]
    assert len(matrices) == 8 * 6
    for name, tensor in whole.items():
        if name in matrices:
            scale = rounded[f"{name}_scale"]
            assert ((rounded[name] * scale - tensor).abs() <= 0.501 * scale).all()
        else:
            assert tensor.equal(rounded[name])


def test_the_script_and_the_documents_know_the_same_engines() -> None:
    """Each environment is one that the script makes; docs/peers.md names every engine."""
    script = (PEERS / "environments.sh").read_text(encoding="utf-8")
    assert subprocess.run(["bash", "-n", PEERS / "environments.sh"], check=False).returncode == 0
    made = set(re.findall(r"^\t([a-z0-9]+)\) echo", script, re.MULTILINE))
    assert made == {engine.environment for engine in ENGINES.values()} - {""} | {"llamacpp"}  # frontier.py's
    text = (ROOT / "docs" / "peers.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text or f"`-{name.partition('-')[2]}`" in text for name in ENGINES)
    assert all((PEERS / "engines" / f"{engine.program}.py").is_file() for engine in ENGINES.values())
