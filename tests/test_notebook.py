"""The notebook runs from its first cell to its last, with the embedded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "speeds.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer prompts, speeds and tokens, and without its installation; it ends with a table and two plots."""
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    from IPython.utils.capture import capture_output

    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    assert all(not cell.get("outputs") for cell in cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    kept = [cell for cell in code if "install" not in cell["metadata"].get("tags", ())]
    assert len(kept) == len(code) - 1
    monkeypatch.chdir(tmp_path)
    shell = interactiveshell.InteractiveShell.instance(ipython_dir=str(tmp_path / "ipython"))
    shell.enable_gui = lambda gui=None: None  # what a shell without windows lacks
    shell.run_line_magic("matplotlib", "inline")
    with capture_output() as captured:
        for cell in kept:
            source = "".join(cell["source"]).replace("[1, 2, 3, 5]", "[1, 3]").replace("48", "12")
            source = source.replace('"overwrite": True', '"timing_rounds": 1').replace("in NAMES", "in NAMES[:1]")
            shell.run_cell(source).raise_error()
    shell.clear_instance()
    assert sum("image/png" in output.data for output in captured.outputs) == 2
    assert any("| full model |" in " ".join(str(output.data).split()) for output in captured.outputs)
