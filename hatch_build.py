"""Give the embedded checkpoint, in the wheel, the code with which transformers alone generates at each speed."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomGenerate(BuildHookInterface):
    """Adds ``demo/custom_generate/``. It is made of the core, and so is no file of the repository."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the files before a wheel is built."""
        if version == "editable":
            return
        self.made = TemporaryDirectory()
        for name, text in run_path(f"{self.root}/src/skipdecode/hub/custom_generate.py")["sources"]().items():
            file = Path(self.made.name) / name
            file.write_text(text, "utf-8")
            build_data["force_include"][str(file)] = f"skipdecode/demo/custom_generate/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Drop them."""
        if version != "editable":
            self.made.cleanup()
