"""The step against TRL: TRL at its best allocator, ours under the same, and what a step's floor is made of."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone
from typing import Any

import pytest
import torch

from benchmarks import bench_step_vs_trl as step
from benchmarks.allocators import ALLOCATORS, BOTH, OUT_OF_THE_BOX, RAISED
from dapo_runner.timing import StepClock

OPTIONS = argparse.Namespace(steps=3, threads=2)


def _result(side: str, allocator: str, seconds: float) -> dict[str, Any]:
    phases = {"rollout": 0.4 * seconds, "forward_backward": 0.5 * seconds, "other": 0.1 * seconds}
    result = {"side": side, "allocator": allocator, "seconds": [99.0, seconds, seconds], "tokens": [1, 1000, 1000]}
    result |= {"phases": [phases] * 3, "versions": {}, "peak_bytes": 2**30}
    return result | {"decoding": [9.0, 3.0, 3.0], "products": 4.0, "product_calls": 7}


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    theirs = {OUT_OF_THE_BOX: 40.0, RAISED: 25.0, BOTH: 27.0}
    monkeypatch.setattr(
        step,
        "measure",
        lambda side, allocator, options: _result(
            side, allocator, theirs.get(allocator, 30.0) if side == "TRL" else 10.0
        ),
    )
    return step.measure_all(OPTIONS)


def test_trl_is_quoted_at_its_best_and_ours_under_the_same(results: list[dict[str, Any]]) -> None:
    assert [r["allocator"] for r in results if r["side"] == "TRL"] == list(ALLOCATORS)
    assert {r["allocator"] for r in results if r["side"] in step.OURS} == {RAISED}
    assert {r["allocator"] for r in results if r["side"] == step.BY_COMMAND} == {OUT_OF_THE_BOX}
    page = step.page(results, OPTIONS, datetime.now(timezone.utc))
    assert "| runner | thresholds raised | 10.00 | 1000 | 100 | 2.50 |" in page  # 25 ÷ 10, not 40 ÷ 10
    assert "| TRL | out of the box | 40.00 | 1000 | 25 | 0.62 |" in page


def test_what_lies_between_a_step_and_its_floor(results: list[dict[str, Any]]) -> None:
    text = step.floor(step.result_of(results, "runner"))
    assert "1.43 times its floor (target 1.25: not met)" in text  # 10 ÷ (3 + 4)
    runner = step.result_of(results, "runner")
    assert "not valid" in step.floor(runner | {"products": 100.0})
    assert "not valid" not in text
    for line in ("| 1.00 | rollout, around", "| 1.00 | forward and backward pass, between", "| 1.00 | every other"):
        assert line in text


def test_the_products_of_an_update_are_taken_down() -> None:
    products, layer = step.Products(), torch.nn.Linear(8, 4, bias=False)
    decoding: list[float] = []
    with step.watched(decoding, products, last_update=2):
        clock = StepClock()
        for _ in range(3):
            with clock.phase("rollout"):
                layer(torch.randn(16, 8))
            with clock.phase("forward_backward"):
                layer(torch.randn(16, 8, requires_grad=True)).sum().backward()
    shapes = sorted((left[0], right[0]) for left, right in products.seen)
    # y = x·Wᵀ, dx = dy·W, dW = dyᵀ·x, of the second update alone.
    assert shapes == [((4, 16), (16, 8)), ((16, 4), (4, 8)), ((16, 8), (8, 4))]
    assert products.seen.total() == 3
    products.add_head(16, hidden=8, vocab=32, dtype=torch.float32)
    assert products.seen.total() == 6
    assert products.seconds() > 0
    assert StepClock.phase.__name__ == "phase"
    assert StepClock.phase.__module__ == "dapo_runner.timing"
