"""Evaluation figures worked by hand, pass@k against enumeration, and the call that makes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from builders import make_completion, make_config, make_prompt, make_sample
from hypothesis import given
from hypothesis import strategies as st

from dapo_runner.evaluate import Evaluation, evaluate, majority_correct, mean_correct, pass_at, pass_estimate
from dapo_runner.rewards.scoring import make_scorer
from dapo_runner.types import Completion, Group, Prompt, SamplingParams


def group_of(answers: str, truth: str = "a") -> Group:
    """One sample per letter, which is its answer; `-` gave none."""
    samples = [make_sample(letter == truth, extracted=None if letter == "-" else letter) for letter in answers]
    return Group(make_prompt(answer=truth), tuple(samples))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ("aab", 1.0),
        ("abb", 0.0),
        ("ab", 0.5),
        ("abc", 1 / 3),
        ("aabbc", 0.5),
        ("a---", 1.0),
        ("----", 0.0),
        ("bbcc", 0.0),
        ("a", 1.0),
    ],
)
def test_majority(answers: str, expected: float) -> None:
    assert majority_correct([group_of(answers)]) == pytest.approx(expected)


def test_majority_when_nothing_is_extracted() -> None:
    samples = (make_sample(True), make_sample(True), make_sample(False, extracted="b"))
    assert majority_correct([Group(make_prompt(), samples)]) == 1.0


@given(n=st.integers(1, 9), data=st.data())
def test_pass_estimate_is_the_mean_over_all_subsets(n: int, data: st.DataObject) -> None:
    correct, j = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations([True] * correct + [False] * (n - correct), j))
    assert pass_estimate(n, correct, j) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_needs_enough_samples() -> None:
    with pytest.raises(ValueError, match="pass@3: expected between 1 and the 2"):
        pass_at([group_of("ab")], 3)


def test_means_weigh_problems_equally() -> None:
    groups = [group_of("aaab"), group_of("bbbb"), group_of("aabb")]
    assert mean_correct(groups) == pytest.approx((0.75 + 0 + 0.5) / 3)
    assert pass_at(groups, 1) == pytest.approx(mean_correct(groups))
    assert pass_at(groups, 4) == pytest.approx(2 / 3)
    metrics = Evaluation(groups, k=4).metrics
    assert [key for key in metrics if "@" in key] == ["avg@4", "cons@4", "pass@1", "pass@2", "pass@4"]
    assert metrics["problems"] == 3


def test_odd_k_reports_its_own_pass() -> None:
    assert [key for key in Evaluation([group_of("aaabb")], k=5).metrics if key.startswith("pass")] == [
        "pass@1",
        "pass@2",
        "pass@4",
        "pass@5",
    ]


def test_evaluate_samples_with_its_own_settings_and_scores_unshaped() -> None:
    calls: list[SamplingParams] = []

    def generate(prompts: Sequence[Prompt], sampling: SamplingParams) -> list[list[Completion]]:
        calls.append(sampling)
        right, cut = make_completion(64, "Answer: 7"), make_completion(64, "Answer: 8", truncated=True)
        return [[right, cut] if prompt.id == "x" else [cut, make_completion(1, "what?")] for prompt in prompts]

    config = make_config(evaluation={"k": 2, "top_p": 0.5, "temperature": 0.0, "seed": 9})
    prompts = [make_prompt("x"), make_prompt("y")]
    result = evaluate(generate, prompts, make_scorer(config, shaped=False), config)
    assert calls == [SamplingParams(n=2, temperature=0.0, top_p=0.5, max_tokens=64, seed=9)]
    assert result.average == 0.25
    assert result.metrics["truncated"] == 0.5
    assert result.metrics["no_answer"] == 0.25
    assert result.metrics["length"] == pytest.approx((64 * 3 + 1) / 4)
    with pytest.raises(ValueError, match="at least one held-out problem"):
        evaluate(generate, [], make_scorer(config), config)
