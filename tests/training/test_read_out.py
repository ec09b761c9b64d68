"""Logits at a layer are those of the model that skips all above."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import skipdecode
from helpers.families import FAMILIES, build
from skipdecode import Schedule
from skipdecode.errors import UnsupportedModel
from skipdecode.training.read_out import read_out

#: Soft-capping that is no module; streams that are merged after the last layer.
DOES_MORE = ("gemma2", "gemma3n")


@pytest.mark.parametrize("name", FAMILIES)
def test_reading_a_layer_out_is_the_model_that_skips_all_above(name: Any) -> None:
    """The logits at depth d are those of an uncached pass with only the d bottom layers."""
    network = build(name)
    ids = torch.randint(2, 100, (2, 7))
    with torch.no_grad():
        if name in DOES_MORE:
            with pytest.raises(UnsupportedModel, match="does more than norm and LM head"):
                read_out(network)
            return
        states = network(ids, output_hidden_states=True).hidden_states
        reader = read_out(network)
        skipdecode.attach(network)
        for depth in (1, 3, 7):
            bottom = Schedule(8, depth, depth, 1, decay="constant", order="bottom")
            with skipdecode.teacher_forced(network, bottom, 0):
                expected = network(ids, use_cache=False).logits
            torch.testing.assert_close(reader(states[depth]), expected, rtol=1e-5, atol=1e-5)
