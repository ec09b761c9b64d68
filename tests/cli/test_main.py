"""The command line as a whole: verbs, options, exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

import skipdecode
from helpers.tiny import run
from skipdecode.cli import main as cli
from skipdecode.errors import SkipDecodeError

COMMAND: Any = typer.main.get_command(cli.app)
VERBS = COMMAND.commands
OPTIONS = {name: [p for p in verb.params if p.param_type_name == "option"] for name, verb in VERBS.items()}


def test_there_are_twelve_verbs() -> None:
    verbs = "demo check probe distill train evaluate generate chat play serve push plan"
    assert set(VERBS) == set(verbs.split())


def test_options_are_few() -> None:
    assert sum(map(len, OPTIONS.values())) <= 130
    for name, options in OPTIONS.items():
        assert len(options) <= (30 if name == "train" else 25), name


@pytest.mark.parametrize("verb", sorted(OPTIONS))
def test_every_option_has_a_short_help_text(verb: str) -> None:
    for option in OPTIONS[verb]:
        assert 0 < len((option.help or "").split()) <= 12, option.name


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_help_needs_no_model(verb: str) -> None:
    done = run(verb, "--help")
    assert done.returncode == 0
    assert f"skipdecode {verb}" in done.stdout


def test_version() -> None:
    assert run("--version").stdout.strip() == f"skipdecode {skipdecode.__version__}"


@pytest.mark.parametrize("name", ["no/such/folder", "./missing"])
def test_an_error_of_the_users_is_one_line_and_exit_code_2(name: str) -> None:
    done = run("check", name)
    assert done.returncode == 2
    assert done.stderr.startswith("skipdecode: ")
    assert "Traceback" not in done.stderr


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs() -> None:
        raise ModuleNotFoundError("No module named 'gradio'", name="gradio")

    monkeypatch.setattr(cli, "app", needs)
    done = run()
    assert done.returncode == 2
    assert ".[web]" in done.stderr


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", stopped)
    assert run().returncode == 130


def test_every_extra_exists() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for extra in set(cli.EXTRAS.values()):
        assert f"\n{extra} = [" in text
    assert issubclass(skipdecode.SkipDecodeError, SkipDecodeError)
