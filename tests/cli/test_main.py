"""The command line as a whole: verbs, options, exit codes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import typer

import skipdecode
from helpers.tiny import run
from skipdecode.cli import main as cli

COMMAND: Any = typer.main.get_command(cli.app)
VERBS = COMMAND.commands
OPTIONS = {name: [p for p in verb.params if p.param_type_name == "option"] for name, verb in VERBS.items()}


def test_there_are_twelve_verbs_and_few_options() -> None:
    """Each with a short help text."""
    verbs = "demo check probe distill train evaluate generate chat play serve push plan"
    assert set(VERBS) == set(verbs.split())
    assert sum(map(len, OPTIONS.values())) <= 132
    for name, options in OPTIONS.items():
        assert len(options) <= (30 if name == "train" else 25), name
        for option in options:
            assert 0 < len((option.help or "").split()) <= 12, (name, option.name)


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


@pytest.mark.parametrize(
    ("error", "code", "match"),
    [
        (ModuleNotFoundError("No module named 'gradio'", name="gradio"), 2, ".[web]"),
        (PermissionError(13, "Permission denied"), 2, "Permission denied"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_users_can_mend_is_a_line(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, match: str
) -> None:
    """A warning is one too; bugs keep their traceback."""

    def app() -> None:
        warnings.warn("poor text", skipdecode.errors.UntrainedWarning, stacklevel=1)
        raise error

    monkeypatch.setattr(cli, "app", app)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        done = run()
        assert "UntrainedWarning: poor text\n" in done.stderr
        assert done.returncode == code
        assert match in done.stderr
        error = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError):
            run()


def test_every_extra_exists() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for extra in set(cli.EXTRAS.values()):
        assert f"\n{extra} = [" in text
