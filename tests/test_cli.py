"""The verbs that show and prove things, on a tiny checkpoint."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from skipdecode.evaluation.plots import check_picture
from skipdecode.generation.batch import generate_batch
from transformers import LlamaConfig, LlamaForCausalLM

import skipdecode
from helpers.tiny import run
from skipdecode import Schedule
from skipdecode.cli import console
from skipdecode.cli import main as app
from skipdecode.cli.main import main
from skipdecode.data.tasks import TASKS
from skipdecode.errors import UsageError
from skipdecode.evaluation.exactness import CHECKS, in_float64, run_checks
from skipdecode.generation import generate as generation
from skipdecode.generation import job as jobs
from skipdecode.model import cache, gate, prefix


@pytest.fixture(scope="module")
def checkpoint(long_checkpoint: Path) -> Path:
    """With room for the texts of E2E."""
    return long_checkpoint


def test_schedule_shows_and_saves(tmp_path: Path) -> None:
    plan = Schedule.for_speedup(3, 24, 40, decay="linear")
    done = run("schedule", "--speedup", 3, "--layers", 24, "--horizon", 40, "--save", tmp_path / "s.json")
    assert done.returncode == 0, done.stderr
    assert f"{plan.layer_ratio(40):.2f}x" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("layer")]
    assert sum(row.count("█") for row in rows) == sum(plan.depth(g) for g in range(40))
    assert Schedule.load(tmp_path / "s.json") == plan
    shown = run("schedule", "--speedup", 3, "--layers", 24, "--horizon", 40, "--json").stdout
    assert Schedule.from_dict(json.loads(shown)) == plan


def test_schedules_and_help_need_no_torch() -> None:
    """The first answer comes at once: torch and transformers are imported by the verbs that use them."""
    code = (
        "import sys, skipdecode.cli.main, skipdecode.schedule\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_check_proves_a_sound_model(checkpoint: Path) -> None:
    done = run("check", checkpoint, "--json")
    findings = json.loads(done.stdout)
    assert done.returncode == 0, findings
    assert len(findings) == len(CHECKS)
    assert all(finding["held"] for finding in findings)


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (gate.Gates, "like_output", lambda right, self, hidden: right(self, hidden * 1.01)),
        (gate.Gates, "like_output", lambda right, self, hidden: right(self, hidden * 0)),
        (cache.SkipCache, "begin_layer", lambda right, self, index, width: right(self, index, width) or width),
        (prefix.Prefix, "of_call", lambda right, self, forward, args, kwargs: (args, kwargs)),
    ],
    ids=["scaled", "forgotten", "skipped-layers-run", "uncut"],
)
def test_check_fails_where_skipping_is_broken(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, place: type, name: str, fault: Any
) -> None:
    """Hidden states passed on wrongly or not at all, layers that run though skipped, arguments uncut."""
    right = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *arguments: fault(right, *arguments))
    done = run("check", checkpoint, "--json")
    assert done.returncode == 1
    held = {finding["claim"]: finding["held"] for finding in json.loads(done.stdout)}
    assert held["inert at full depth"]
    assert not all(held.values())


def test_check_tells_rounding_from_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """N1: without layer 1 the other layers' rounding is many times the stock model's; float64 tells it from a fault."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=10,
        num_attention_heads=4,
        initializer_range=1.0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    model.model.layers[1].mlp.down_proj.weight.data *= 1000
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    schedule = Schedule.for_speedup(1.3, 10, 8, decay="linear")
    with monkeypatch.context() as strict:  # how far float32 goes astray depends on the CPU: here it always does too far
        strict.setattr("skipdecode.evaluation.exactness.TOLERANCE", 1e-6)
        strict.setattr("skipdecode.evaluation.exactness.TIMES_STOCK", 0)
        findings = list(run_checks(model, schedule))
    assert [finding for finding in findings if not finding.held] == []
    assert any("in float64" in finding.detail for finding in findings)
    with in_float64(model):
        assert model.dtype == torch.float64
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name])
    right = gate.Gates.like_output
    monkeypatch.setattr(gate.Gates, "like_output", lambda self, hidden: right(self, hidden * (1 + 1e-4)))
    failed = {finding.claim for finding in run_checks(model, schedule) if not finding.held}
    assert failed >= {"cached decoding = these layers without a cache", "a training pass = these layers without gates"}


def test_check_finds_what_a_run_leaves_behind(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with noise in it."""
    model, _ = skipdecode.load(str(checkpoint))
    model.get_input_embeddings().register_forward_hook(lambda m, args, output: output + torch.randn_like(output))
    monkeypatch.setattr("skipdecode.evaluation.exactness.load", lambda *args, **kwargs: (model, None))
    done = run("check", checkpoint, "--json")
    assert done.returncode == 1
    assert not {finding["claim"]: finding["held"] for finding in json.loads(done.stdout)}[
        "a second run writes the same"
    ]


def test_check_takes_schedules_that_begin_at_full_depth(checkpoint: Path) -> None:
    done = run("check", checkpoint, "--speedup", 1.2, "--json")
    assert done.returncode == 0, done.stdout


def test_a_checkpoint_saved_without_a_cache_still_decodes_with_one(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        values = json.loads((checkpoint / name).read_text()) | {"use_cache": False}
        (tmp_path / name).write_text(json.dumps(values))
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    done = run("generate", tmp_path, "--max-new-tokens", 5, "--speedup", 2, stdin=b"the cat\n")
    assert done.returncode == 0, done.stderr
    assert run("check", tmp_path).returncode == 0


@pytest.mark.slow
def test_demo_times_every_speed_and_draws(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "e2e", replace(TASKS["e2e"], max_new_tokens=20))
    picture = tmp_path / "demo.png"
    done = run("demo", checkpoint, "--repeats", 1, "--speedups", "1,2,4", "--png", picture)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\d)x +[\d.]+ +([\d.]+)x ", done.stdout, re.MULTILINE)
    assert [target for target, _ in rows] == ["1", "2", "4"]
    ratios = [float(ratio) for _, ratio in rows]
    assert ratios[0] == 1
    assert ratios == sorted(ratios)
    assert picture.stat().st_size > 10_000
    check_picture(picture)
    picture.write_bytes(b"of the user's own")
    done = run("demo", checkpoint, "--png", picture)
    assert done.returncode == 2
    assert picture.read_bytes() == b"of the user's own"


def test_demo_needs_the_full_speed_to_compare_with(checkpoint: Path) -> None:
    done = run("demo", checkpoint, "--speedups", "2,3")
    assert done.returncode == 2
    assert "needs 1 among them" in done.stderr


def test_full_is_the_stock_model(checkpoint: Path) -> None:
    model, tokenizer = skipdecode.load(str(checkpoint))
    texts = ["the cat", "the dog sat"]
    full = skipdecode.generate(model, tokenizer, texts, speedup=1, max_new_tokens=9, do_sample=False)
    skipdecode.detach(model)
    batch = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    stock = model.generate(**batch, max_new_tokens=9, do_sample=False)
    new = stock[:, batch["input_ids"].shape[1] :]
    assert [row.text for row in full.completions] == [
        tokenizer.decode(r, skip_special_tokens=True).strip() for r in new
    ]
    assert full.stats.layer_ratio == 1


def in_error(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make reading the input fail with ``error``."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(jobs, "read_items", fail)


@pytest.mark.parametrize(
    "error", [ValueError("deep inside"), OSError("no number"), KeyError("x"), ModuleNotFoundError(name="mine")]
)
def test_a_fault_of_ours_keeps_its_traceback(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """B6: it is not taken for something that the user can mend."""
    in_error(monkeypatch, error)
    with pytest.raises(type(error)) as raised:
        run("generate", checkpoint)
    assert raised.value is error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UsageError("do this instead"), "skipdecode: do this instead"),
        (OSError(28, "No space left on device", "out"), "No space left on device: 'out'"),
        (
            ModuleNotFoundError("no", name="matplotlib.pyplot"),
            "matplotlib is not installed: pip install 'skipdecode[cli]'",
        ),
        (ModuleNotFoundError("no", name="datasets"), "datasets is not installed: pip install 'skipdecode[train]'"),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    """B6, H: exit code 2 and the remedy, also for a missing extra; ``SKIPDECODE_DEBUG`` shows where it came from."""
    in_error(monkeypatch, error)
    done = run("generate", checkpoint)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    monkeypatch.setenv("SKIPDECODE_DEBUG", "1")
    with pytest.raises(type(error)):
        run("generate", checkpoint)


@pytest.mark.parametrize("command", app.app.registered_commands, ids=lambda command: command.callback.__name__)
def test_every_command_can_be_stopped(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever options it has; those that resume by themselves say that they go on."""
    name = command.callback.__name__

    def stopped(**values: Any) -> None:
        raise app.Stopped(signal.SIGINT)

    monkeypatch.setattr(app, name, stopped)
    with pytest.raises(app.Stopped) as stop:
        app._run(stopped)(**dict.fromkeys(inspect.signature(command.callback).parameters))
    assert stop.value.goes_on == (name in {"generate", "train", "evaluate"})


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("to_file", [True, False])
def test_a_stopped_job_says_how_it_goes_on(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int, to_file: bool
) -> None:
    """H: one line, the exit code that shells expect, and a journal that the same command goes on from."""
    source, target = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("the cat\nthe dog sat\n")
    command = ["generate", checkpoint, "--input", source, "--batch-size", 1, "--max-new-tokens", 2]
    command += ["--output", target] if to_file else []
    batch, handlers = generate_batch, (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    calls: list[object] = []

    def stopped(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            os.kill(os.getpid(), number)
        return batch(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "generate_batch", stopped)
        done = run(*command)
    assert done.returncode == code
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"skipdecode: stopped by {signal.Signals(number).name}")
    assert ("the same command goes on from what is saved" in last) == to_file
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    if to_file:
        again = run(*command)
        assert again.returncode == 0
        assert "1 rows were done before" in again.stderr
        assert target.read_text().count("\n") == 2


class Streams:
    """The command line in this process with other streams than a terminal's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def run(self, *arguments: object, **streams: Any) -> int:
        """Its exit code, with ``sys.stdin``, ``sys.stdout`` and ``sys.stderr`` as given."""
        self.monkeypatch.setattr(sys, "argv", ["skipdecode", *map(str, arguments)])
        for name, stream in streams.items():
            self.monkeypatch.setattr(sys, name, stream)
        with pytest.raises(SystemExit) as stop:
            main()
        self.monkeypatch.undo()
        return int(stop.value.code or 0)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Gives streams back when the test ends."""
    return Streams(monkeypatch)


def test_closed_streams_are_named_before_the_work(checkpoint: Path, tmp_path: Path, streams: Streams) -> None:
    """G: a shell's ``<&-``, ``>&-``, ``2>&-``."""
    source = tmp_path / "in.txt"
    source.write_text("the cat\n")
    words = io.StringIO()
    assert streams.run("generate", checkpoint, stdin=None, stderr=words) == 2
    assert "standard input is closed: give --input FILE" in words.getvalue()
    words = io.StringIO()
    assert streams.run("generate", checkpoint, "--input", source, stdout=None, stderr=words) == 2
    assert "standard output is closed: give --output FILE" in words.getvalue()
    assert "Loading weights" not in words.getvalue()
    texts = io.StringIO()
    options = ("--input", source, "--max-new-tokens", 2)
    assert streams.run("generate", checkpoint, *options, stdout=texts, stderr=None) == 0
    assert len(json.loads(texts.getvalue())) == 4  # nothing of what is said about it


def test_an_ascii_terminal_gets_utf8(checkpoint: Path, streams: Streams) -> None:
    """G: after all the work it could not be written."""
    written = io.BytesIO()
    out = io.TextIOWrapper(written, encoding="ascii")
    source = io.TextIOWrapper(io.BytesIO("the café\n".encode()))
    assert streams.run("generate", checkpoint, "--max-new-tokens", 2, stdin=source, stdout=out) == 0
    assert json.loads(written.getvalue().decode("utf-8"))["prompt"] == "the café"


@pytest.mark.parametrize("full", [True, False])
def test_texts_that_nobody_takes_are_not_lost_in_silence(checkpoint: Path, streams: Streams, full: bool) -> None:
    """G: a full device, and a reader that has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    words = io.StringIO()
    source = io.TextIOWrapper(io.BytesIO(b"the cat\n"))
    with open("/dev/full" if full else os.dup(writer), "w") as out:
        assert streams.run("generate", checkpoint, "--max-new-tokens", 2, stdin=source, stdout=out, stderr=words) == 2
    last = words.getvalue().splitlines()[-1]
    assert last.startswith("skipdecode: the texts could not be written (")
    assert last.endswith("give --output FILE")
    os.close(writer)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", 0, "--do-sample"], "temperature"),
        (["--temperature", "nan", "--do-sample"], "temperature"),
        (["--top-p", 0, "--do-sample"], "top-p"),
        (["--top-p", 1.5, "--do-sample"], "top-p"),
        (["--top-k", -1, "--do-sample"], "top-k"),
        (["--repetition-penalty", 0], "repetition-penalty"),
        (["--repetition-penalty", -1], "repetition-penalty"),
        (["--num-beams", 0], "num-beams"),
        (["--num-beams", 100_000], "num-beams"),
        (["--max-new-tokens", 2_000_000_000], "max-new-tokens"),
        (["--min-new-tokens", 9, "--max-new-tokens", 8], "min_new_tokens 9 is more than max_new_tokens 8"),
        (["--no-repeat-ngram-size", 2_000_000_000], "no-repeat-ngram-size"),
        (["--batch-size", "many"], "batch-size"),
        (["--seed", -1], "seed"),
        (["--dtype", "Tensor"], "dtype"),
        (["--device", "nope"], "device"),
        (["--words", 10**9], "words"),
    ],
)
def test_numbers_that_no_option_can_mean_are_refused(checkpoint: Path, arguments: list[object], words: str) -> None:
    """G: one message, exit code 2, before weights are loaded."""
    done = run("generate", checkpoint, *arguments, stdin=b"the cat\n")
    assert done.returncode == 2, done.stderr
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert "Loading weights" not in done.stderr


def test_what_a_model_writes_is_no_emojis_name(capsys: pytest.CaptureFixture[str]) -> None:
    console.out.print("one :x: two :key: [b]", markup=False)
    console.print_table(["a", "b"], [[":x:", "[b]"]])
    assert capsys.readouterr().out.split() == ["one", ":x:", "two", ":key:", "[b]", "a", "b", ":x:", "[b]"]
