"""The rules that compare strings: what they read of a response, which answers are equal, and the rewards of that."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from builders import make_completion, make_config, make_prompt
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from dapo_runner.rewards import scoring
from dapo_runner.rewards.rules import canonical_number, length_penalty, normalise
from dapo_runner.rewards.scoring import Reward, Scorer, load_reward, unmatchable_answers
from dapo_runner.types import Prompt, Verdict


@cache
def rule_of(kind: str) -> Reward:
    return load_reward(make_config(reward={"kind": kind}).reward, kind, "cpu")


def judge(kind: str, text: str, answer: str) -> Verdict:
    ((verdict,),) = rule_of(kind).judge([make_prompt(answer=answer)], [[make_completion(text=text)]])
    return verdict


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a = b = 34", "34"),
        (r"so $\frac{1}{2}$ it is", r"\frac{1}{2}"),
        (r"\overline{AB}", "AB"),
        (r"\mbox{east}", "east"),
        ("336 degrees", "336"),
        ("5 square units", "5"),
        ("an apple", "apple"),
        ("1{,}234", "1234"),
        (r"1,\!234", "1234"),
        (r"\frac ab", r"\frac{a}{b}"),
        (r"\sqrt2", r"\sqrt{2}"),
        ('"34"', "34"),
        ("-1,234", "-1,234"),  # the recipe takes commas out of bare digits only
        ("$34.$", "34"),
        (r"3,\text{and}4", "34"),
    ],
)
def test_normalisation(raw: str, expected: str) -> None:
    assert normalise(raw) == expected


READ = [  # rule, response, what it extracts, where
    ("dapo", "Answer: 11\nno wait\nANSWER :  12\n", "12", "answer-line"),
    ("dapo", "Answer: 12.", "12.", "answer-line"),
    ("dapo", "The result is 12", None, "none"),
    ("dapo", "Answer: $5 = x$ feet", "x", "answer-line"),
    ("dapo", "<think>Answer: 12</think>", "12</think>", "answer-line"),  # as its script
    ("dapo", "Answer: $ feet", None, "answer-line"),  # nothing but what is removed
    ("gsm8k", "Answer: 3\n#### 18", "18", "hash-line"),
    ("gsm8k", "#### 1 / 2", "1/2", "hash-line"),
    ("gsm8k", "Answer: –.5", "-0.5", "answer-line"),
    ("gsm8k", "#### 5 + 5 = 10", "10", "hash-line"),
    ("gsm8k", "#### 20 - 2 = 18", "18", "hash-line"),
    ("gsm8k", "Answer: $10 - $4-1 = $5 each", "5", "answer-line"),
    ("gsm8k", "Answer: 5 - 3", "5", "answer-line"),
    ("gsm8k", r"Answer: 1{,}234\,567 in all", "1234567", "answer-line"),
    ("gsm8k", "**Answer**: 5", "5", "answer-line"),
    ("gsm8k", "#### 60% = 0.6", "60", "hash-line"),
    ("gsm8k", "Answer: 18 (18/2 = 9)", "18", "answer-line"),
    ("gsm8k", "Answer: 3 x $4 = $12.50 each.", "12.5", "answer-line"),
    ("gsm8k", r"Answer: $2 \times 3 = 6$", "6", "answer-line"),
    ("gsm8k", r"Answer: 2 \cdot 3 = 6", "6", "answer-line"),
    ("gsm8k", r"#### $12 \div 4 = 3$", "3", "hash-line"),
    ("gsm8k", "#### (2+3)*2 = 10", "10", "hash-line"),
    ("gsm8k", "**Answer:**\n\n18 apples", "18", "answer-line"),
    ("gsm8k", "Answer:\n$18$", "18", "answer-line"),
    ("gsm8k", "#### **18**", "18", "hash-line"),
    ("gsm8k", "<think>#### 17</think>\nAnswer: 18", "18", "answer-line"),
    ("gsm8k", "<think>#### 17", "17", "hash-line"),  # cut off in its thoughts
    ("gsm8k", "18", None, "none"),
    ("integer", "it is 10-3", "3", "last-integer"),
    ("integer", "it is $10 − $3", "3", "last-integer"),
    ("integer", "pages 3–5", "5", "last-integer"),
    ("integer", "10 -3", "-3", "last-integer"),
    ("integer", "7 or 1/2", "7", "last-integer"),
    ("integer", r"\boxed{1,\!234}", "1234", "last-integer"),
    ("integer", r"a_1\;100", "100", "last-integer"),
    ("integer", "1234,567", None, "none"),
    ("integer", "結果は１８です", "18", "last-integer"),
    ("integer", "共有5１", "51", "last-integer"),
    ("integer", "１，２３４円", "1234", "last-integer"),
    ("integer", "先有18，200个以后", "200", "last-integer"),
    ("integer", "environ 1\u202f234\xa0567 €", "1234567", "last-integer"),
    ("integer", "1’234 Franken", "1234", "last-integer"),
    ("gsm8k", "Answer：－１２．５ 个，共 3 组", "-12.5", "answer-line"),
    ("gsm8k", "＃＃＃＃ １２", "12", "hash-line"),
    ("gsm8k", "#### 1\u2009234,50", "1234,50", "hash-line"),
    ("integer", "3.5", None, "none"),
    ("choice", "Answer: A\nNo.\nAnswer: (B)", "B", "answer-line"),
    ("choice", "Answer: **B**", "B", "answer-line"),
    ("choice", r"so it is \boxed{B. Paris}", "B", "boxed"),
    ("choice", " (B) since …", "B", "letter"),
    ("choice", "**Answer**: B", "B", "answer-line"),
    ("choice", 'The answer is "B".', "B", "answer-line"),
    ("choice", r"The answer is $\boxed{\text{B}}$", "B", "answer-line"),
    ("choice", r"Final answer: $\textbf{(C)}$", "C", "answer-line"),
    ("choice", r"Hence \( B \), so \boxed{\text{B}}", "B", "boxed"),
    ("choice", "The answer is Berlin", None, "none"),
    ("choice", "Answer: Córdoba", None, "none"),
    ("choice", "Answer: Co\u0301rdoba", None, "none"),
    ("choice", "Answer: E\u0301vora", None, "none"),
    ("choice", "Answer: Bắc", None, "none"),
    ("choice", "Answer: C因为", "C", "answer-line"),
    ("choice", "Answer：Ｂ", "B", "answer-line"),
    ("choice", "Answer: （B）", "B", "answer-line"),
    ("choice", r"所以 \boxed{（B）}", "B", "boxed"),
    ("choice", "（B）因为", "B", "letter"),
    ("choice", "B、因为", "B", "letter"),
    ("choice", "B。", "B", "letter"),
    ("choice", "B：因为", "B", "letter"),
    ("choice", "Answer: B\nThis is the only answer I can justify.", "B", "answer-line"),
    ("choice", "Answer: B\nI ruled out answer A.", "B", "answer-line"),
    ("choice", r"The answer A is wrong. \boxed{B}", "B", "boxed"),
    ("choice", "The answer is: B", "B", "answer-line"),
    ("choice", "Answer:\nB", "B", "answer-line"),
    ("choice", "**Answer:**\r\n\r\n(B) Paris", "B", "answer-line"),
    ("choice", "The answer:\n\n  A train is faster. \\boxed{B}", "B", "boxed"),
    ("choice", "The answer is option B.", "B", "answer-line"),
    ("choice", "Answer: **Option (B)**", "B", "answer-line"),
    ("choice", "The answer is optional", None, "none"),
    ("choice", "<think>The answer is A</think> B", "B", "letter"),
    ("exact", "<think>Rome?</think> no, <think>or</think>\n\nParis", "paris", "whole"),
    ("exact", ' "Paris." ', "paris", "whole"),
    ("exact", "It is.\nAnswer:  NEW  York", "new york", "answer-line"),
    ("exact", "**Answer**: Paris", "paris", "answer-line"),
    ("exact", "...", None, "whole"),
    ("exact", "Answer：北京", "北京", "answer-line"),
    *(
        ("exact", text, text.strip("。「」《》«»„“،؟।¿?\u200f"), "whole")
        for text in (
            "北京。",
            "「東京」",
            "《红楼梦》",
            "«москва»",
            "„berlin“",
            "القاهرة،",
            "دمشق؟",
            "दिल्ली।",
            "¿madrid?",
        )
    ),
    ("exact", "\u200fחיפה\u200f", "חיפה", "whole"),
]


@pytest.mark.parametrize(("kind", "text", "extracted", "rule"), READ)
def test_a_rule_reads_an_answer_and_compares_it(kind: str, text: str, extracted: str | None, rule: str) -> None:
    assert judge(kind, text, "Z") == Verdict(False, extracted, rule)
    if extracted is not None:
        assert judge(kind, text, extracted) == Verdict(True, extracted, rule)


@pytest.mark.parametrize(
    ("kind", "head", "width"),
    [
        ("dapo", "Answer: 7", 300),
        ("gsm8k", "#### 7", 300),
        ("choice", "answer is B", 2000),
        ("choice", r"\boxed{B}", 100),
    ],
)
def test_only_the_end_of_a_response_is_read(kind: str, head: str, width: int) -> None:
    text = f"no{head}{' ' * (width - len(head))}"
    answer = head.strip("}")[-1]
    assert judge(kind, text, answer).correct
    assert judge(kind, f"{text} ", answer) == Verdict(False, None, "none")


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("dapo", "Answer: 336", r"336^\circ"),
        ("gsm8k", "#### 1,234", r"1\ 234"),
        ("choice", "Answer: B", "B. Paris"),
        ("choice", "Answer: B", "（Ｂ）巴黎"),
        ("gsm8k", "#### 1234", "１，２３４"),
        ("exact", "Ｇrüße", "grüSSe"),
    ],
)
def test_a_ground_truth_may_be_written_otherwise(kind: str, text: str, answer: str) -> None:
    assert judge(kind, text, answer).correct


@given(st.integers(min_value=-(10**12), max_value=10**12))
def test_an_integer_is_correct_however_it_is_written(n: int) -> None:
    thousands = f"{n:,}" if n >= 0 else str(n)
    for written in (f"{n}", thousands, f"${n}$", rf"$\boxed{{{n}}}$", f"x = {n}"):
        assert judge("dapo", f"so it is.\nAnswer: {written}", str(n)).correct, written
    assert not judge("dapo", f"Answer: {n + 1}", str(n)).correct
    assert judge("gsm8k", f"thus\n#### {n:,}", str(n)).correct
    assert judge("integer", f"it is {n:,}.", str(n)).correct


SIGNED = ("-5", "- 5", "−5", "− 5", "–5", "－5", "$-5$", "-$5", "−\\$5", "- $5$", r"\boxed{−5}")


@pytest.mark.parametrize("written", SIGNED)
def test_no_sign_is_lost(written: str) -> None:
    for opening in ("", "it is ", "x=", "10\n"):
        assert judge("integer", opening + written, "-5") == Verdict(True, "-5", "last-integer"), opening
    for text in (f"Answer: {written}", f"Answer: it is {written} dollars", f"#### {written}"):
        assert not judge("gsm8k", text, "5").correct, text
        assert judge("gsm8k", text, "-5").correct or "#### \\boxed" in text, text


@pytest.mark.parametrize(
    ("written", "beginning"), [("1 1/2", "1"), ("1,2,3,4", "1234"), ("1234,567", "1234567"), ("1e3", "1")]
)
def test_the_beginning_of_a_number_is_not_the_number(written: str, beginning: str) -> None:
    for text in (f"#### {written}", f"Answer: {written}", f"Answer: {beginning}\n#### {written}"):
        assert not judge("gsm8k", text, beginning).correct, text
        assert judge("gsm8k", text, written).correct, text


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=0, max_value=10**9), st.booleans())
def test_numbers_are_compared_by_value(number: object, is_negative: bool) -> None:
    plain = canonical_number(f"{number}")
    assert float(plain) == float(str(number))
    for written in (f"00{number}", f"{number}0", f"${number:,}", f" {number} "):
        assert canonical_number(f"{'−' * is_negative}{written}") == canonical_number(f"{'-' * is_negative}{plain}")


def test_what_is_no_number_is_compared_as_written() -> None:
    for text in ("x", "", "1,2", "1,234,5", "- x", "1 234"):
        assert canonical_number(f" {text} ") == text.replace("- ", "-")
    assert [canonical_number(text) for text in ("-0", "-0.0", ".5")] == ["0", "0", "0.5"]


@pytest.mark.parametrize(("kind", "package"), [("json", "jsonschema"), ("math", "math_verify")])
def test_a_missing_package_is_refused(kind: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with refused("reward.kind") as caught:
        load_reward(make_config(reward={"kind": kind, "workers": 7}).reward, kind, "cpu")
    assert package in str(caught.value)


def test_ground_truths_that_a_rule_cannot_match_are_counted() -> None:
    answers = ["5", r"\frac{1}{2}", "1,234", "-3", "x + 1", "3.5", "line\nbreak"]
    prompts = [make_prompt(str(i), answer=answer) for i, answer in enumerate(answers)]

    def warn(kind: str, chosen: list[Prompt] = prompts) -> str:
        return unmatchable_answers(make_config(reward={"kind": kind}), chosen) or ""

    assert "4 of 7" in warn("integer")
    assert repr(answers[1]) in warn("integer")
    assert "3 of 7" in warn("gsm8k")
    assert "1 of 7" in warn("dapo")
    assert "1 of 2" in warn("dapo", [prompts[0], make_prompt(answer="inches")])
    assert "6 of 7" in warn("choice", [*prompts[1:], make_prompt(answer="(C)")])
    for kind in ("math", "json:loads"):  # not asked: a worker's time; the user's code
        assert warn(kind) == ""
    assert warn("integer", [prompts[0], prompts[2]]) == ""
    assert "incorrect" in warn("dapo")
    with refused("reward.parts.0.use"):
        unmatchable_answers(make_config(reward={"parts": [{"use": "choice"}]}), prompts)
    with refused("reward.kind"):
        warn("choice")
    with refused("reward code"):
        warn("code", [make_prompt(answer="assert f(1) == 2"), make_prompt(answer="[]")])
    with refused("reward code"):  # of a held-out problem
        unmatchable_answers(make_config(reward={"kind": "code"}), [], [make_prompt(answer="[]")])
    for parts in ({"kind": "json"}, {"parts": [{"use": "dapo"}, {"use": "json"}]}):
        with refused("reward json"):
            unmatchable_answers(make_config(reward=parts), [make_prompt(answer="{}"), make_prompt(answer="[1]")])
    game = make_config(reward={"kind": "code"}, env={"kind": "talkers:Talker"})  # gives the reward itself
    assert unmatchable_answers(game, [make_prompt(answer="")], [make_prompt(answer="")]) is None


@pytest.mark.parametrize(
    ("kind", "truth", "response"),
    [
        ("dapo", '["2"]', "Answer: 2"),
        ("gsm8k", '["-1"]', "#### -1"),
        ("integer", '["2"]', "2"),
        ("choice", '["B"]', "Answer: B"),
        ("math", r'["50\\%"]', r"\boxed{50\%}"),
        ("math", '["-2, 1"]', r"\boxed{-2,1}"),
        ("math", '["1,000", "2"]', r"\boxed{2,1000}"),
        ("math", r'["\frac{1}{2}"]', r"\boxed{\frac{1}{2}}"),
        ("exact", '["Bob\u00a0M", "Robert"]', "Answer: robert."),
        ("exact", '["Bob", "Robert"]', 'Answer: ["Bob", "Robert"]'),
        ("exact", '{"target": "Bob"}', 'Answer: {"target": "Bob"}'),
        ("exact", '["Bob", ["Rob"]]', 'Answer: ["Bob", ["Rob"]]'),
        ("exact", '["Bob" or "Rob"]', 'Answer: ["Bob" or "Rob"]'),
        ("dapo", "[5]", "Answer: [5]"),
    ],
)
def test_texts_of_a_json_list_are_answers(kind: str, truth: str, response: str) -> None:
    assert judge(kind, response, truth).correct
    assert not judge(kind, r"Answer: $\boxed{7}$", truth).correct
    assert unmatchable_answers(make_config(reward={"kind": kind}), [make_prompt(answer=truth)]) is None


@pytest.mark.parametrize(
    ("kind", "truth"), [("dapo", '["1", "-1"]'), ("dapo", '{"target": "Bob"}'), ("math", '{"ground_truth": "6"}')]
)
def test_a_ground_truth_in_json_is_no_answer(kind: str, truth: str) -> None:
    config = make_config(reward={"kind": kind})
    with refused("reward.kind"):
        unmatchable_answers(config, [make_prompt(answer=truth)])
    assert truth in (unmatchable_answers(config, [make_prompt(answer="6"), make_prompt(answer=truth)]) or "")


def test_evaluation_sets_are_checked_like_the_training_set() -> None:
    config = make_config(
        reward={"kind": "dapo"},
        data={"format": "auto", "path": "a.jsonl", "eval": {name: {"path": "b.jsonl"} for name in "gh"}},
    )
    train, fits, differs = [make_prompt(answer="5")], make_prompt(answer="5"), make_prompt(answer="inches")
    assert unmatchable_answers(config, train, [replace(fits, eval_set="g")]) is None
    warning = unmatchable_answers(config, [*train, differs], [replace(one, eval_set="h") for one in (fits, differs)])
    assert len((warning or "").splitlines()) == 2
    assert "1 of 2 problems of data.eval.h" in (warning or "")
    warning = unmatchable_answers(config, train, [replace(fits, eval_set="g"), replace(differs, eval_set="h")])
    assert "1 of 1 problems of data.eval.h" in (warning or "")  # a run that has begun could not change it
    assert unmatchable_answers(config, train, [differs]) is None  # cut from the training file, which fits


def test_every_part_whose_verdicts_count_is_checked() -> None:
    config = {"parts": [{"use": "json:loads"}, {"use": "integer", "weight": 0.5}, {"use": "choice", "weight": 0}]}
    one, other = make_prompt("0", answer="5"), make_prompt("1", answer="B")
    warning = unmatchable_answers(make_config(reward=config), [one, other]) or ""
    assert "reward.parts.1.use" in warning
    assert "1 of 2" in warning
    assert "choice" not in warning
    with refused("reward.parts.1.use"):
        unmatchable_answers(make_config(reward=config), [other])
    first = {"parts": [{"use": "choice", "weight": 0}, {"use": "dapo"}, {"use": "dapo", "name": "again"}]}
    with refused("reward.parts.0.use"):  # decides correctness
        unmatchable_answers(make_config(reward=first), [one])
    twice, inches = make_config(reward={"parts": first["parts"][1:]}), make_prompt(answer="inches")
    lines = (unmatchable_answers(twice, [one, inches]) or "").splitlines()
    assert [line[:18] for line in lines] == ["reward.parts.0.use", "reward.parts.1.use"]


def test_each_distinct_ground_truth_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Counter[str]()

    def rule(response: str, answer: str) -> Verdict:
        judged[answer] += 1
        return Verdict(answer == "5")

    monkeypatch.setitem(scoring._RULES, "integer", (rule, "{}"))
    prompts = [make_prompt(str(i), answer=answer) for i, answer in enumerate("x5y5x")]
    warning = unmatchable_answers(make_config(reward={"kind": "integer"}), prompts) or ""
    assert "3 of 5 training problems, e.g. 'x', 'y', 'x'" in warning
    assert judged == {"x": 1, "5": 1, "y": 1}


def test_the_length_penalty_is_equation_13() -> None:
    """The paper's own figures: 16384 expected tokens and 4096 of buffer."""
    expected = {1: 0.0, 16384: 0.0, 16385: -1 / 4096, 18432: -0.5, 20480: -1.0, 20481: -1.0, 10**6: -1.0}
    for limit, fifth in ((40, 8), (9, 1)):  # by default a fifth, as there
        config = make_config(rollout={"max_response_tokens": limit}, reward={"overlong": {"cache_length": None}})
        assert config.cache_length == fifth
    assert {length: length_penalty(length, 20480, 4096) for length in expected} == expected


@pytest.mark.parametrize("punish", [False, True])
@pytest.mark.parametrize("drop", [False, True])
def test_a_reward_is_the_answers_and_the_penalty(punish: bool, drop: bool) -> None:
    overlong = {"cache_length": 16, "soft_punishment": punish, "filter": drop}
    config = make_config(reward={"correct": 2.0, "incorrect": -0.5, "overlong": overlong})
    completions = [
        make_completion(10, "Answer: 7"),
        make_completion(56, "Answer: 7"),
        make_completion(64, "Answer: 8", truncated=True),
    ]
    scorer = Scorer(config)
    (group,), (plain,) = (each([make_prompt(answer="7")], [completions]) for each in (scorer, scorer.unshaped()))
    assert [sample.reward for sample in group.samples] == ([2.0, 1.5, -1.5] if punish else [2.0, 2.0, -0.5])
    assert [sample.trains for sample in group.samples] == [True, True, not drop]
    assert [sample.correct for sample in group.samples] == [True, True, False]
    assert [sample.reward for sample in plain.samples] == [2.0, 2.0, -0.5]
    assert all(sample.trains for sample in plain.samples)
