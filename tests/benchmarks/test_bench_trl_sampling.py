"""TRL with and without dynamic sampling: what is counted, and what is compared at equal steps and at equal tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import bench_trl_sampling as bench

ROOT = Path(__file__).parents[2]


def test_every_generated_token_and_group_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "GROUP", 2)
    ledger = bench.Ledger()
    texts = ["Answer: 1", "Answer: 2", "Answer: 1", "Answer: 1"]
    for step, answer in ((0, "1"), (0, "3"), (1, "1")):
        state = SimpleNamespace(global_step=step)
        rewards = ledger(texts, [[5] * 3, [5], [5], [5]], [answer] * 4, trainer_state=state)
        assert rewards == [float(text == f"Answer: {answer}") for text in texts]
    assert ledger.tokens == 18
    assert ledger.steps[0] == {"tokens": 12, "n": 8, "correct": 3, "groups": 4, "mixed": 1}


def test_trained_groups() -> None:
    """Of TRL alone all generated groups train; with dynamic sampling those that TRL's log names."""
    step = {"tokens": 9, "n": 8, "correct": 3, "groups": 24, "mixed": 11}
    assert bench.with_trained(step, {"reward": 0.5}) == step | {"trained": 16, "used": 11}
    assert bench.with_trained(step, {"dynamic_sampling/groups_used": 15.0}) == step | {"trained": 16, "used": 15}


def test_the_last_steps_at_equal_steps_and_at_equal_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LAST", 1)

    def steps(tokens: int, used: int, *correct: int) -> list[bench.Step]:
        fixed = {"tokens": tokens, "n": 10, "groups": 5, "trained": 4, "used": used}
        return [{"correct": x, "mixed": x // 2, **fixed} for x in correct]

    runs = {bench.DYNAMIC: steps(2000, 4, 4, 8), bench.ALONE: steps(1000, 3, 2, 4, 6, 7, 9)}
    found = list(bench.compare(runs, 2).values())
    updates, tokens, generated, trained, halfway, end, difference = found
    assert (updates, tokens) == ([2, 4, 2], [2, 4, 4])
    assert (generated, trained) == (pytest.approx([30, 45, 60]), pytest.approx([75, 75, 100]))
    assert (halfway, end) == (pytest.approx([20, 40, 40]), pytest.approx([40, 70, 80]))
    assert difference == pytest.approx([40, 10])


def test_the_table_of_the_page_is_the_measured_one() -> None:
    """docs/trl.md shows the rows of its file, and the file those of its values."""
    page = (ROOT / "docs/trl.md").read_text(encoding="utf-8")
    (path,) = re.findall(r"\]\(\.\./(benchmarks/results/trl-sampling-\S+)\.md\)", page)
    results = json.loads((ROOT / f"{path}.json").read_text(encoding="utf-8"))
    text = bench.page(results)
    assert (ROOT / f"{path}.md").read_text(encoding="utf-8") == text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 9
    assert set(rows) <= set(page.splitlines())
