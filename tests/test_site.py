"""The documentation site builds without a warning, its links lead somewhere, and nothing is loaded from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

import skipdecode
from skipdecode.cli.main import app

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "site"


def links(html: str) -> Iterator[str]:
    """Where a page's links and images lead."""
    return (unescape(link) for link in re.findall(r'(?:href|src)="?([^"\s>]+)', html))


@pytest.mark.slow
def test_the_site_holds_together() -> None:
    """Links lead to its files and headings; scripts, styles and images are its own; the reference is whole."""
    pytest.importorskip("zensical")
    subprocess.run([sys.executable, str(ROOT / "tools" / "site.py")], check=True, cwd=ROOT)
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--clean", "--strict"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path: path.read_text(encoding="utf-8") for path in SITE.rglob("*.html") if path.name != "404.html"}
    assert SITE / "index.html" in pages
    for path, html in pages.items():
        for link in links(html):
            if link.startswith(("http:", "https:", "data:", "mailto:")):
                continue
            file, _, heading = unquote(link).partition("#")
            target = (path.parent / file.partition("?")[0]).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.relative_to(SITE)}: {link}"
            there = not heading or target not in pages or re.search(rf'id="?{re.escape(heading)}["\s>]', pages[target])
            assert there, f"{path.relative_to(SITE)}: {link}"
        loaded = re.findall(r"<(?:script|img|iframe)[^>]+src=\"?(https?:[^\"\s>]+)", html)
        loaded += re.findall(r"<link[^>]+rel=\"?stylesheet\"?[^>]+href=\"?(https?:[^\"\s>]+)", html)
        assert not loaded, f"{path.relative_to(SITE)}: {loaded}"
    python, commands = (pages[SITE / "reference" / name / "index.html"] for name in ("python", "commands"))
    for name in skipdecode.__all__:
        assert re.search(rf'id="?skipdecode\.{name}["\s>]', python), name
    text = re.sub(r"<[^>]+>", "", commands)
    for verb in app.registered_commands:
        assert verb.callback is not None
        assert f"skipdecode {verb.callback.__name__}" in text


def test_every_page_has_its_place() -> None:
    """In the navigation; none stands there that is missing."""
    named = set(re.findall(r"[\w/-]+\.md", yaml.dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])))
    assert {path.name for path in ROOT.glob("docs/*.md")} <= named
    made = {"reference/commands.md", "reference/python.md", "demo.md"}
    assert all((ROOT / "docs" / page).exists() or (ROOT / page).exists() for page in named - made)
