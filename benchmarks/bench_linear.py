"""From hidden states, small sizes: ``pytest benchmarks/bench_linear.py``. ``run.py`` is for figures to quote."""

from __future__ import annotations

import pytest

from benchmarks._pytest_entry import bench, cases
from benchmarks.configs import Config
from benchmarks.contestants import Contestant


@pytest.mark.parametrize(("config", "contestant"), cases("hidden"))
def test_linear(benchmark: object, config: Config, contestant: Contestant) -> None:
    bench(benchmark, config, contestant)
