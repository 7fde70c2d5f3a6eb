"""Ctrl-C: the step is finished and saved, and the run that goes on cannot be told from one that never stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_train import Notes, config_in

from dapo_runner import interrupt
from dapo_runner.algorithms.learner import Learner
from dapo_runner.checkpoint import find_checkpoints
from dapo_runner.interrupt import StepGivenUpError, StopRequest
from dapo_runner.logging.progress import Progress
from dapo_runner.logging.run_log import CHECKPOINTS
from dapo_runner.rollout.group_buffer import SampledStep
from dapo_runner.rollout.hf import HFEngine
from dapo_runner.run import training
from dapo_runner.run.steps import Run
from dapo_runner.train import train


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
    whole = train(config_in(tmp_path, run={**raw, "name": "whole"}), Progress())
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
    train(config_in(tmp_path, run=raw), Progress())
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_twice_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    press(monkeypatch, at_update=0, times=2)
    saves: list[object] = []
    monkeypatch.setattr(training, "save_checkpoint", lambda *arguments: saves.append(arguments))
    with pytest.raises(KeyboardInterrupt):
        train(config_in(tmp_path), Progress())
    assert saves == []


def test_sigterm_from_two_senders_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd sends it to torchrun, which passes it on, and to its ranks."""
    with StopRequest(lambda text: None) as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.setattr(interrupt, "ONE_STOP", 0.0)
    with StopRequest(lambda text: None):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_signals_are_given_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest(lambda text: None) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("is_sampling", [False, True])
def test_a_step_that_would_end_too_late_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sampling: bool
) -> None:
    """A signal before the rollout is first answered with a promise to save this step."""
    raw = {**config_in(tmp_path).model_dump(mode="json")["run"], "save_every": 0, "eval_every": 0, "steps": 6}
    whole = train(config_in(tmp_path, run={**raw, "name": "whole"}), Progress())
    late = config_in(tmp_path, run={**raw, "grace": 1e-9})
    sample, generate_round = Run.sample, Run.generate_round

    def generate(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the rollout went on")

    def send_before(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return generate_round(*arguments)

    def sample_late(run: Run, step: int) -> SampledStep:
        with monkeypatch.context() as patch:
            if run.learner.optimizer.state and is_sampling:
                patch.setattr(HFEngine, "generate", generate)
            elif run.learner.optimizer.state:
                patch.setattr(Run, "generate_round", send_before)
            return sample(run, step)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "sample", sample_late)
        with pytest.raises(StepGivenUpError) as given_up:
            train(late, notes := Notes())
    folder = tmp_path / "small"
    (saved,) = find_checkpoints(folder / CHECKPOINTS)
    assert 0 < saved.step < 6
    (before, after) = ([line for line in notes.lines if f"step {saved.step + n} " in line] for n in (0, 1))
    assert [str(given_up.value) in line for line in before + after] == [False, True]
    train(late, Progress())
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_an_interrupt_gives_nothing_up(tmp_path: Path) -> None:
    with StopRequest(lambda text: None, grace=1e-9) as stop:
        stop.expect_step(1000.0)
        with stop.giving_up():
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
    with StopRequest(lambda text: None, grace=100.0) as stop:
        stop.expect_step(1.0)
        with stop.giving_up():
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
