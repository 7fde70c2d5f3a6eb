"""Evaluation figures worked by hand, pass@k against enumeration, and the call that makes them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from builders import make_completion, make_config, make_group, make_prompt, make_sample
from hypothesis import given
from hypothesis import strategies as st

from dapo_runner.commands.evaluate import by_problem
from dapo_runner.commands.output import print_evaluations, print_rows
from dapo_runner.evaluate import MOST_SOURCES, EvaluationError, evaluate, evaluation_metrics, pass_estimate
from dapo_runner.logging.progress import RunConsole, make_progress
from dapo_runner.rewards.scoring import Scorer, reads_answers
from dapo_runner.types import Group, RolloutRequest, SamplingParams, Verdict


def group_of(answers: str, truth: str = "a") -> Group:
    """One sample per word, which is its answer; `-` gave none. Words with the first letter of the truth are correct."""
    samples = []
    for word in answers.split() if " " in answers else answers:
        sample = make_sample(word[0] == truth, extracted=None if word == "-" else word)
        samples.append(replace(sample, completion=make_completion(text=word)))
    return Group(make_prompt(answer=truth), tuple(samples))


@given(st.lists(st.sampled_from(["a1", "a2", "b1", "b2", "c1", "c2", "d1", "-"]), min_size=1, max_size=9))
def test_the_majority_decides_and_ties_count_in_part(words: list[str]) -> None:
    n_correct = sum(word[0] == "a" for word in words)
    others = Counter(word for word in words if word[0] not in "a-")
    is_best = n_correct > 0 and n_correct >= max(others.values(), default=0)
    n_best = 1 + list(others.values()).count(n_correct)
    metrics = evaluation_metrics([group_of(" ".join(words) + " ")], 1)
    assert metrics["cons@1"] == (1 / n_best if is_best else 0.0)


def evaluate_answers(answers: Sequence[str], truth: str, kind: str) -> dict[str, float]:
    """The samples of one problem, scored by one of the rules."""
    config = make_config(evaluation={"k": len(answers)}, reward={"kind": kind, "timeout": 60.0})
    completions = [make_completion(text=f"It is so.\nAnswer: {answer}") for answer in answers]
    score, prompts = Scorer(config, shaped=False), [make_prompt(answer=truth)]
    return evaluate(lambda requests: score(prompts, [completions]), prompts, config)[1]


@pytest.mark.parametrize(
    ("kind", "answers", "truth", "expected"),
    [
        ("math", ["1/2", "3", "50*(1/100)", "4", "4", "3"], "0.5", 1 / 3),
        ("math", ["1/2", "1/3", "50*(1/150)", "0.5", r"$\frac{2}{6}$"], "0.5", 1 / 2),  # 50*(1/150) votes alone
        ("dapo", ["feet", "inches", "1200"], "1200", 1.0),  # no answer once units are removed
        ("dapo", ["1,200", "$1200$", "7", "7", "x = 1200"], "1200", 1.0),
    ],
)
def test_correct_answers_vote_together_and_incorrect_ones_by_text(
    kind: str, answers: list[str], truth: str, expected: float
) -> None:
    metrics = evaluate_answers(answers, truth, kind)
    assert metrics[f"cons@{len(answers)}"] == pytest.approx(expected)


@given(n=st.integers(1, 9), data=st.data())
def test_pass_estimate_is_the_mean_over_all_subsets(n: int, data: st.DataObject) -> None:
    correct, j = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations([True] * correct + [False] * (n - correct), j))
    assert pass_estimate(n, correct, j) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_evaluate_samples_with_its_own_settings_and_scores_unshaped() -> None:
    calls: list[RolloutRequest] = []

    def generate(requests: Sequence[RolloutRequest]) -> list[Group]:
        """Of the last two problems one and two episodes have failed."""
        calls.extend(requests)
        right, cut = make_completion(64, "Answer: 7"), make_completion(64, "Answer: 8", truncated=True)
        answers = [[right, cut], [cut, make_completion(1, "what?")], [right], []]
        return Scorer(config, shaped=False)([request.prompt for request in requests], answers)

    config = make_config(evaluation={"k": 2, "seed": 7, "top_p": 0.5, "temperature": 0.0}, rollout={"stop": ["x"]})
    prompts = [replace(make_prompt(name), source="" if name == "z" else "test") for name in "wxyz"]
    groups, metrics = evaluate(generate, prompts, config)
    sampling = SamplingParams(n=2, temperature=0.0, top_p=0.5, max_tokens=64, seed=7, stop=("x",))
    asked = [(call.index, call.prompt.id, call.sampling) for call in calls]
    assert asked == [(index, name, sampling) for index, name in enumerate("wxyz")]
    expected = {"truncated": 0.4, "no_answer": 0.2, "length": (64 * 4 + 1) / 5, "problems": 3, "avg@2": 0.5}
    expected["pass@2"] = 2 / 3  # of the only episode that is left, pass@1
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)
    results = [("w", 1, 2), ("x", 0, 2), ("y", 1, 1), ("z", 0, 0)]
    assert by_problem(prompts, groups) == [
        {"id": name, "set": "", "correct": correct, "samples": n} | ({} if name == "z" else {"source": "test"})
        for name, correct, n in results
    ]
    with pytest.raises(EvaluationError):
        evaluate(lambda requests: [Group(make_prompt(), ())], [make_prompt()], config)


@pytest.mark.parametrize(
    ("answers", "is_reading", "has_consensus"),
    [
        ("ab", False, True),
        ("a-", False, False),
        ("--", False, False),
        ("ab-", False, True),
        ("ab", True, True),
        ("a-", True, True),
    ],
)
def test_consensus_where_a_reward_reads_no_answer(answers: str, is_reading: bool, has_consensus: bool) -> None:
    """Wrong samples without an answer cannot vote, and one right of many would be called a majority."""
    metrics = evaluation_metrics([group_of(answers)], 2, reads_answers=is_reading)
    assert ("cons@2" in metrics, "no_answer" in metrics) == (has_consensus, has_consensus)
    scored = [replace(one, verdict=Verdict(False, rule="environment")) for one in group_of("--").samples]
    assert not {"cons@2", "no_answer"} & evaluation_metrics([Group(make_prompt(), tuple(scored))], 2).keys()
    kinds = [make_config(reward={"kind": kind}).reward for kind in ("dapo", "code", "a:f")]
    assert [reads_answers(kind) for kind in kinds] == [True, False, False]
    assert [key for key in evaluation_metrics([group_of("aaabb")], 5) if "@" in key] == [
        *("avg@5", "cons@5", "pass@1", "pass@2", "pass@4", "pass@5")
    ]


def test_figures_of_each_set_and_source() -> None:
    def figures_of(*rows: tuple[str, str, str]) -> dict[str, float]:
        prompts = [replace(make_prompt(), eval_set=eval_set, source=source) for _, eval_set, source in rows]
        groups = [replace(make_group(row[0]), prompt=prompt) for row, prompt in zip(rows, prompts, strict=True)]
        return evaluation_metrics(groups, 2)

    figures = figures_of(("RR", "one", "s"), ("RW", "one", "t"), ("WW", "two", "t"), ("RR", "two", "t"))
    averages = {"": 5 / 8, "one/": 3 / 4, "one/s/": 1, "one/t/": 1 / 2, "two/": 1 / 2}
    assert {key: value for key, value in figures.items() if key.endswith("avg@2")} == {
        f"{area}avg@2": value for area, value in averages.items()
    }
    assert (figures["one/t/reward"], figures["two/problems"]) == (0, 2)
    assert {"one/pass@2", "one/length", "pass@1"} <= figures.keys()
    unnamed = figures_of(("RW", "", "s"), ("WW", "", ""))
    assert (unnamed["s/avg@2"], unnamed["no source/avg@2"]) == (0.5, 0.0)
    assert not any("/" in key for key in figures_of(("RW", "", "s")))
    rows = [("RW", "one", str(n)) for n in range(MOST_SOURCES + 1)]
    few, many = figures_of(*rows[1:]), figures_of(*rows)  # as many as problems: their address, or an id
    assert sum(key.startswith("one/") and key.endswith("/avg@2") for key in few) == 1 + MOST_SOURCES
    assert (many.keys() - figures_of(*rows[:1]).keys(), "one/sources" in few) == ({"one/sources"}, False)
    assert many["one/sources"] == MOST_SOURCES + 1


def test_a_part_of_the_reward_is_averaged_over_the_samples_that_have_it() -> None:
    group = make_group("RW")
    parts = ({"a": 1.0, "b": 2.0}, {"a": 0.5})
    samples = [replace(sample, parts=found) for sample, found in zip(group.samples, parts, strict=True)]
    metrics = evaluation_metrics([replace(group, samples=tuple(samples))], 2)
    assert (metrics["reward_a"], metrics["reward_b"]) == (0.75, 2.0)


def test_a_table_has_the_metrics_of_every_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    """Before training, often no response has an answer."""
    print_evaluations("run", {"before": {"eval/avg@4": 0.0}, "after": {"eval/avg@4": 0.5, "eval/cons@4": 0.25}})
    assert re.findall(r"[\w.@]+%?", capsys.readouterr().out.partition("after")[2]) == [
        *("avg@4", "0.0%", "50.0%", "cons@4", "25.0%")
    ]


def test_names_of_the_user_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["[/INST] x", "[a] :smile:"]
    print_evaluations("run", {"[b] before": {f"eval/{name}/avg@4": 0.5 for name in names}})
    print_rows(dict.fromkeys(names, "/data/[v1]/a[/b].jsonl"))
    figures = {"problems": 2.0, "reward": 0.0, **{f"{name}/avg@4": 0.5 for name in names}}
    make_progress("plain", RunConsole()).evaluation(1, figures)
    out = capsys.readouterr().out
    assert [out.count(name) for name in (*names, "/data/[v1]/a[/b].jsonl", "[b] before")] == [3, 3, 2, 1]
