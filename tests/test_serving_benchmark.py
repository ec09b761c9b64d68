"""benchmarks/serving without vLLM: rounds that are kept, ratios of the same round, checkpoints, what servers say."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import skipdecode
from serving import load, load_report, report, run
from serving.models import PRECISIONS, options, parse, prepare
from serving.rounds import Rounds
from serving.servers import had, plugin_options, words
from skipdecode.errors import UsageError

SETTINGS = {"model": "tiny", "slots": 2, "load": "lockstep"}
ABOUT: dict[str, Any] = {"versions": "vLLM 0", "command": "python benchmarks/serving"}


def given(tmp_path: Path, *more: str) -> argparse.Namespace:
    """Options of the tiny shape; any interpreter will do."""
    (tmp_path / "python").touch()
    words = ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "out"), "--python", str(tmp_path / "python")]
    return parse(options("here", None), [*words, *more], {"shape": "tiny"}, {"kv_gib": 1})


def row(engine: str, step: float, tokens: float, **more: Any) -> dict[str, Any]:
    """Of an offline round."""
    kind = {"engine": engine, "form": "", "speedup": 1.0, "serving": "", "step_layer_ratio": 1.0}
    return kind | {"tokens_per_second": tokens, "step_ms": step, "prompt_share": 0.5} | more


def test_rounds_are_kept_and_added_to(tmp_path: Path) -> None:
    """A later call finds them; ratios are those of each round, since a machine's speed drifts from one to the next."""
    rounds = Rounds(tmp_path / "lockstep", SETTINGS)
    rounds.add([row("stock", 100, 10), row("skipdecode", 50, 20)], **ABOUT)
    rounds = Rounds(tmp_path / "lockstep", SETTINGS)
    rounds.add([row("stock", 300, 30), row("skipdecode", 150, 60)], **ABOUT)
    rounds.add([row("stock", 300, 30), row("skipdecode", 300, 30), row("skipdecode", 10, 300, form="flat")], **ABOUT)
    report.save(rounds)
    stock, plugin, flat = json.loads((rounds.folder / "table.json").read_text())["rows"]
    assert (stock["rounds"], plugin["rounds"], flat["rounds"]) == (3, 3, 1)
    assert (plugin["step_ms"], plugin["tokens_per_second"]) == (150, 30)
    assert (plugin["step_ms_ratio"], plugin["tokens_per_second_ratio"], flat["step_ms_ratio"]) == (2, 2, 30)
    assert stock["step_ms_ratio"] == 1
    line = (rounds.folder / "table.md").read_text().splitlines()[3]
    assert line.startswith("| 1x ")
    assert "150.0 |  2.00x |" in line


def test_rounds_with_other_settings_are_not_mixed(tmp_path: Path) -> None:
    """Refused with what differs, before anything is loaded."""
    Rounds(tmp_path, SETTINGS).add([row("stock", 1, 1)], **ABOUT)
    with pytest.raises(UsageError, match="measured with slots 2, not 8"):
        Rounds(tmp_path, SETTINGS | {"slots": 8})
    with pytest.raises(UsageError, match="measured with engine None, not fp8"):
        Rounds(tmp_path, SETTINGS | {"engine": "fp8"})
    Rounds(tmp_path / "more", SETTINGS | {"engine": "fp8"}).add([row("stock", 1, 1)], **ABOUT)
    with pytest.raises(UsageError, match="measured with engine fp8, not None"):
        Rounds(tmp_path / "more", SETTINGS)


def test_every_form_has_a_schedule_of_its_own() -> None:
    """Of one engine: a key for each, and the layers that the table names."""
    wanted = run.asked(["flat", "falling", "prompt"], [2, 3])
    made = run.schedules(wanted, 24, 32)
    assert set(wanted.values()) == set(made)
    assert len(made) == 1 + 3 * 2
    flat, falling, prompt = (made[wanted["skipdecode", form, 3]] for form in ("flat", "falling", "prompt"))
    assert {flat.depth(step) for step in range(32)} == {8}
    assert falling.depth(0) > falling.depth(31)
    assert (flat.prompt_layers, prompt.prompt_layers) == (None, 8)


def test_weights_that_the_engine_makes_are_not_written(tmp_path: Path) -> None:
    """Of a shape that would not fit on the disk, say."""
    folder = prepare(given(tmp_path, "--engine", '{"load_format": "dummy"}'))
    assert not [*folder.glob("*.safetensors*")]
    assert json.loads((folder / "config.json").read_text("utf-8"))["architectures"] == ["OPTForCausalLM"]


def test_int8_checkpoints_have_the_shape_and_its_tokenizer(tmp_path: Path) -> None:
    """Written once, from the same weights, with the tokenizer that a server needs."""
    plain = prepare(given(tmp_path, "--layers", "3"))
    rounded = prepare(given(tmp_path, "--layers", "3", "--precision", "w8a8"))
    assert [plain.name, rounded.name] == [f"tiny-3-layers-{precision}" for precision in PRECISIONS]
    weights = load_file(rounded / "model.safetensors")
    matrices = [name for name, tensor in weights.items() if tensor.dtype == torch.int8]
    assert len(matrices) == 3 * 6
    assert all(weights[f"{name}_scale"].shape == (len(weights[name]), 1) for name in matrices)
    config = json.loads((rounded / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    assert config["quantization_config"]["format"] == "int-quantized"
    assert (rounded / "tokenizer.json").exists()
    assert skipdecode.load(str(plain))[0].config.num_hidden_layers == 3
    before = (rounded / "model.safetensors").stat().st_mtime_ns
    assert prepare(given(tmp_path, "--layers", "3", "--precision", "w8a8")) == rounded
    assert (rounded / "model.safetensors").stat().st_mtime_ns == before


def test_options_that_exclude_each_other_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 2, before anything is written."""
    with pytest.raises(UsageError, match="of a --shape"):
        given(tmp_path, "--model", "demo", "--precision", "w8a8")
    assert given(tmp_path, "--model", "demo").shape is None
    assert given(tmp_path, "--smoke").kv_gib == 1
    assert given(tmp_path, "--smoke", "--kv-gib", "3").kv_gib == 3
    python = ["--python", str(tmp_path / "python"), "--output", str(tmp_path / "none")]
    assert run.main(["--python", str(tmp_path / "nothing")]) == 2
    assert run.main([*python, "--forms", "flat,steep"]) == 2
    assert "steep; known are flat, falling, prompt" in capsys.readouterr().err
    assert run.main([*python, "--adapter", "an-adapter"]) == 2
    assert "--adapter is of a --model" in capsys.readouterr().err
    assert load.main([*python, "--servers", "1-5,fast"]) == 2
    with pytest.raises(SystemExit):
        load.main([*python, "--arrivals", "0.5,-1"])
    assert not (tmp_path / "none").exists()


def test_a_servers_name_says_its_options() -> None:
    """A speed-up; under load another, with limits that follow the slots and what counts as good."""
    assert plugin_options("3", 32, 100) == ["--speedup", "3"]
    limits = ["--load-waiting", "8", "--load-token-ms", "80.00"]
    assert plugin_options("1-5", 32, 100) == ["--speedup", "1", "--load-speedup", "5", *limits]
    assert words({"prompt_layers": 8, "adapter": "DIR"}) == ["--prompt-layers", "8", "--adapter", "DIR"]


def test_what_requests_had_is_what_metrics_grew_by() -> None:
    """The mean speed-up over requests, not over tokens; layers of decode steps only."""

    def page(*values: int) -> str:
        names = ['skipdecode_requests_total{finished_reason="length",model_name="model",speedup="%s"}']
        names += ['skipdecode_full_layer_tokens_total{model_name="model",phase="decode",speedup="%s"}']
        names += ['skipdecode_layer_tokens_total{model_name="model",phase="decode",speedup="%s"}']
        names += ['skipdecode_layer_tokens_total{model_name="model",phase="prompt",speedup="%s"}']
        lines = [name % speedup for speedup in (1, 5) for name in names]
        found = [f"{line} {value}.0" for line, value in zip(lines, values, strict=True)]
        return "\n".join(["# HELP skipdecode_requests_total Texts that ended.", *found, 'vllm:other{a="b"} 3'])

    before = page(1, 24, 24, 9, 0, 0, 0, 0)
    after = page(4, 24 * 11, 24 * 11, 99, 1, 24 * 10, 48, 99)
    assert had(before, after) == {"mean_speedup": 2.0, "moved": 0, "decode_layer_ratio": 480 / 288}
    assert had("", "") == {}


def test_the_table_of_servers(tmp_path: Path) -> None:
    """Each rate's rows together, whatever the order of rounds; ratios to stock at the same rate."""
    rounds = Rounds(tmp_path / "load", SETTINGS | {"load": "servers"})
    top = {"requests_per_second": 4.0, "token_ms": 50.0, "good": {"ttft": 500.0, "tpot": 50.0}}
    for arrivals, tokens in (("0.5", 10), ("inf", 20), ("0.5", 14)):
        rate = None if arrivals == "inf" else 2.0
        rows = [
            {"arrivals": arrivals, "engine": name, "rate": rate}
            | {"request_throughput": 1.0, "output_throughput": tokens * times, "request_goodput": 0.0}
            | {"median_ttft_ms": 9.0, "median_tpot_ms": 8.0}
            | ({} if name == "stock" else {"mean_speedup": 4.2, "moved": 3, "decode_layer_ratio": 3.9})
            for name, times in (("stock", 1), ("1-5", 2))
        ]
        rounds.add(rows, saturation=top, **ABOUT)
    load_report.save(rounds)
    found = json.loads((rounds.folder / "table.json").read_text())["rows"]
    kinds = [(each["arrivals"], each["engine"], each["rounds"]) for each in found]
    assert kinds == [("0.5", "stock", 2), ("0.5", "1-5", 2), ("inf", "stock", 1), ("inf", "1-5", 1)]
    assert [each["output_throughput"] for each in found] == [12, 24, 20, 40]
    text = (rounds.folder / "table.md").read_text()
    assert "1x to 5x" in text
    assert "first token within 500 ms, each further one, on average within 50 ms" in text
