"""Gather the pages of the documentation site (mkdocs.yml): docs/, results/, the model card and the reference."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import skipdecode

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "pages"
#: Where pages stand that docs/ has elsewhere in the repository.
MOVED = {"../src/skipdecode/demo/README.md": "demo.md", "../results/": "results/"}


def main() -> None:
    """Write the pages anew."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    shutil.copytree(ROOT / "results", PAGES / "results", ignore=shutil.ignore_patterns("rows.jsonl"))
    for page in PAGES.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for old, new in MOVED.items():
            text = text.replace(f"]({old}", f"]({new}")
        page.write_text(text, encoding="utf-8")
    for page in PAGES.glob("results/**/*.md"):
        page.write_text(page.read_text(encoding="utf-8").replace("](../docs/", "](../"), encoding="utf-8")
    card = (ROOT / "src" / "skipdecode" / "demo" / "README.md").read_text(encoding="utf-8")
    (PAGES / "demo.md").write_text(re.sub(r"\A---\n.*?\n---\n", "", card, flags=re.DOTALL), encoding="utf-8")
    reference = PAGES / "reference"
    reference.mkdir()
    command = [sys.executable, "-m", "typer", "skipdecode.cli.main", "utils", "docs", "--name", "skipdecode"]
    said = subprocess.run([*command, "--title", "Commands"], check=True, capture_output=True, text=True).stdout
    (reference / "commands.md").write_text(said, encoding="utf-8")
    names = "\n".join(f"::: skipdecode.{name}\n" for name in skipdecode.__all__)
    (reference / "python.md").write_text(f"# Python\n\n{names}", encoding="utf-8")


if __name__ == "__main__":
    main()
