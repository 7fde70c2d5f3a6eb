"""A whole run on several ranks: the groups that one process accepts, its figures, one writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launch import torchrun
from small import write_recipe
from talkers import ROOM

from dapo_runner.logging.metrics import read_log

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "2 ranks": (2, []),
    "2 ranks that share positions": (2, ["parallel.sequence=2"]),
    "4 ranks, 2 replicas": (4, ["parallel.replicate=2"]),
}


def run(folder: Path, n: int, *overrides: str) -> list[dict[str, Any]]:
    recipe = write_recipe(folder, steps=2, save_every=0)
    done = torchrun(n, "-m", "dapo_runner", "train", recipe, f"run.name=on{n}", *overrides)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("step 2/2") == 1  # one of the ranks talks
    return read_log(folder / "runs" / f"on{n}" / "metrics.jsonl")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_begins_as_on_one(alone: list[dict[str, Any]], tmp_path: Path, layout: str) -> None:
    n, overrides = LAYOUTS[layout]
    check_beginning(run(tmp_path, n, *overrides), alone)


def test_episodes_begin_as_on_one(tmp_path: Path) -> None:
    settings = ["env={kind: 'talkers:Digits', max_turn_tokens: 25}", *ROOM]
    one, two, shared = (run(tmp_path, *layout, *settings) for layout in ((1,), (2,), (4, "parallel.sequence=2")))
    assert two[1]["batch/turns"] > 1.2
    check_beginning(two, one)
    check_beginning(shared, one)


def check_beginning(events: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    assert [(event["kind"], event["step"]) for event in events] == [(event["kind"], event["step"]) for event in alone]
    assert events[0] == alone[0]  # the evaluation before the first step
    first, expected = events[1], alone[1]
    assert first.keys() == expected.keys()
    for key, value in expected.items():
        if key.startswith(("sampling/", "reflection/")):
            assert first[key] == value, key
        elif key.startswith("train/rollout_gap"):  # rounding alone
            assert max(first[key], value) < 1e-4, key
        elif key != "kind":
            assert first[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


def test_a_layout_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, steps=1)
    done = torchrun(2, "-m", "dapo_runner", "train", recipe, "parallel.sequence=2", "model.tiny.heads=1")
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("dapo: ")]
    assert said == ["dapo: parallel.sequence: expected a divisor of the model's 1 attention heads, got 2"]
    assert not (tmp_path / "runs").exists()
