"""The clock: whatever happens inside a step, its phases add up to the wall time."""

from __future__ import annotations

import time

import pytest

from dapo_runner.timing import StepClock, time_split


class Hand:
    """A clock that is set by hand."""

    now = 100.0


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(time, "perf_counter", lambda: hand.now)
    return hand


def test_phases_add_up_and_an_inner_one_takes_its_time_off_the_outer(hand: Hand) -> None:
    heard: list[str] = []
    clock = StepClock(on_phase=heard.append)
    hand.now += 1
    with clock.phase("rollout"):
        hand.now += 2
        with clock.phase("score"):
            hand.now += 4
        hand.now += 8
    hand.now += 16
    with clock.phase("score"), clock.phase("score"):
        hand.now += 32
    assert clock.so_far() == {"other": 17, "rollout": 10, "score": 36}
    assert heard == ["rollout", "score", "rollout", "other", "score", "other"]  # changes alone
    hand.now += 64
    assert sum(clock.lap().values()) == hand.now - 100
    with pytest.raises(KeyError):
        fail(clock, hand)
    hand.now += 4
    assert clock.lap() == {"save": 2, "other": 4}


def fail(clock: StepClock, hand: Hand) -> None:
    with clock.phase("save"):
        hand.now += 1
        assert clock.lap() == {"other": 0, "save": 1}
        hand.now += 2
        raise KeyError


def test_the_split_of_an_average_step() -> None:
    events = [
        {"step": 0, "kind": "start", "seconds/evaluate": 1000.0},
        {"step": 1, "kind": "step", "seconds/rollout": 3.0, "seconds/other": 1.0},
        {"step": 2, "kind": "step", "seconds/rollout": 3.0, "seconds/save": 9.0},
    ]
    assert list(time_split(events).items()) == [("save", 4.5), ("rollout", 3.0), ("other", 0.5)]
    assert time_split(events[:1]) == {}
