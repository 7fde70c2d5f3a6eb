"""Pages of the benchmarks of several ranks, and two ranks that share a small head."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks import bench_ranks, machine


def test_the_page_of_a_step_has_the_medians_and_the_largest_phases() -> None:
    one, two = bench_ranks.SIDES[0][0], bench_ranks.SIDES[2][0]
    phases = [{"rollout": 1.0 + i, "optimizer": 0.5} for i in range(3)]  # median 2.0
    found = {one: phases, two: [{**step, "sync": 2.5} for step in phases]}
    options = argparse.Namespace(prompts=4, rounds=1, steps=3)
    page = bench_ranks.step_page(found, machine.describe(), options)
    assert "÷ one process | sync | rollout | optimizer |" in page
    assert f"| {two} | 5.00 | 2.00 |" in page  # 2 + 0.5 + 2.5 of 2.5


def test_the_page_of_a_shared_head_divides_by_half_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    size = (32, 16, 64, torch.float32)
    monkeypatch.setattr(bench_ranks, "SIZES", (size,))
    half, _ = bench_ranks.calls(size, 0)
    assert torch.isfinite(half())
    page = bench_ranks.head_page([[0.5, 0.55]], machine.describe())
    assert "| 32 | 16 | 64 | float32 | 500 | 550 | 1.10 | met |" in page
