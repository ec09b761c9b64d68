"""``python benchmarks/serving``: the path must stand before anything is imported."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "src")]

    from serving.run import main

    sys.exit(main())
