"""The tiny model's warm-up: what it is shown and when it ends."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from small import small_recipe

from dapo_runner.config import ConfigError, parse_config
from dapo_runner.data.arithmetic import ArithmeticProblem
from dapo_runner.run.tiny_model import check_tiny, ensure_tiny_model, with_repeats, worked_solution


def test_lines_come_again_as_often_as_asked() -> None:
    solution = worked_solution(ArithmeticProblem("+", (47, 85)))
    assert with_repeats(solution, 0.0, random.Random(0)) == solution
    rng = random.Random(0)
    repeated = [with_repeats(solution, 0.5, rng).split("\n") for _ in range(2000)]
    for lines in repeated:
        assert list(dict.fromkeys(lines)) == solution.split("\n")  # none is missing, none out of place
    assert sum(map(len, repeated)) / 6000 == pytest.approx(2.0, rel=0.05)  # 1 / (1 − ½) of each


def warmed_up(folder: Path, **warmup: Any) -> list[str]:
    raw = small_recipe(output_dir=str(folder))
    raw["model"]["tiny"]["warmup"] |= warmup
    config, told = parse_config(raw), list[str]()
    check_tiny(config)
    ensure_tiny_model(config, folder / "model", told.append)
    return told


def test_it_ends_once_enough_problems_are_solved(tmp_path: Path) -> None:
    told = warmed_up(tmp_path / "a", stop_at=0.05)
    assert len(told) < 9
    with pytest.raises(ConfigError, match=r"warmup\.stop_at: expected fewer examples than .*=60"):
        warmed_up(tmp_path / "b", stop_at=0.5, examples=60)
