"""Ctrl-C: the step is finished and saved, and the run that goes on cannot be told from one that never stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from test_train import Notes, config_in

from dapo_runner import run as module
from dapo_runner.checkpoint import find_checkpoints
from dapo_runner.interrupt import StopRequest
from dapo_runner.loop import train
from dapo_runner.records.progress import SilentProgress
from dapo_runner.records.run_log import CHECKPOINTS
from dapo_runner.update.learner import Learner


def press(patch: pytest.MonkeyPatch, at_update: int, number: signal.Signals = signal.SIGINT, times: int = 1) -> None:
    """Send the signal to this process in the middle of a step."""
    original: Callable[..., dict[str, float]] = Learner.update
    count = iter(range(1000))

    def update(*arguments: object) -> dict[str, float]:
        if next(count) == at_update:
            for _ in range(times):
                os.kill(os.getpid(), number)
        return original(*arguments)

    patch.setattr(Learner, "update", update)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    before = signal.getsignal(number)  # not the default where whoever started us ignores it
    raw = {**config_in(tmp_path).model_dump(mode="json")["run"], "save_every": 0}
    whole = train(config_in(tmp_path, run={**raw, "name": "whole"}), SilentProgress())
    notes = Notes()
    with monkeypatch.context() as patch:
        press(patch, at_update=2, number=number)
        with pytest.raises(KeyboardInterrupt):
            train(config_in(tmp_path, run=raw), notes)
    folder = tmp_path / "small"
    saved = [checkpoint.step for checkpoint in find_checkpoints(folder / CHECKPOINTS)]
    assert saved in ([1], [2])
    assert any(f"stopped after step {saved[0]}, which is saved" in line for line in notes.lines)
    assert signal.getsignal(number) is before
    train(config_in(tmp_path, run=raw), SilentProgress())
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_twice_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    press(monkeypatch, at_update=0, times=2)
    saves: list[object] = []
    monkeypatch.setattr(module, "save_checkpoint", lambda *arguments: saves.append(arguments))
    with pytest.raises(KeyboardInterrupt):
        train(config_in(tmp_path), SilentProgress())
    assert saves == []


def test_signals_are_given_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest(lambda text: None) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
    assert signal.getsignal(signal.SIGINT) is before
