"""The table of where the time goes: every step runs, and the parts and the remainder make the whole."""

from __future__ import annotations

import pytest

from benchmarks.breakdown import hidden_steps, logits_steps, medians, table
from benchmarks.configs import Config
from benchmarks.problem import build

pytest.importorskip("dapo_kernels._C", reason="dapo_kernels._C is not built")


@pytest.mark.parametrize("level", ["logits", "hidden"])
def test_parts_and_remainder_make_the_whole(level: str) -> None:
    config = Config(level, "bfloat16", 32, 512, hidden=64 if level == "hidden" else 0)
    problem = build(config)
    steps = hidden_steps(problem) if level == "hidden" else logits_steps(problem)
    times = medians(steps, problem, rounds=1)
    assert all(ms > 0 for ms in times)
    page = table(config, steps, times)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    assert {len(row) for row in cells} == {7}
    found = {row[0]: row[1] for row in cells[2:]}
    if level == "hidden":
        parts = sum(float(found[step.name]) for step in steps if step.part)
        rest = next(float(ms) for name, ms in found.items() if name.startswith("left over"))
        assert parts + rest == pytest.approx(float(found["**the whole call**"]), abs=0.05)
