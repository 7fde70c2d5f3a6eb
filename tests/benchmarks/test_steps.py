"""Pages of the benchmarks of a training step: against TRL at its best allocator, and on several ranks."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone
from typing import Any

import pytest

from benchmarks import bench_ranks, machine
from benchmarks import bench_step_vs_trl as step
from benchmarks.allocators import ALLOCATORS, BOTH, OUT_OF_THE_BOX, RAISED


def test_the_page_of_ranks_has_the_medians_and_the_largest_phases() -> None:
    one, two = bench_ranks.SIDES[0][0], bench_ranks.SIDES[2][0]
    phases = [{"rollout": 1.0 + i, "optimizer": 0.5} for i in range(3)]  # median 2.0
    found = {one: phases, two: [{**step, "sync": 2.5} for step in phases]}
    options = argparse.Namespace(prompts=4, rounds=1, steps=3)
    page = bench_ranks.step_page(found, machine.describe(), options)
    assert "÷ one process | sync | rollout | optimizer |" in page
    assert f"| {two} | 5.00 | 2.00 |" in page  # 2 + 0.5 + 2.5 of 2.5


def _result(side: str, allocator: str, seconds: float) -> dict[str, Any]:
    phases = {"rollout": 0.4 * seconds, "forward_backward": 0.5 * seconds, "other": 0.1 * seconds}
    result = {"side": side, "allocator": allocator, "seconds": [99.0, seconds, seconds], "tokens": [1, 1000, 1000]}
    return result | {"phases": [phases] * 3, "versions": {}, "peak_bytes": 2**30}


def test_trl_is_quoted_at_its_best_and_ours_under_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, options = {OUT_OF_THE_BOX: 40.0, RAISED: 25.0, BOTH: 27.0}, argparse.Namespace(steps=3, threads=2)

    def measure(side: str, allocator: str, options: argparse.Namespace) -> dict[str, Any]:
        return _result(side, allocator, theirs.get(allocator, 30.0) if side == "TRL" else 10.0)

    monkeypatch.setattr(step, "measure", measure)
    results = step.measure_all(options)
    assert [r["allocator"] for r in results if r["side"] == "TRL"] == list(ALLOCATORS)
    assert {r["allocator"] for r in results if r["side"] in step.OURS} == {RAISED}
    assert {r["allocator"] for r in results if r["side"] == step.BY_COMMAND} == {OUT_OF_THE_BOX}
    page = step.page(results, options, datetime.now(timezone.utc))
    assert "| runner | thresholds raised | 10.00 | 1000 | 100 | 2.50 |" in page  # 25 ÷ 10, not 40 ÷ 10
    assert "| TRL | out of the box | 40.00 | 1000 | 25 | 0.62 |" in page
