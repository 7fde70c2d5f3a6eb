"""What the pytest-benchmark files share: the same configurations, contestants and checks as ``run.py``."""

from __future__ import annotations

import functools

import pytest

from benchmarks.configs import SUITES, Config
from benchmarks.contestants import Contestant
from benchmarks.harness import check, field_of
from benchmarks.problem import Problem, build
from benchmarks.truth import Truth, find_truth


def cases(level: str, suite: str = "smoke") -> list[object]:
    """(configuration, contestant) of a suite; those that force an instruction set need a process of their own."""
    return [
        pytest.param(config, contestant, id=f"{config.name}-{contestant.name}".replace(" ", "_"))
        for config in SUITES[suite]
        if config.level == level and config.isa is None
        for contestant in field_of(config)
    ]


@functools.cache
def _prepared(config: Config) -> tuple[Problem, Truth]:
    problem = build(config)
    return problem, find_truth(problem)


def bench(benchmark: object, config: Config, contestant: Contestant) -> None:
    """Check once, then let pytest-benchmark time rounds of one call on restored inputs."""
    reason = contestant.missing()
    if reason is not None:
        pytest.skip(reason)
    problem, truth = _prepared(config)
    run = contestant.make(problem)
    problem.restore()
    result = run()
    if contestant.kind != "denominator":
        row = check(contestant, result, truth)
        assert "reason" not in row, row["reason"]
    benchmark.group = config.name  # type: ignore[attr-defined]
    benchmark.pedantic(run, setup=problem.restore, rounds=config.rounds, iterations=1)  # type: ignore[attr-defined]
