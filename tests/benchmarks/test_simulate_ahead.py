"""The model of steps ahead against what can be worked out by hand. Its rates are round numbers, nobody's."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from docs.models.simulate_ahead import Setting, best, main, simulate

# Every response 100 tokens of 0.01 s, 4 at a time; a step trains on 8 of them, 800 tokens.
EVEN = Setting(gpus=2, prompts=2, group=4, asked=1.0, median=100.0, sigma=0.0, slots=4, base=0.01, train=400.0)
TAIL = replace(EVEN, gpus=8, prompts=16, sigma=1.2, limit=2000, slots=8, train=3000.0)


def test_in_turn_a_step_is_its_rounds_and_its_training() -> None:
    assert simulate(EVEN, 2).seconds == pytest.approx(1.0 + 1.0)  # 8 responses on 2 servers at once; 800 / (2 · 400)
    slower = replace(EVEN, slope=0.01, slots=2)  # 4 at once, so two rounds of 100 · (0.01 + 2 · 0.01)
    assert simulate(slower, 2).seconds == pytest.approx(2 * 3.0 + 1.0)


def test_ahead_a_step_is_the_longer_of_the_two() -> None:
    ahead = simulate(replace(EVEN, ahead=1), 1)
    assert ahead.seconds == pytest.approx(max(2 * 1.0, 800 / 400))
    assert simulate(replace(EVEN, ahead=1, train=200.0), 1).seconds == pytest.approx(4.0)
    assert ahead.age <= 1 < simulate(replace(EVEN, ahead=3, train=200.0), 1).age <= 3


def test_what_a_tail_costs_and_what_saves_it() -> None:
    rounds, kept, cut = (best(replace(TAIL, ahead=2, ends=ends)) for ends in ("rounds", "kept", "cut"))
    assert kept.seconds < rounds.seconds
    assert cut.seconds < rounds.seconds
    in_turn = [best(replace(TAIL, sigma=sigma, limit=10**6)).seconds for sigma in (0.2, 1.2)]
    assert in_turn[0] < in_turn[1]


def test_no_rate_without_its_source(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rates = ["simulate_ahead", "--decode", "0.01", "0.001", "--train", "100"]
    monkeypatch.setattr(sys, "argv", rates)
    with pytest.raises(SystemExit):
        main()
    assert "--source" in capsys.readouterr().err
    small = ["--gpus", "8", "--prompts", "4", "--group", "4", "--asked", "1", "--ahead", "1", "--steps", "4"]
    monkeypatch.setattr(sys, "argv", [*rates, "--source", "a test", *small])
    main()
    assert "Source: a test." in capsys.readouterr().out
