"""Whatever fails after a step was trained, the step is saved first, and the run goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer
from test_train import Notes, config_in

from dapo_runner.algorithms.learner import Learner
from dapo_runner.checkpoint import find_checkpoints
from dapo_runner.config import Config
from dapo_runner.logging.metrics import read_log
from dapo_runner.logging.progress import Progress
from dapo_runner.logging.run_log import CHECKPOINTS, RunLog
from dapo_runner.rollout.asynchronous import AsynchronousSampler
from dapo_runner.rollout.hf import HFEngine
from dapo_runner.rollout.probe import OutOfSyncError, SyncProbe
from dapo_runner.rollout.server import ServerEngine
from dapo_runner.run.steps import Run
from dapo_runner.train import train


class LostError(Exception):
    """A server, a tracker or a disk is gone."""


def rare(folder: Path, **sections: Any) -> Config:
    """Four steps, the only checkpoint after the last of them."""
    return config_in(folder, run={"save_every": 0}, **sections)


def fail_at(patch: pytest.MonkeyPatch, owner: type, method: str, call: int, error: Callable[[], None]) -> None:
    original, calls = getattr(owner, method), iter(range(1, 10**6))

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            error()
        return original(*arguments, **options)

    patch.setattr(owner, method, failing)


def lose() -> None:
    raise LostError


def saved_steps(folder: Path) -> list[int]:
    return [found.step for found in find_checkpoints(folder / CHECKPOINTS)]


def without_sync(folder: Path) -> list[dict[str, Any]]:
    events = read_log(folder / "metrics.jsonl")
    return [{key: value for key, value in event.items() if not key.startswith("sync/")} for event in events]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(rare(tmp_path_factory.mktemp("whole")), Progress())


# The engine is given weights when it is made, and asked by the probe before the first step.
@pytest.mark.parametrize(
    ("owner", "method", "call"),
    [(HFEngine, "update_weights", 3), (SyncProbe, "__call__", 4), (RunLog, "evaluation", 2), (Run, "end_step", 4)],
    ids=["sync", "probe", "evaluation", "end of step"],
)
def test_a_failure_after_a_trained_step(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, call: int
) -> None:
    notes = Notes()
    with monkeypatch.context() as patch:
        fail_at(patch, owner, method, call, lose)
        with pytest.raises(LostError):
            train(rare(tmp_path), notes)
    (step,) = saved_steps(tmp_path / "small")
    assert 1 < step < 4
    assert any(f"step {step} is saved" in line for line in notes.lines)
    logged = [event["step"] for event in read_log(tmp_path / "small" / "metrics.jsonl") if event["kind"] == "step"]
    assert logged == list(range(1, step + 1))
    train(rare(tmp_path), Progress())
    assert without_sync(tmp_path / "small") == without_sync(whole)


def test_an_engine_out_of_sync_takes_no_step_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HFEngine, "update_weights", lambda engine, weights: None)
    with pytest.raises(OutOfSyncError):
        train(rare(tmp_path, rollout={"probe": {"bound": 1e-5}}), Progress())
    assert saved_steps(tmp_path / "small") == [1]


def test_a_mismatch_above_the_bar_warns_or_stops_with_the_step_saved(tmp_path: Path) -> None:
    """float32 rounds differently when it decodes, so its KL is not 0."""
    notes = Notes()
    train(rare(tmp_path / "warned", rollout={"max_mismatch_kl": 1e-30}), notes)
    steps = [event for event in read_log(tmp_path / "warned/small/metrics.jsonl") if event["kind"] == "step"]
    above = sum(event["train/rollout_k3"] > 1e-30 for event in steps)
    assert above == sum("rollout.max_mismatch_kl" in line for line in notes.lines) > 0
    stopping = rare(tmp_path, rollout={"max_mismatch_kl": 1e-30, "on_mismatch": "error"})
    for step in (1, 2):  # the same command goes on after the step that is saved
        with pytest.raises(OutOfSyncError, match=r"rollout\.max_mismatch_kl"):
            train(stopping, Progress())
        assert saved_steps(tmp_path / "small")[-1] == step


def interrupt_twice() -> None:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("owner", "method", "call"), [(SyncProbe, "__call__", 4), (Run, "training_records", 3)])
def test_two_signals_outside_an_update_save_the_last_step(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, call: int
) -> None:
    with monkeypatch.context() as patch:
        fail_at(patch, owner, method, call, interrupt_twice)
        with pytest.raises(KeyboardInterrupt):
            train(rare(tmp_path), Progress())
    assert saved_steps(tmp_path / "small") == [3 if owner is SyncProbe else 2]
    train(rare(tmp_path), Progress())
    assert without_sync(tmp_path / "small") == without_sync(whole)


def test_two_signals_during_an_update_save_nothing_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the step's updates are in the weights by then."""
    update, notes, numbers = Learner.update, Notes(), list[int]()

    def interrupted(learner: Learner, mini: Any, step: int) -> Any:
        numbers.append(mini.index)
        if step == 2 and mini.index == 1:
            interrupt_twice()
        return update(learner, mini, step)

    monkeypatch.setattr(Learner, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(rare(tmp_path), notes)
    assert max(numbers) == 1
    assert saved_steps(tmp_path / "small") == []
    assert any("the last checkpoint is of step 0" in line for line in notes.lines)


# The engine sends weights when it is made. Groups that were taken and not trained on wait for the next start.
@pytest.mark.parametrize(("fail", "error"), [(lose, LostError), (interrupt_twice, KeyboardInterrupt)])
@pytest.mark.parametrize(
    ("owner", "method", "call", "saved"),
    [
        (ServerEngine, "update_weights", 4, 3),
        (ServerEngine, "answers_to_probe", 4, 3),
        (Run, "training_records", 3, 2),
        (AsynchronousSampler, "_wait_for_step", 3, 2),
    ],
)
def test_a_failure_of_a_run_with_asynchronous_rollouts(
    tmp_path: Path,
    model_folder: Path,
    servers: list[FakeServer],
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    call: int,
    saved: int,
    fail: Callable[[], None],
    error: type[BaseException],
) -> None:
    urls = [server.url for server in servers]
    rollout = {"engine": "server", "server": {"urls": urls, "folder": str(tmp_path)}, "max_staleness": 1}
    config = rare(
        tmp_path,
        model={"tiny": None, "path": str(model_folder)},
        rollout={"max_response_tokens": 6, "correction": {"weights": "token"}, **rollout},
        sampler={"filter_groups": False, "max_age": 2},
    )
    with monkeypatch.context() as patch:
        fail_at(patch, owner, method, call, fail)
        with pytest.raises(error):
            train(config, Progress())
    assert saved_steps(tmp_path / "small") == [saved]
    notes = Notes()
    events = read_log(train(config, notes) / "metrics.jsonl")
    steps = {event["step"]: event for event in events if event["kind"] == "step"}
    assert list(steps) == [1, 2, 3, 4]
    assert all(step["batch/groups"] == 4 for step in steps.values())
    (told,) = (note for note in notes.lines if "groups are left over" in note)
    assert int(told.split()[0]) >= 4 * (saved == 2)
