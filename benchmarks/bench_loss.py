"""The smoke suite under pytest-benchmark, to compare a change with the last saved run.

``run.py`` is for figures to quote.

    pytest benchmarks/bench_loss.py --benchmark-autosave                       save this run under .benchmarks/
    pytest benchmarks/bench_loss.py --benchmark-autosave --benchmark-compare   the same, beside the last saved run
"""

from __future__ import annotations

import functools

import pytest

from benchmarks.configs import SMOKE, Config
from benchmarks.contestants import Contestant
from benchmarks.harness import check, contestants_of
from benchmarks.problem import Problem, build
from benchmarks.truth import Truth, find_truth

CASES = [
    pytest.param(config, contestant, id=f"{config.workload}-{contestant.name}".replace(" ", "_"))
    for config in SMOKE
    for contestant in contestants_of(config)
]


@functools.lru_cache(maxsize=1)
def _prepare(config: Config) -> tuple[Problem, Truth]:
    problem = build(config)
    return problem, find_truth(problem)


@pytest.mark.parametrize(("config", "contestant"), CASES)
def test_loss(benchmark: object, config: Config, contestant: Contestant) -> None:
    """Check one call against float64, then time rounds of one call on restored inputs."""
    if reason := contestant.missing():
        pytest.skip(reason)
    problem, truth = _prepare(config)
    problem.restore()
    run = contestant.make(problem)
    result = run()
    if contestant.kind != "denominator":
        row = check(contestant, result, truth)
        assert "reason" not in row, row["reason"]
    benchmark.group = config.name  # type: ignore[attr-defined]
    benchmark.pedantic(run, setup=problem.restore, rounds=config.rounds, iterations=1)  # type: ignore[attr-defined]
