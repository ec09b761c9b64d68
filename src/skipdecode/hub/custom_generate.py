"""Write ``custom_generate/``: the part of this package that decoding needs, as transformers loads it from a folder."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
START = "hub/generate.py"
#: In Python source: a relative import, its dots, the module, and the rest of the line.
IMPORT = re.compile(r"^(\s*from )(\.+)([\w.]+)( import .*)$", re.MULTILINE)


def sources() -> dict[str, str]:
    """Return the text of each file of ``custom_generate/``: ``generate.py``, and all that it imports of this package.

    They stand in one folder, as transformers copies them, so that imports name a module beside them.
    """
    found: dict[str, str] = {}
    todo = [ROOT / START]
    while todo:
        path = todo.pop()
        if path.name in found:
            continue
        text = path.read_text("utf-8")
        todo += [_target(path, dots, module) for _, dots, module, _ in IMPORT.findall(text)]
        found[path.name] = IMPORT.sub(lambda match: f"{match[1]}.{match[3].split('.')[-1]}{match[4]}", text)
    return dict(sorted(found.items()))


def write_custom_generate(folder: Path) -> None:
    """Write ``custom_generate/`` into a folder."""
    from ..files import write  # here, since building a wheel runs this file by itself

    target = folder / "custom_generate"
    target.mkdir(parents=True, exist_ok=True)
    for name, text in sources().items():
        write(target / name, text)


def _target(path: Path, dots: str, module: str) -> Path:
    """Return the file of the module that ``path`` imports."""
    return path.parents[len(dots) - 1].joinpath(*module.split(".")).with_suffix(".py")
