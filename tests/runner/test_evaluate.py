"""Evaluation figures worked by hand, pass@k against enumeration, and the call that makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from builders import make_completion, make_config, make_group, make_prompt, make_sample
from hypothesis import given
from hypothesis import strategies as st
from small import small_recipe

from dapo_runner.cli import main
from dapo_runner.commands.evaluate import _print_response
from dapo_runner.config import parse_config
from dapo_runner.evaluate import (
    MAX_COMPARISONS,
    Evaluation,
    evaluate,
    majority,
    mean_correct,
    pass_at,
    pass_estimate,
)
from dapo_runner.logging.run_log import CHECKPOINTS
from dapo_runner.rewards.scoring import Scorer, reads_answers
from dapo_runner.rewards.workers import Worker, open_rule
from dapo_runner.run.folder import write_config
from dapo_runner.types import Group, RolloutRequest, SamplingParams


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
    assert majority([group_of(answers)]).correct == pytest.approx(expected)


def evaluate_answers(answers: Sequence[str], truth: str, kind: str) -> Evaluation:
    """The samples of one problem, scored by one of the rules."""
    config = make_config(evaluation={"k": len(answers)}, reward={"kind": kind, "deadline": 60.0})
    completions = [make_completion(text=f"It is so.\nAnswer: {answer}") for answer in answers]
    score, prompts = Scorer(config, shaped=False), [make_prompt(answer=truth)]
    return evaluate(lambda requests: score(prompts, [completions]), prompts, config)


@pytest.mark.parametrize(
    ("kind", "answers", "truth", "expected"),
    [
        ("math", ["1/2", "3", "50*(1/100)", "3", "1/2"], "0.5", 1.0),
        ("math", ["1/2", "3", "50*(1/100)", "4", "4", "3"], "0.5", 1 / 3),
        ("math", ["1/2", "1/3", "50*(1/150)", "0.5", r"$\frac{2}{6}$"], "0.5", 0.0),
        ("math", ["1/2", "1/3", "50*(1/150)", "0.5"], "0.5", 0.5),
        ("math", ["$x^2+2x+1$", "$(x+1)^2$", "$y$", "$x+1$"], "y", 0.0),
        ("math", ["1/3", "2/6"], "0.5", 0.0),
        ("dapo", ["1,200", "$1200$", "7", "7", "x = 1200"], "1200", 1.0),
        ("gsm8k", ["1,200", "$1200", "7", "7", "1200.0"], "1200", 1.0),
        ("integer", ["7", "−3", "- 3", "7", "-3"], "7", 0.0),
    ],
)
def test_one_answer_written_differently_is_one_vote(kind: str, answers: list[str], truth: str, expected: float) -> None:
    assert evaluate_answers(answers, truth, kind).metrics[f"cons@{len(answers)}"] == pytest.approx(expected)


class Comparisons:
    """Answers are the same when they begin with the same letter; ``!`` is an answer that cannot be compared."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str]] = []

    def __call__(self, first: str, others: Sequence[str]) -> list[bool | None]:
        self.made += [(first, other) for other in others]
        return [None if "!" in first + other else first[0] == other[0] for other in others]


def spelled(answers: str, truth: str = "a") -> Group:
    """Answers of several letters, the first of which decides; what a sample wrote is its text."""
    samples = []
    for word in answers.split():
        sample = make_sample(word[0] == truth, extracted=word)
        samples.append(replace(sample, completion=make_completion(text=word)))
    return Group(make_prompt(answer=truth), tuple(samples))


@pytest.mark.parametrize(
    ("answers", "expected", "made"),
    [
        ("a1 a2 a3 b1 b2", 1.0, 0),  # no vote of the others can change it
        ("b1 b2 c1 c2", 0.0, 0),  # nothing right
        ("a1 a2 b1 b1 b1 c1", 0.0, 0),  # outvoted by one writing
        ("a1 a2 b1 c1 b2 b3", 0.0, 3),
        ("a1 a2 b1 c1 b2", 0.5, 2),
        ("a1 a2 b1 c1 c2 b2 d1", 1 / 3, 4 + 2),
        ("a1 b1 c1 d1", 1 / 4, 2 + 1),
    ],
)
def test_answers_are_compared_only_where_it_matters(answers: str, expected: float, made: int) -> None:
    same = Comparisons()
    assert majority([spelled(answers)], same) == (pytest.approx(expected), 0)
    assert len(same.made) == made


def test_comparisons_are_bounded_and_what_did_not_settle_is_counted() -> None:
    same = Comparisons()
    words = [f"{chr(0x4E00 + i)}" for i in range(100)]
    assert majority([spelled(" ".join(["a1", *words]))], same) == (pytest.approx(1 / 101), 0)
    assert len(same.made) <= MAX_COMPARISONS
    # The first comparison that does not settle is the problem's last round; the answers stay apart.
    same = Comparisons()
    groups = [spelled("a1 a2 b! b1 c1 c2"), spelled("a1 a2 b1 b2")]
    assert majority(groups, same) == ((1.0 + 0.5) / 2, 3)
    assert same.made == [("b!", "b1"), ("b!", "c1"), ("b!", "c2"), ("b1", "b2")]


def test_a_comparison_past_its_deadline_is_in_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "unsettled_votes" not in evaluate_answers(["1", "2", "2"], "1", "dapo").metrics
    assert evaluate_answers(["1/2", "1/3", "2/6"], "0.5", "math").metrics["unsettled_votes"] == 0
    send = Worker.send

    def hang(worker: Worker, request: dict[str, object]) -> None:
        if "other" not in request:
            send(worker, request)

    monkeypatch.setattr(Worker, "send", hang)
    monkeypatch.setattr(open_rule("math", 2, 60.0), "deadline", 3.0)
    metrics = evaluate_answers(["1/2", "1/3", "50*(1/150)"], "0.5", "math").metrics
    assert metrics["unsettled_votes"] == 1
    assert metrics["cons@3"] == pytest.approx(1 / 3)


def test_majority_when_nothing_is_extracted() -> None:
    samples = (make_sample(True), make_sample(True), make_sample(False, extracted="b"))
    assert majority([Group(make_prompt(), samples)]).correct == 1.0


@given(n=st.integers(1, 9), data=st.data())
def test_pass_estimate_is_the_mean_over_all_subsets(n: int, data: st.DataObject) -> None:
    correct, j = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations([True] * correct + [False] * (n - correct), j))
    assert pass_estimate(n, correct, j) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_needs_enough_samples() -> None:
    with pytest.raises(ValueError, match=r"pass@3: .*2"):
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

    def generate(requests: Sequence[RolloutRequest]) -> list[Group]:
        calls.extend({request.sampling for request in requests})
        prompts = [request.prompt for request in requests]
        right, cut = make_completion(64, "Answer: 7"), make_completion(64, "Answer: 8", truncated=True)
        answers = [[right, cut] if prompt.id == "x" else [cut, make_completion(1, "what?")] for prompt in prompts]
        return Scorer(config, shaped=False)(prompts, answers)

    config = make_config(evaluation={"k": 2, "top_p": 0.5, "temperature": 0.0})
    prompts = [make_prompt("x"), make_prompt("y")]
    result = evaluate(generate, prompts, config)
    assert calls == [SamplingParams(n=2, temperature=0.0, top_p=0.5, max_tokens=64, seed=1234)]
    assert result.average == 0.25
    assert result.metrics["truncated"] == 0.5
    assert result.metrics["no_answer"] == 0.25
    assert result.metrics["length"] == pytest.approx((64 * 3 + 1) / 4)
    with pytest.raises(ValueError, match="at least one held-out problem"):
        evaluate(generate, [], config)


def test_a_reward_that_names_no_answer_has_no_consensus() -> None:
    """Right or wrong alone: wrong samples cannot vote, and one right of many would be called a majority."""
    groups = [Group(make_prompt(), tuple(make_sample(right) for right in (True, False, False, False)))]
    figures = Evaluation(groups, 4, None).metrics
    assert figures["avg@4"] == 0.25
    assert not {"cons@4", "no_answer"} & set(figures)
    assert "cons@4" in Evaluation([group_of("a---")], 4, None).metrics


def test_a_function_has_a_consensus_only_where_every_sample_has_an_answer() -> None:
    for answers, there in (("ab", True), ("a-", False), ("--", False)):
        assert ("cons@2" in Evaluation([group_of(answers)], 2, reads_answers=False).metrics) == there
        assert "cons@2" in Evaluation([group_of(answers)], 2).metrics
    assert [reads_answers(make_config(reward={"kind": kind}).reward) for kind in ("dapo", "code", "a:f")] == [
        True, False, False
    ]  # fmt: skip


def test_figures_of_each_set_and_source() -> None:
    def group(pattern: str, eval_set: str, source: str) -> Group:
        return replace(make_group(pattern), prompt=replace(make_prompt(), eval_set=eval_set, source=source))

    groups = [group("RR", "one", "s"), group("RW", "one", "t"), group("WW", "two", "t"), group("RR", "two", "t")]
    figures = Evaluation(groups, 2).metrics
    assert {key: value for key, value in figures.items() if key.endswith(("avg@2", "reward", "problems"))} == {
        "avg@2": 5 / 8, "reward": 0.25, "problems": 4,
        "one/avg@2": 3 / 4, "one/reward": 0.5, "one/problems": 2,
        "one/s/avg@2": 1, "one/s/reward": 1, "one/s/problems": 1,
        "one/t/avg@2": 1 / 2, "one/t/reward": 0, "one/t/problems": 1,
        "two/avg@2": 1 / 2, "two/reward": 0, "two/problems": 2,
    }  # fmt: skip
    assert {"one/pass@2", "one/length", "pass@1"} <= figures.keys()
    unnamed = Evaluation([group("RW", "", "s"), group("WW", "", "t")], 2).metrics
    assert (unnamed["s/avg@2"], unnamed["t/avg@2"]) == (0.5, 0.0)
    assert not any("/" in key for key in Evaluation([group("RW", "", "s")], 2).metrics)


def test_what_a_model_wrote_controls_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    group = make_group("R")
    sample = replace(group.samples[0], completion=make_completion(text="\x1b[2J gone"))
    _print_response(replace(group, samples=(sample,)))
    assert "\x1b" not in (out := capsys.readouterr().out)
    assert "gone" in out


def test_a_damaged_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(parse_config(small_recipe()), tmp_path)
    (tmp_path / CHECKPOINTS / "step_000003").mkdir(parents=True)
    assert main(["eval", str(tmp_path)]) == 2
    assert "step_000003" in capsys.readouterr().err
