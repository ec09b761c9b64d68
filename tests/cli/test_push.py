"""``skipdecode push``: a dry run; uploads are in tests/hub."""

from __future__ import annotations

import shutil
from pathlib import Path

from helpers.tiny import run
from skipdecode.loading.load import DEMO


def test_a_dry_run_writes_the_folder(tmp_path: Path) -> None:
    """And names what stays."""
    folder = Path(shutil.copytree(DEMO, tmp_path / "demo"))
    (folder / "vocab.bin").write_text("x")
    done = run("push", folder, "someone/model", "--license", "mit", "--dry-run", tmp_path / "upload")
    assert done.returncode == 0, done.stderr
    assert "left out: vocab.bin" in done.stderr
    card = (tmp_path / "upload" / "README.md").read_text(encoding="utf-8")
    assert "license: mit" in card
    assert (tmp_path / "upload" / "model.safetensors").is_file()
    assert (tmp_path / "upload" / "custom_generate" / "generate.py").is_file()
