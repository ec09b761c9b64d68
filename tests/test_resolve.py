"""One place decides which schedule applies; what a method is like stands on its class."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skipdecode.evaluation.methods import METHODS, get_method
from skipdecode.latency.fitting import Lengths, fit
from skipdecode.latency.resolve import method_schedule, new_schedule
from transformers import OPTConfig

import skipdecode
from helpers.families import TOP, build
from helpers.profiles import made
from skipdecode import attach
from skipdecode.errors import FileError, ScheduleError, UsageError
from skipdecode.generation.job import GenerationJob
from skipdecode.latency.planner import Predictor, Workload
from skipdecode.model.config import (
    CONFIG_KEY,
    config_schedules,
    is_trained,
    save_calibrated,
    schedule_for,
    to_config_entry,
    untrained_warning,
)
from skipdecode.schedule import Schedule

LENGTHS = [20, 24, 31]
EVEN = Schedule(8, 4, 2, 12, order="even", decay="cosine")
FAST = Schedule(8, 2, 1, 16, order=(0, 7, 1, 6, 2, 5, 3, 4), decay="exponential", rate=2.0, prompt_decay=3)


def config_of(schedules: dict[float, Schedule] | None = None, method: str = "skipdecode") -> Any:
    """The config of a model of eight layers, trained with these schedules or with none."""
    config = OPTConfig(num_hidden_layers=8)
    if schedules:
        setattr(config, CONFIG_KEY, to_config_entry(schedules, method))
    return config


def unmeasured() -> Sequence[int]:
    """Lengths that nobody may ask for: measuring them takes minutes."""
    pytest.fail("lengths were measured")


def test_one_of_schedule_and_speedup_is_given() -> None:
    """A schedule is taken as it is, if it is for as many layers; beside a speed-up it is refused everywhere alike."""
    config = config_of({2.0: EVEN})
    assert schedule_for(config, schedule=FAST) is FAST
    with pytest.raises(ScheduleError, match="for 4 layers, the model has 8"):
        schedule_for(config, schedule=Schedule.full(4))
    model = attach(build("llama"))
    for both in (
        lambda: schedule_for(config, 2, FAST),
        lambda: attach(model, TOP, speedup=2),
        lambda: skipdecode.generate(model, None, "the cat", schedule=TOP, speedup=2),
        lambda: GenerationJob("demo", ["the cat"], schedule=TOP, speedup=2),
    ):
        with pytest.raises(UsageError, match="give one of"):
            both()


def test_the_configs_own_schedule_comes_first() -> None:
    """Without a speed-up the fastest one; lengths are not measured for it."""
    config = config_of({2.0: EVEN, 5.0: FAST})
    assert schedule_for(config, 2) == EVEN
    assert schedule_for(config) == FAST
    assert schedule_for(config, 2, prompt_layers="max") == EVEN.replace(prompt_layers="max")
    assert method_schedule(get_method("skipdecode"), config, 2, unmeasured) == EVEN


def test_any_wish_makes_a_new_schedule_but_the_prompts_layers() -> None:
    """A horizon or a form, even those that the trained one has: it is then the paper's budget, not what was trained."""
    config = config_of({2.0: EVEN})
    for horizon, style in ((EVEN.horizon, {}), (9, {}), (None, {"order": "even"}), (None, {"warmup": 1})):
        new = Schedule.for_speedup(2, 8, horizon or EVEN.horizon, **EVEN.style | style)
        assert schedule_for(config, 2, horizon=horizon, **style) == new != EVEN
    assert schedule_for(config, 2, prompt_layers=6) == EVEN.replace(prompt_layers=6)


@given(speedup=st.sampled_from([1.5, 2.0, 3.0, 5.0, 8.0]), decay=st.sampled_from([None, "linear", "step"]))
def test_a_new_schedule_has_the_style_of_the_fastest_one(speedup: float, decay: str | None) -> None:
    """Fitted to lengths, over a horizon or with the paper's budget: order, warm-up and decay stay unless asked for."""
    config = config_of({1.0: Schedule.full(8), 2.0: EVEN, 5.0: FAST})
    style: dict[str, Any] = {} if decay is None else {"decay": decay}
    expected = FAST.style | style
    assert new_schedule(config, speedup, LENGTHS, **style) == fit(8, speedup, LENGTHS, **expected)
    over = Schedule.for_speedup(speedup, 8, 9, **expected)
    assert schedule_for(config, speedup, horizon=9, **style) == new_schedule(config, speedup, (), horizon=9, **style)
    assert schedule_for(config, speedup, horizon=9, **style) == over
    assert over.horizon == 9
    assert schedule_for(config, 4) == Schedule.for_speedup(4, FAST.num_layers, FAST.horizon, **FAST.style)


def test_what_is_asked_for_replaces_what_was_trained() -> None:
    """B7: ``train --order top`` on a model that was trained in another order."""
    config, method = config_of({2.0: EVEN}), get_method("skipdecode")
    for asked in ({"order": "top"}, {"decay": "linear"}, {"warmup": 0, "order": "top"}):
        for new in (method_schedule(method, config, 2, lambda: LENGTHS, **asked), schedule_for(config, 2, **asked)):
            assert new != EVEN
            assert new.style == EVEN.style | asked


def test_a_model_that_was_never_trained_gets_the_default() -> None:
    """2x over 64 tokens, or fitted to lengths."""
    assert schedule_for(config_of()) == Schedule.for_speedup(2, 8, 64, decay="linear")
    assert new_schedule(config_of(), 3, LENGTHS) == fit(8, 3, LENGTHS)
    assert schedule_for(config_of(), 3, horizon=10) == Schedule.for_speedup(3, 8, 10, decay="linear")
    with pytest.raises(ScheduleError, match="horizon"):
        schedule_for(config_of(), 2, horizon=0)


@pytest.mark.parametrize("name", [name for name in METHODS if get_method(name).fits_depths])
def test_a_method_takes_its_own_schedules_and_makes_new_ones_by_its_own_rule(name: str) -> None:
    """Those trained for another method are no use to it."""
    method = get_method(name)
    config = config_of({4.0: EVEN}, "hsd" if name != "hsd" else "d3")
    new = method_schedule(method, config, 4, lambda: LENGTHS)
    assert new == method.schedule(8, 4, LENGTHS)
    assert new != EVEN
    assert method_schedule(method, config_of({4.0: EVEN}, name), 4, unmeasured) == EVEN
    if not method.takes_style:
        for asked in ({"horizon": 9}, {"order": "top"}):
            with pytest.raises(ScheduleError, match=f"{name} has its own"):
                new_schedule(config, 4, LENGTHS, method=method, **asked)


def test_a_fitted_method_keeps_the_style_it_was_trained_in() -> None:
    """Multi-layer exit counts from the bottom whatever the speed-up, and keeps a trained decay."""
    method = get_method("multi_exit")
    trained = Schedule(8, 4, 2, 12, order="bottom", decay="cosine")
    new = new_schedule(config_of({2.0: trained}, "multi_exit"), 4, LENGTHS, method=method)
    assert new.style == trained.style
    assert Lengths(LENGTHS).ratio(new) == pytest.approx(4, rel=0.05)
    assert new_schedule(config_of(), 4, LENGTHS, method=method).order == "bottom"


@pytest.mark.parametrize("name", METHODS)
def test_the_facts_of_a_method_agree(name: str) -> None:
    """Each file is found by its name; what takes a form is fitted; what skips nothing has nothing to fit."""
    method = get_method(name)
    assert method.name == name
    assert get_method(name) is method
    assert method.is_trained_by(name)
    assert method.is_trained_by("magic") == (name == "full")
    assert not method.takes_style or (method.order and method.fits_depths)
    assert method.skips or method.model_per_speedup or name == "full"


def test_only_a_method_makes_a_model_a_trained_one() -> None:
    """A model of full schedules alone is the stock model."""
    assert not is_trained(config_of())
    assert not is_trained(config_of({1.0: Schedule.full(8)}))
    assert is_trained(config_of({2.0: EVEN}))


def test_what_skips_nothing_or_was_trained_by_nothing_is_not_recorded() -> None:
    """The full method's schedules, whatever they are; those of other methods than SkipDecode always are."""
    assert to_config_entry({2.0: EVEN}, "full") is None
    entry = to_config_entry({1.0: Schedule.full(8)}, "hsd")
    assert entry is not None
    assert entry["method"] == "hsd"


@pytest.mark.parametrize(
    ("says", "depths"), [("calibrate --search", (9, 8)), ("poor texts", (7, 6)), ("no readable text", (5, 2, 1))]
)
def test_an_untrained_models_texts_are_foretold_by_depth(says: str, depths: Sequence[int]) -> None:
    """From 80% of the layers on it depends, from 60% on texts are poor; of a trained model nothing is said.

    Unless it runs fewer layers than it was trained for.
    """
    config, trained = OPTConfig(num_hidden_layers=10), OPTConfig(num_hidden_layers=10)
    setattr(trained, CONFIG_KEY, to_config_entry({2.0: Schedule.from_depths(10, [5], warmup=0)}))
    for depth in depths:
        plan = Schedule.from_depths(10, [depth], warmup=0)
        for name, shown in (("", "this model"), ("org/name", "org/name")):
            config._name_or_path = name
            said = str(untrained_warning(config, plan))
            assert said.startswith(f"{shown} was not trained to skip layers: at {depth} of 10 layers a step, ")
            assert says in said
        said = str(untrained_warning(trained, plan))
        assert said == "None" if depth >= 5 else "was not trained to run fewer than 5 layers" in said
    assert untrained_warning(config, Schedule.full(10)) is None


@pytest.mark.parametrize("content", [[1], "text", 3], ids=str)
def test_a_config_that_is_no_object_is_left_as_it_is(content: Any, tmp_path: Path) -> None:
    """Whatever JSON the file holds."""
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(FileError, match=r"config\.json is no JSON object"):
        save_calibrated(tmp_path, 2, EVEN, "skipdecode")
    assert json.loads((tmp_path / "config.json").read_text()) == content


def test_calibrated_schedules_are_those_of_the_method_that_trained(tmp_path: Path) -> None:
    """Another method's are refused, and the file is as before."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"skipdecode": to_config_entry({2.0: EVEN}, "hsd")}))
    before = path.read_bytes()
    with pytest.raises(ScheduleError, match="was trained by hsd: its schedules are not skipdecode's"):
        save_calibrated(tmp_path, 3, FAST, "skipdecode")
    assert path.read_bytes() == before
    save_calibrated(tmp_path, 3, FAST, "hsd")
    config = OPTConfig(num_hidden_layers=8, **json.loads(path.read_text()))
    assert config_schedules(config) == {2.0: EVEN, 3.0: FAST}


@pytest.mark.parametrize("key", ["fast", "", "0.5", "0", "-2", "inf", "nan"])
def test_a_config_whose_key_is_no_speedup_is_refused(key: str) -> None:
    """One to as many as there are layers, in digits; the key is quoted."""
    config = OPTConfig(num_hidden_layers=8, skipdecode={"schedules": {key: EVEN.to_dict()}})
    with pytest.raises(ScheduleError, match=f"has a schedule for '{key}', which is no speed-up"):
        config_schedules(config)


@pytest.mark.parametrize(
    "entry",
    [
        [EVEN.to_dict()],
        "skipdecode",
        {"method": "skipdecode"},
        {"schedules": {}},
        {"schedules": [EVEN.to_dict()]},
        {"schedules": {"2": EVEN.to_dict()}, "calibrated": ["2"]},
        {"schedules": {"2": EVEN.to_dict()}, "method": 3},
    ],
    ids=str,
)
def test_a_malformed_entry_is_refused(entry: Any, tmp_path: Path) -> None:
    """It is shown, and nothing else is read or written."""
    config = OPTConfig(num_hidden_layers=8, skipdecode=entry)
    (tmp_path / "config.json").write_text(json.dumps({CONFIG_KEY: entry}))
    for read in (lambda: is_trained(config), lambda: save_calibrated(tmp_path, 2, EVEN, "skipdecode")):
        with pytest.raises(ScheduleError, match="'skipdecode' needs schedules, and may name a method"):
            read()


def test_a_model_of_a_later_version_opens_with_a_warning() -> None:
    """What this version does not know of a schedule in a model's config is left out and named; files stay strict."""
    schedule = Schedule(8, 4, 2, 6)
    entry: Any = to_config_entry({3: schedule})
    entry["schedules"]["3"]["serving"] = True
    entry["from_the_future"] = 1
    config = OPTConfig(num_hidden_layers=8, skipdecode=entry)
    with pytest.warns(UserWarning, match="later version of skipdecode wrote 'serving'"):
        assert schedule_for(config, 3) == schedule
    with pytest.raises(ScheduleError, match="unknown schedule keys: 'serving'"):
        Schedule.from_dict(entry["schedules"]["3"])


def test_schedules_that_were_calibrated_alone_are_no_training() -> None:
    """A model that never learned to skip is trained as the full model with all its layers."""
    entry = {"schedules": {"2": EVEN.to_dict()}, "calibrated": {"2": "skipdecode"}}
    config = OPTConfig(num_hidden_layers=8, skipdecode=entry)
    assert method_schedule(get_method("skipdecode"), config, 2, unmeasured) == EVEN
    assert new_schedule(config, 2, LENGTHS, method=get_method("full")).is_full


def test_what_a_rule_of_its_own_leaves_open() -> None:
    """A method that has one takes no wish, and cannot be planned on a clock; the config's fastest is the default."""
    config, unified = config_of({2.0: EVEN, 5.0: FAST}), get_method("unified")
    assert Lengths(LENGTHS).ratio(new_schedule(config, None, LENGTHS)) == pytest.approx(5, rel=0.05)
    assert Lengths(LENGTHS).ratio(new_schedule(config_of(), None, LENGTHS)) == pytest.approx(2, rel=0.05)
    profile = made(layers=(0,) * 8)
    with pytest.raises(ScheduleError, match="none can be planned on the clock"):
        new_schedule(config, 2, Predictor(profile, [Workload(1, 8, 8)]), method=unified)
    theirs = config_of({2.0: EVEN}, "unified")
    assert method_schedule(unified, theirs, 2, unmeasured) == EVEN
    with pytest.raises(ScheduleError, match="has its own layer order"):
        method_schedule(unified, theirs, 2, lambda: LENGTHS, prompt_layers="max")
    ours = method_schedule(get_method("skipdecode"), config, 2, lambda: LENGTHS, order="bottom")
    assert (ours.order, ours.decay) == ("bottom", FAST.decay)
