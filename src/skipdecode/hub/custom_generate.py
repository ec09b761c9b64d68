"""``custom_generate/``: the part of this package that decoding needs, as transformers loads it from a folder."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: A relative import in Python source: its dots, the module, and the rest of the line.
IMPORT = re.compile(r"^(\s*from )(\.+)([\w.]+)( import .*)$", re.MULTILINE)


def sources() -> dict[str, str]:
    """Text of each file of ``custom_generate/``: ``generate.py``, and all that it imports of this package.

    They stand in one folder, since transformers copies a single folder; imports name the file beside them.
    """
    found: dict[str, str] = {}
    waiting = [ROOT / "hub" / "generate.py"]
    while waiting:
        path = waiting.pop()
        if path.name in found:
            continue
        text = path.read_text("utf-8")
        for _, dots, module, _ in IMPORT.findall(text):
            waiting.append(path.parents[len(dots) - 1].joinpath(*module.split(".")).with_suffix(".py"))
        found[path.name] = IMPORT.sub(lambda match: f"{match[1]}.{match[3].split('.')[-1]}{match[4]}", text)
    return dict(sorted(found.items()))


def write_custom_generate(folder: Path) -> None:
    """Write ``custom_generate/`` into a folder."""
    target = folder / "custom_generate"
    target.mkdir(parents=True, exist_ok=True)
    for name, text in sources().items():
        (target / name).write_text(text, "utf-8")
