"""``python benchmarks/serving [load | sharing]``: the path must stand before anything is imported."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "src")]

    from serving import load, run, sharing

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # `timeout`: engines end too
    first, rest = sys.argv[1:2], sys.argv[2:]
    parts = {"load": load.main, "sharing": sharing.main}
    sys.exit(parts[first[0]](rest) if first and first[0] in parts else run.main([*first, *rest]))
