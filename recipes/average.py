"""Average the weights of two checkpoints of one run: python recipes/average.py EARLIER LATER OUTPUT SHARE_OF_LATER

Config and tokenizer are LATER's.
"""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer


def main(earlier: str, later: str, output: str, share: str) -> None:
    """Write the average."""
    model, other = (AutoModelForCausalLM.from_pretrained(path) for path in (later, earlier))
    weight = float(share)
    before = other.state_dict()
    model.load_state_dict({k: weight * v + (1 - weight) * before[k] for k, v in model.state_dict().items()})
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(later).save_pretrained(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
