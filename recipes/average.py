"""Average the weights of two checkpoints of one run: python recipes/average.py EARLIER LATER OUTPUT SHARE

SHARE is that of LATER, 0 to 1. Config and tokenizer are LATER's.
"""

from __future__ import annotations

from typing import Annotated

import typer
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(earlier: str, later: str, output: str, share: Annotated[float, typer.Argument(min=0, max=1)]) -> None:
    """Write the average of two checkpoints' weights to OUTPUT; SHARE is that of LATER."""
    model, other = (AutoModelForCausalLM.from_pretrained(path) for path in (later, earlier))
    before = other.state_dict()
    model.load_state_dict({k: share * v + (1 - share) * before[k] for k, v in model.state_dict().items()})
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(later).save_pretrained(output)


if __name__ == "__main__":
    typer.run(main)
