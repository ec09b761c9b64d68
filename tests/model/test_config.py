"""The config's entry, and schedules bound to a model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import OPTConfig

from helpers.families import LAYERS, TOP, build
from skipdecode import Schedule, ScheduleError, SkipCache, attach
from skipdecode.errors import ModelError, UntrainedWarning
from skipdecode.model import config as model_config
from skipdecode.model.adapter import Adapter
from skipdecode.model.config import (
    CONFIG_KEY,
    bind,
    config_schedules,
    num_layers,
    set_entry,
    speedup_key,
    to_config_entry,
    trained_method,
    trained_schedules,
)

EVEN = Schedule(LAYERS, 4, 2, 9, order="even", warmup=0)


def lending_config() -> Any:
    """Five layers: the fourth attends to the keys of the first, the fifth to those of the third."""
    modes = ["store", None, "store", "reuse", "reuse"]
    kinds = ["full", "full", "sliding", "full", "sliding"]
    made = SimpleNamespace(num_hidden_layers=5, kv_sharing_modes=modes, layer_types=kinds)
    made.get_text_config = lambda decoder: made
    return made


# --- the entry


def test_an_entry_survives_the_configs_json() -> None:
    """Method and schedules; without one, no schedule and the method ``full``."""
    config = OPTConfig(num_hidden_layers=LAYERS)
    assert (trained_method(config), config_schedules(config), num_layers(config)) == ("full", {}, LAYERS)
    set_entry(config, to_config_entry({2.5: EVEN, 1.0: Schedule.full(LAYERS)}, "multi_exit"))
    again = OPTConfig(**json.loads(config.to_json_string()))
    assert trained_method(again) == "multi_exit"
    assert config_schedules(again) == {1.0: Schedule.full(LAYERS), 2.5: EVEN}
    set_entry(again, None)
    set_entry(again, None)
    assert not hasattr(again, CONFIG_KEY)


@pytest.mark.parametrize("entry", ["yes", {"schedules": {"fast": {}}}, {"schedules": {"2": {}}}, {"schedules": [2]}])
def test_a_damaged_entry_is_an_error(entry: Any) -> None:
    config = OPTConfig(num_hidden_layers=LAYERS, skipdecode=entry)
    with pytest.raises(ModelError, match="entry skipdecode"):
        config_schedules(config)


def test_a_model_that_learnt_no_skipping_has_no_entry() -> None:
    """Trained by no method, or by ours at full depth; another method's full schedules count."""
    full = {1.0: Schedule.full(LAYERS)}
    assert to_config_entry({2.0: EVEN}, "full") is None
    assert to_config_entry(full) is None
    assert to_config_entry(full, "multi_exit") is not None
    assert to_config_entry(full | {2.0: EVEN}) is not None


@given(st.floats(1, 1e6))
def test_a_key_is_the_speedup_in_as_few_digits_as_tell_it(speedup: float) -> None:
    assert float(speedup_key(speedup)) == speedup
    assert [speedup_key(known) for known in (3.0, 2.5, 1)] == ["3", "2.5", "1"]


def test_an_adapters_schedules_go_before_the_configs() -> None:
    """As long as it is attached; the config itself is not touched, so the saved model knows nothing of it."""
    model = build("llama")
    set_entry(model.config, to_config_entry({2.0: EVEN}))
    entry = dict(getattr(model.config, CONFIG_KEY))
    assert trained_schedules(model) == trained_schedules(attach(model)) == {2.0: EVEN}
    attach(model, adapter=Adapter(32, 4, {3.0: TOP, 4.0: TOP.flat(2)}))
    assert trained_schedules(model) == {3.0: TOP, 4.0: TOP.flat(2)}
    assert SkipCache(model).schedule == TOP
    assert getattr(model.config, CONFIG_KEY) == entry


# --- bind


def test_layers_that_lend_their_kv_are_ranked_before_their_borrowers() -> None:
    """The depths stay; a schedule that needs no moving is itself."""
    plan = Schedule(5, 4, 2, 6, order=(4, 3, 1, 0, 2))
    bound = bind(plan, lending_config())
    assert bound == plan.replace(order=(2, 4, 0, 3, 1))
    assert bind(bound, lending_config()) is bound
    assert bind(TOP, build("opt").config) is TOP
    with pytest.raises(ScheduleError, match="for 8 layers, the model has 5"):
        bind(Schedule.full(8), lending_config())


def test_layers_that_no_training_skipped_are_refused() -> None:
    """In a step, and in a prompt whose steps are known; full depth and other lengths of the same depths are not."""
    config = build("opt").config
    trained = {1.5: TOP, 2.0: TOP.flat(3)}
    for plan in (TOP, TOP.replace(horizon=99), TOP.flat(5), Schedule.full(LAYERS)):
        assert bind(plan, config, trained) is plan
    for plan in (TOP.replace(warmup=2), TOP.flat(1), TOP.replace(prompt_layers="max"), TOP.replace(prompt_decay=3)):
        with pytest.raises(ScheduleError, match=r"cannot skip layers \d-\d.*: it was trained for 1.5x and 2x"):
            bind(plan, config, trained)


# --- who was not trained


@pytest.fixture
def said() -> Callable[[Callable[[], Any]], list[str]]:
    """Returns the warnings of a call."""
    model_config._warn.cache_clear()

    def warned(call: Callable[[], Any]) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            call()
        return [str(warning.message) for warning in found if warning.category is UntrainedWarning]

    return warned


def test_an_untrained_model_is_named_once(said: Any) -> None:
    """Each schedule once, by whatever call; the full schedule never."""
    model = build("llama")
    assert "was not trained to skip layers" in said(lambda: attach(model, speedup=1.5))[0]
    assert said(lambda: SkipCache(model, Schedule.for_speedup(1.5, LAYERS))) == []
    assert "3 of 8 layers" in said(lambda: SkipCache(model, TOP.flat(3)))[0]
    assert said(lambda: SkipCache(model, Schedule.full(LAYERS))) == []


def test_a_trained_model_is_named_below_what_it_was_trained_for(said: Any) -> None:
    """A tenth fewer layers are not said."""
    model = attach(build("llama"))
    set_entry(model.config, to_config_entry({2.0: Schedule.for_speedup(2, LAYERS)}))
    for speedup in (None, 1.5, 2, 2.2):
        assert said(lambda speedup=speedup: attach(model, speedup=speedup or 2)) == []
    assert "fewer than 4 layers" in said(lambda: attach(model, speedup=4))[0]


def test_the_warning_names_the_callers_line() -> None:
    model = build("llama")
    for make in (attach, SkipCache):
        model_config._warn.cache_clear()
        with pytest.warns(UntrainedWarning, match="not trained to skip") as found:
            make(model, TOP)
        assert found[0].filename == __file__
