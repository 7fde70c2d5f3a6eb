"""`run.early_stop`: when it ends a run, that a run stopped on the way ends where it would have, how it goes on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from builders import make_config
from refusals import refused
from test_train import Notes, config_in

from dapo_runner import evaluate
from dapo_runner.checkpoint import find_checkpoints
from dapo_runner.config import Config
from dapo_runner.logging.metrics import read_log
from dapo_runner.logging.run_log import CHECKPOINTS
from dapo_runner.run.early_stop import EarlyStop
from dapo_runner.run.steps import Run
from dapo_runner.train import train


def ends_after(values: list[float | None], **settings: Any) -> int | None:
    """How many evaluations it takes."""
    rule = EarlyStop(make_config(run={"early_stop": {"metric": "x", **settings}}))
    for n, value in enumerate(values, start=1):
        rule.observe(n, {"eval/x": value})
        if rule.reason is not None:
            return n
    return None


@pytest.mark.parametrize(
    ("values", "settings", "n"),
    [
        ([0.1, 0.2, 0.2, 0.1, 0.15], {"patience": 3}, 5),
        ([0.1, 0.2, 0.2, 0.1, 0.3, 0.3], {"patience": 3}, None),
        ([3.0, 2.0, 2.5, 2.0], {"patience": 2, "mode": "min"}, 4),
        ([0.1, 0.9, 1.0], {"patience": None, "target": 0.9}, 2),
        ([3.0, 1.0], {"patience": None, "target": 2, "mode": "min"}, 2),
        ([None, 0.1, math.nan, None], {"patience": 2}, 4),
    ],
)
def test_when_it_ends(values: list[float | None], settings: dict[str, Any], n: int | None) -> None:
    assert ends_after(values, **settings) == n


def test_what_cannot_end_a_run_is_refused() -> None:
    with refused("run.early_stop.patience"):
        make_config(run={"early_stop": {"patience": None}})
    with refused("run.early_stop"):
        make_config(run={"early_stop": {}, "eval_every": 0})
    with refused("data.eval_size"):
        make_config(run={"early_stop": {}}, data={"format": "auto", "path": "x.jsonl", "eval_size": 0})
    rule = EarlyStop(make_config(run={"early_stop": {"metric": "avg@3"}}))
    with refused("run.early_stop.metric"):
        rule.observe(0, {"step": 0, "eval/avg@2": 0.5, "eval/reward": 0.5})


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations never get better."""
    monkeypatch.setattr(evaluate, "mean_correct", lambda groups: 0.5)


def config_of(folder: Path, patience: int | None = 2, **run: Any) -> Config:
    stop = None if patience is None else {"patience": patience}
    return config_in(folder, run={"early_stop": stop, "steps": 6, "eval_every": 1, "save_every": 10, **run})


def last_step(folder: Path) -> int:
    return int(read_log(folder / "metrics.jsonl")[-1]["step"])


@pytest.mark.usefixtures("flat")
def test_a_run_ends_early_is_saved_and_can_be_gone_on_with(tmp_path: Path) -> None:
    notes = Notes()
    folder = train(config_of(tmp_path), notes)
    assert last_step(folder) == 2
    assert [checkpoint.step for checkpoint in find_checkpoints(folder / CHECKPOINTS)] == [2]
    told = "stopped early after step 2: the best eval/avg@2 is 0.5 after step 0, none better in 2 evaluations"
    assert any(note.startswith(told) for note in notes.lines)
    before = (folder / "metrics.jsonl").read_bytes()
    train(config_of(tmp_path), Notes())  # the same command again
    assert (folder / "metrics.jsonl").read_bytes() == before
    train(config_of(tmp_path, patience=3), Notes())
    assert last_step(folder) == 3
    train(config_of(tmp_path, patience=None, steps=4), Notes())
    assert last_step(folder) == 4


@pytest.mark.usefixtures("flat")
def test_a_run_that_was_stopped_on_the_way_ends_at_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(config_of(tmp_path / "whole", patience=3), Notes())
    end_step = Run.end_step

    def lost(self: Run, step: int) -> None:
        end_step(self, step)
        if step == 2:
            raise KeyboardInterrupt

    config = config_of(tmp_path / "lost", patience=3, save_every=1)
    monkeypatch.setattr(Run, "end_step", lost)
    with pytest.raises(KeyboardInterrupt):
        train(config, Notes())
    monkeypatch.undo()
    monkeypatch.setattr(evaluate, "mean_correct", lambda groups: 0.5)
    folder = train(config, Notes())
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert last_step(folder) == 3


def test_the_last_evaluation_decides_where_no_budget_is_spent() -> None:
    """A run may have gone on after the one that would have ended it, with `run.early_stop=null`."""
    rule = EarlyStop(make_config(run={"early_stop": {"patience": None, "target": 0.5}, "max_tokens": 10}))
    ended = []
    for step, (value, tokens) in enumerate([(0.6, 4), (0.4, 4), (0.4, 4)], start=1):
        rule.count(step, tokens)
        rule.observe(step, {rule.metric: value})
        ended.append(rule.reason is not None)
    assert ended == [True, False, True]


def test_a_budget_of_tokens_ends_a_run_wherever_it_was_stopped(tmp_path: Path) -> None:
    def generated(folder: Path) -> list[int]:
        return [event["sampling/tokens"] for event in read_log(folder / "metrics.jsonl") if event["kind"] == "step"]

    free = generated(train(config_of(tmp_path / "free", patience=None, steps=4, eval_every=0), Notes()))
    budget: dict[str, Any] = {"patience": None, "eval_every": 0, "max_tokens": sum(free[:2]) + 1}
    notes = Notes()
    whole = train(config_of(tmp_path / "whole", **budget), notes)
    assert generated(whole) == free[:3]
    assert [event["step"] for event in read_log(whole / "metrics.jsonl") if event["kind"] == "eval"] == [0, 3]
    assert any(note.startswith("ended after step 3: ") for note in notes.lines)
    stopped = train(config_of(tmp_path / "stopped", **budget | {"steps": 2}), Notes())
    assert generated(train(config_of(tmp_path / "stopped", **budget), Notes())) == free[:3]
    assert [checkpoint.step for checkpoint in find_checkpoints(stopped / CHECKPOINTS)] == [2, 3]


def test_a_consensus_that_was_not_measured_ends_nothing() -> None:
    """cons@k is logged only where every response has an extracted answer."""
    rule = EarlyStop(make_config(evaluation={"k": 4}, run={"early_stop": {"metric": "cons@4", "patience": 1}}))
    rule.observe(1, {"eval/cons@4": 0.5})
    rule.observe(2, {"eval/avg@4": 0.5})
    assert rule.reason is None
    with refused("run.early_stop.metric"):
        EarlyStop(make_config(run={"early_stop": {"metric": "cons@5"}})).observe(1, {"eval/avg@4": 0.5})
