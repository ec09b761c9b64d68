"""``python benchmarks/serving [load]``: the path must stand before anything is imported."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "src")]

    from serving import load, run

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # `timeout`: engines end too
    first, rest = sys.argv[1:2], sys.argv[2:]
    sys.exit(load.main(rest) if first == ["load"] else run.main([*first, *rest]))
