"""TRL with and without dynamic sampling: what is counted, and what is compared at equal steps and at equal tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import bench_trl_sampling as bench


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


def test_the_last_steps_at_equal_steps_and_at_equal_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LAST", 1)

    def steps(tokens: int, *correct: int) -> list[bench.Step]:
        return [{"tokens": tokens, "n": 10, "correct": x, "groups": 5, "mixed": x // 2} for x in correct]

    runs = {bench.DYNAMIC: steps(20, 4, 8), bench.ALONE: steps(10, 2, 4, 6, 7, 9)}
    found = bench.compare(runs, 2)
    alone, dynamic, tokens, n_steps, *correct, equal_steps, equal_tokens = found.values()
    assert (alone, dynamic, tokens, n_steps) == pytest.approx((0.3, 0.6, 2, 4))
    assert correct == pytest.approx([0.8, 0.4, 0.7])
    assert (equal_steps, equal_tokens) == pytest.approx((0.8 - 0.4, 0.8 - 0.7))
