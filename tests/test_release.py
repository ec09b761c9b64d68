"""What a release is made of: its version, its citation, its forms and workflows."""

from __future__ import annotations

from importlib.metadata import metadata, version
from pathlib import Path
from typing import Any

import yaml

import skipdecode

ROOT = Path(__file__).parents[1]


def read(path: str) -> Any:
    """A YAML file of the repository."""
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_the_version_is_the_installed_packages() -> None:
    """No second place holds it."""
    assert skipdecode.__version__ == version("skipdecode")
    assert version("skipdecode") not in (ROOT / "src" / "skipdecode" / "__init__.py").read_text(encoding="utf-8")


def test_the_citation_names_what_the_package_is() -> None:
    """And the paper whose method it is."""
    cited, about = read("CITATION.cff"), metadata("skipdecode")
    assert cited["title"].lower() == about["Name"]
    assert cited["license"] in about["License-Expression"]
    (paper,) = cited["references"]
    assert paper["url"].removeprefix("https://") in (ROOT / "README.md").read_text(encoding="utf-8")


def test_workflows_run_what_contributors_run() -> None:
    """A release is tested like any change; the token that publishes has no other rights."""
    ci, release = (read(f".github/workflows/{name}.yml")["jobs"] for name in ("ci", "release"))
    for jobs in (ci["check"], release["build"]):
        assert ".ci/run" in [step.get("run") for step in jobs["steps"]]
    assert release["publish"]["needs"] == "build"
    assert release["publish"]["permissions"] == {"id-token": "write"}
