"""``python tests/torture``: paths and settings, which must stand before torch is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]

if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Killed processes leave semaphores of tqdm's behind; multiprocessing removes them and says so.
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"
    paths = [str(TESTS.parent / "src"), str(TESTS)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path[:0] = paths

    from torture.campaign import main

    sys.exit(main())
