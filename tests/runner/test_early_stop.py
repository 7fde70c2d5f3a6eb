"""`run.early_stop` and `run.max_tokens`: when they end a run, and how it goes on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from builders import make_config
from refusals import refused
from small import Notes, config_in, steps_of

from dapo_runner.checkpoint import find_checkpoints
from dapo_runner.logging.metrics import read_log
from dapo_runner.logging.run_log import CHECKPOINTS
from dapo_runner.run.early_stop import EarlyStop
from dapo_runner.train import train


@pytest.mark.parametrize(
    ("values", "settings", "ends"),
    [
        ([0.1, 0.2, 0.2, 0.1, 0.15], {"patience": 3}, [5]),
        ([0.1, 0.2, 0.2, 0.1, 0.3, 0.3], {"patience": 3}, []),
        ([0.1, 0.9, 0.8, 1.0], {"patience": None, "target": 0.9}, [2, 4]),  # it may have gone on: the last one decides
        ([None, 0.1, math.nan, None], {"patience": 2}, [4]),
    ],
)
def test_after_which_evaluations_it_ends(values: list[float], settings: dict[str, Any], ends: list[int]) -> None:
    rule, ended = EarlyStop(make_config(run={"early_stop": {"metric": "x", **settings}})), []
    for number, value in enumerate(values, start=1):
        rule.replay({"kind": "eval", "step": number, "eval/x": value})
        ended += [number] if rule.reason is not None else []
    assert ended == ends


def test_what_cannot_end_a_run_is_refused_but_not_a_consensus_without_answers() -> None:
    """cons@k is logged only where every response has an extracted answer: such an evaluation ends nothing."""
    without: dict[str, Any] = {"format": "auto", "path": "x.jsonl", "eval_size": 0}
    for key, run, data in (
        ("run.early_stop.patience", {"early_stop": {"patience": None}}, {}),
        ("run.early_stop", {"early_stop": {}, "eval_every": 0}, {}),
        ("data.eval_size", {"early_stop": {}}, without),
    ):
        with refused(key):
            make_config(run=run, data=data)

    def rule(metric: str) -> EarlyStop:
        return EarlyStop(make_config(evaluation={"k": 4}, run={"early_stop": {"metric": metric, "patience": 1}}))

    figures = {"eval/avg@4": 0.5, "eval/reward": 0.5}
    for metric in ("avg@3", "cons@5"):
        with refused("run.early_stop.metric"):
            rule(metric).observe(1, figures)
    consensus = rule("cons@4")
    for step, cons in enumerate([0.5, None, 0.5], start=1):
        assert consensus.reason is None
        consensus.observe(step, figures | ({} if cons is None else {"eval/cons@4": cons}))
    assert consensus.reason is not None


def test_a_run_that_ended_early_is_saved_and_can_be_gone_on_with(start: Path, tmp_path: Path) -> None:
    """At this rate no evaluation is better than the first one."""
    folder = tmp_path / "small"

    def run(patience: int | None, steps: int = 6) -> tuple[int, Notes]:
        """Its last step, and what it noted."""
        stop = None if patience is None else {"patience": patience}
        rare = {"early_stop": stop, "steps": steps, "eval_every": 1, "save_every": 10}
        train(config_in(tmp_path, start, run=rare, optimizer={"lr": 1e-30}), notes := Notes())
        return read_log(folder / "metrics.jsonl")[-1]["step"], notes

    last, notes = run(2)
    assert last == 2
    assert [checkpoint.step for checkpoint in find_checkpoints(folder / CHECKPOINTS)] == [2]
    assert any("step 2" in line and "avg@2" in line and "run.early_stop.patience=2" in line for line in notes.lines)
    before = (folder / "metrics.jsonl").read_bytes()
    run(2)  # the same command again
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert run(3)[0] == 3
    assert run(None, steps=4)[0] == 4


def test_a_budget_of_tokens_ends_a_run_wherever_it_was_stopped(start: Path, tmp_path: Path) -> None:
    def generated(name: str, **run: Any) -> list[int]:
        run = {"eval_every": 0, "save_every": 10, "name": name} | run
        folder = train(config_in(tmp_path, start, run=run), Notes())
        events = read_log(folder / "metrics.jsonl")
        assert (events[0]["kind"], events[-1]["kind"]) == ("eval", "eval")
        return steps_of(folder, "sampling/tokens")

    free = generated("free")
    budget = {"max_tokens": sum(free[:2]) + 1}
    assert generated("stopped", **budget, steps=1) == free[:1]
    assert generated("stopped", **budget) == free[:3]
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path / "stopped" / CHECKPOINTS)] == [1, 3]
