"""The load policy: when load begins and ends, and who gets faster."""

from __future__ import annotations

from typing import Any

import pytest

from skipdecode.serving.load_policy import WINDOW, Load


class World:
    """A clock and a count of requests that a test sets."""

    def __init__(self, **limits: Any) -> None:
        self.now, self.waiting, self.running = 0.0, 0, 1
        self.load = Load(lambda: (self.waiting, self.running), 5.0, **limits, clock=lambda: self.now)

    def steps(self, count: int, ms: float, rows: int = 1) -> None:
        """Steps of ``ms`` milliseconds, with a token for each row."""
        for _ in range(count):
            self.now += ms / 1000
            self.load.record([ms / 1000] * rows)


def test_load_begins_above_the_limit_and_ends_below_its_release() -> None:
    """Between the two it stays as it was: it does not come and go with each request."""
    world = World(waiting=8)
    seen = []
    for waiting in (0, 8, 9, 8, 5, 4, 5, 8, 9):
        world.waiting = waiting
        seen.append(world.load.refresh())
    assert seen == [False, False, True, True, True, False, False, False, True]


def test_the_time_per_token_is_a_mean_over_the_last_seconds() -> None:
    """One slow step among fast ones is no load; slow steps are, until fast ones have taken their place."""
    world = World(token_ms=50)
    world.steps(100, 20, rows=4)
    world.steps(1, 500)
    assert world.load.token_ms() == pytest.approx((20 * 400 + 500) / 401)
    assert not world.load.refresh()
    world.steps(100, 100)
    assert world.load.refresh()
    world.steps(int(1000 * WINDOW / 20) + 2, 20)
    assert not world.load.refresh()


def test_a_server_that_stands_still_is_not_idle() -> None:
    """No tokens for a long time: while requests run the newest steps count; without any, nothing does."""
    world = World(token_ms=50)
    world.steps(1, 100)
    world.now += 100 * WINDOW
    assert world.load.refresh()
    world.running = 0
    assert not world.load.refresh()
    assert world.load.token_ms() == 0


def test_both_limits_count() -> None:
    """Load begins when either is passed, and ends when both are down."""
    world = World(waiting=8, token_ms=50)
    world.waiting = 9
    assert world.load.refresh()
    world.waiting = 0
    world.steps(600, 40)
    assert world.load.refresh()  # 40 ms is over half of 50
    world.steps(600, 20)
    assert not world.load.refresh()


@pytest.mark.parametrize(("speedup", "chosen"), [(1.0, 5.0), (8.0, 8.0)])
def test_nobody_gets_slower(speedup: float, chosen: float) -> None:
    world = World(waiting=0)
    assert world.load.choose(speedup) == speedup
    world.waiting = 1
    assert world.load.choose(speedup) == chosen
