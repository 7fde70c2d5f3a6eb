"""The clock: whatever happens inside a step, its phases add up to the wall time."""

from __future__ import annotations

import pytest

from dapo_runner import timing
from dapo_runner.timing import PHASES, StepClock, time_split


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Time:
    hand = Time()
    monkeypatch.setattr(timing, "time", hand)
    return hand


def test_phases_add_up_and_an_inner_one_takes_its_time_off_the_outer(hand: Time) -> None:
    clock = StepClock()
    hand.now += 1
    with clock.phase("rollout"):
        hand.now += 2
        with clock.phase("score"):
            hand.now += 4
        hand.now += 8
    hand.now += 16
    with clock.phase("score"):
        hand.now += 32
    assert clock.so_far() == {"other": 17, "rollout": 10, "score": 36}
    hand.now += 64
    seconds = clock.lap()
    assert sum(seconds.values()) == hand.now - 100
    hand.now += 5
    assert clock.lap() == {"other": 5}


def test_a_lap_inside_a_phase_stays_in_it(hand: Time) -> None:
    clock = StepClock()
    with clock.phase("save"):
        hand.now += 1
        assert clock.lap() == {"other": 0, "save": 1}
        hand.now += 2
    assert clock.lap() == {"save": 2, "other": 0}


def test_an_error_ends_its_phase(hand: Time) -> None:
    clock = StepClock()

    def fail() -> None:
        with clock.phase("rollout"):
            hand.now += 3
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    hand.now += 1
    assert clock.lap() == {"other": 1, "rollout": 3}


def test_changes_are_told(hand: Time) -> None:
    heard: list[str] = []
    clock = StepClock(on_phase=heard.append)
    with clock.phase("forward_backward"), clock.phase("forward_backward"):
        clock.so_far()
    assert heard == ["forward_backward", "other"]
    assert set(heard) <= PHASES.keys()


def test_the_split_of_an_average_step() -> None:
    events = [
        {"step": 0, "kind": "start", "seconds/evaluate": 1000.0},
        {"step": 1, "kind": "step", "seconds/rollout": 3.0, "seconds/other": 1.0},
        {"step": 2, "kind": "step", "seconds/rollout": 3.0, "seconds/save": 9.0},
    ]
    assert list(time_split(events).items()) == [("save", 4.5), ("rollout", 3.0), ("other", 0.5)]
    assert time_split(events[:1]) == {}
