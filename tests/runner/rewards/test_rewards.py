"""Rewards: the recipe's rule on the forms answers really take, hostile output, Eq. 13, plug-ins."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import make_completion, make_config, make_prompt
from hypothesis import given
from hypothesis import strategies as st

from dapo_runner.rewards.rules import (
    answer_rule,
    canonical_number,
    gsm8k_rule,
    integer_rule,
    length_penalty,
    normalise,
)
from dapo_runner.rewards.scoring import Scorer, unmatchable_answers
from dapo_runner.types import Prompt, Verdict


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("34", "34"),
        ("  34  ", "34"),
        ("x = 34", "34"),
        ("a = b = 34", "34"),
        ("$34$", "34"),
        (r"so $\frac{1}{2}$ it is", r"\frac{1}{2}"),
        (r"$\boxed{34}$", "34"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\text{east}", "east"),
        (r"\textbf{34}", "34"),
        (r"\overline{AB}", "AB"),
        (r"\mbox{east}", "east"),
        (r"336^\circ", "336"),
        (r"336^{\circ}", "336"),
        ("336 degrees", "336"),
        ("12 cm", "12"),
        ("5 square units", "5"),
        ("an apple", "apple"),
        ("1,234,567", "1234567"),
        ("1{,}234", "1234"),
        (r"1,\!234", "1234"),
        ("1,2,x", "1,2,x"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac ab", r"\frac{a}{b}"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"\sqrt{2}", r"\sqrt{2}"),
        (r"\$5", "5"),
        ('"34"', "34"),
        ("34.$", "34"),
        ("-1,234", "-1,234"),  # the recipe takes commas out of bare digits only
        ("$34.$", "34"),
        (r"3,\text{and}4", "34"),
        ("-7", "-7"),
        ("", ""),
    ],
)
def test_normalisation(raw: str, expected: str) -> None:
    assert normalise(raw) == expected


@pytest.mark.parametrize(
    ("text", "answer", "correct", "extracted"),
    [
        ("We get 12.\nAnswer: 12", "12", True, "12"),
        ("Answer: 11\nno wait\nANSWER :  12\n", "12", True, "12"),
        ("Answer: 12\nAnswer: 11", "12", False, "11"),
        ("answer:\n12", "12", True, "12"),
        ("Answer: $12$.", "12", True, "12"),
        ("Answer: 12.", "12", False, "12."),
        ("Answer: 1,200", "1200", True, "1200"),
        ("Answer: 336", r"336^\circ", True, "336"),
        (r"Answer: $\boxed{12}$", "12", True, "12"),
        ("The result is 12", "12", False, None),
        ("Answer:", "12", False, None),
        ("", "12", False, None),
        ("Answer: 12 apples", "12", False, "12apples"),
        ("Answer: 12" + " " * 300, "12", False, None),
        ("Answer: 12" + "\n" * 290, "12", True, "12"),
    ],
)
def test_answer_line(text: str, answer: str, correct: bool, extracted: str | None) -> None:
    verdict = answer_rule(text, answer)
    assert (verdict.correct, verdict.extracted) == (correct, extracted)
    assert verdict.rule == ("none" if extracted is None else "answer-line")


HOSTILE = {
    "open braces": "{" * 100_000,
    "nested boxes": r"\boxed{" * 20_000,
    "closed nest": r"\boxed{" * 10_000 + "}" * 10_000,
    "answers": "Answer: " * 15_000,
    "blanks after the colon": "Answer:" + " " * 100_000,
    "blanks before the colon": "Answer" + " " * 100_000 + ":",
    "dollars": "Answer: " + "$" * 100_000,
    "text commands": "Answer: " + r"\text{" * 20_000,
    "commas": "Answer: " + "1," * 50_000,
    "minuses": "Answer: " + "-" * 100_000,
    "hashes": "#" * 100_000,
    "digits": "#### " + "9" * 100_000,
    "minuses and blanks": "Answer: " + "- " * 50_000 + "5",
    "a minus far away": "Answer: -" + " " * 280 + "5",
    "digits and blanks": "Answer: " + "1 " * 50_000,
    "fractions": "Answer: " + "frac" * 25_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_output_takes_no_longer_than_other_output(name: str) -> None:
    """100 kB through every rule. Anything worse than linear takes seconds here, this takes well under a
    millisecond.
    """
    text = HOSTILE[name]
    start = time.process_time()
    for _ in range(20):
        answer_rule(text, "1")
        gsm8k_rule(text, "1")
        integer_rule(text, "1")
    assert time.process_time() - start < 0.5


def test_output_is_never_evaluated(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    bomb = f"__import__('pathlib').Path({str(flag)!r}).touch()"
    for rule in (answer_rule, gsm8k_rule, integer_rule):
        rule(f"Answer: {bomb}\n#### {bomb}", bomb)
    assert not flag.exists()


@given(st.text(max_size=400), st.text(max_size=40))
def test_rules_judge_any_text(text: str, answer: str) -> None:
    for rule in (answer_rule, gsm8k_rule, integer_rule):
        verdict = rule(text, answer)
        assert not (verdict.correct and verdict.extracted is None)


@given(st.integers(min_value=-(10**12), max_value=10**12))
def test_integers_written_in_any_usual_way_are_right(n: int) -> None:
    thousands = f"{n:,}" if n >= 0 else f"{n}"
    for written in (f"{n}", thousands, f"${n}$", rf"$\boxed{{{n}}}$", f"x = {n}"):
        assert answer_rule(f"so it is.\nAnswer: {written}", str(n)).correct, written
    assert not answer_rule(f"Answer: {n + 1}", str(n)).correct
    assert gsm8k_rule(f"thus\n#### {n:,}", str(n)).correct
    assert integer_rule(f"it is {n:,}.", str(n)).correct


@pytest.mark.parametrize(
    ("text", "answer", "rule", "extracted"),
    [
        ("#### 18", "18", "hash-line", "18"),
        ("Answer: 3\n#### 18", "18", "hash-line", "18"),
        ("Answer: $18.00", "18", "answer-line", "18"),
        ("Answer: about 1,800.50 dollars", "1800.5", "answer-line", "1800.5"),
        ("#### -4", "-4", "hash-line", "-4"),
        ("#### − 4", "-4", "hash-line", "-4"),
        ("#### $-4", "-4", "hash-line", "-4"),
        ("#### -$4", "−4", "hash-line", "-4"),
        ("#### 1,234,567.0 apples", "1234567", "hash-line", "1234567"),
        ("#### 5/hour", "5", "hash-line", "5"),
        ("#### 5.", "5", "hash-line", "5"),
        ("#### 1/2", "1/2", "hash-line", "1/2"),
        ("#### 1 / 2", "1/2", "hash-line", "1/2"),
        ("#### Step 1\nAnswer: 18", "18", "answer-line", "18"),
        ("Answer: twenty-five, 25", "25", "answer-line", "25"),
        ("Answer: x = - 5", "-5", "answer-line", "-5"),
    ],
)
def test_gsm8k_rule(text: str, answer: str, rule: str, extracted: str) -> None:
    assert gsm8k_rule(text, answer) == Verdict(True, extracted, rule)


SIGNED = ("-5", "- 5", "−5", "− 5", "–5", "－5", "$-5$", "-$5", "−\\$5", "- $5$", r"\boxed{−5}")


@pytest.mark.parametrize("written", SIGNED)
@pytest.mark.parametrize("opening", ["", "it is ", "x=", "10\n"])
def test_no_sign_is_lost(written: str, opening: str) -> None:
    assert integer_rule(opening + written, "-5") == Verdict(True, "-5", "last-integer")
    assert not integer_rule(opening + written, "5").correct


@pytest.mark.parametrize("written", SIGNED)
def test_no_sign_is_lost_in_the_gsm8k_format(written: str) -> None:
    for text in (f"Answer: {written}", f"Answer: it is {written} dollars", f"#### {written}"):
        assert not gsm8k_rule(text, "5").correct, text
        assert gsm8k_rule(text, "-5").correct or "#### \\boxed" in text, text


@pytest.mark.parametrize(
    ("written", "truth"),
    [
        *(("1/2", "1"), ("1 / 2", "1"), ("$1/2", "1"), ("1 1/2", "1"), ("-1/2", "-1")),
        *(("1,2,3,4", "1234"), ("12,34", "1234"), ("1234,567", "1234567"), ("1,2345", "12345"), ("1,2,3,4", "1")),
        *(("1.2.3", "1.2"), ("1e3", "1"), ("1E-3", "1")),
    ],
)
def test_the_beginning_of_a_number_is_not_the_number(written: str, truth: str) -> None:
    for text in (f"#### {written}", f"Answer: {written}", f"Answer: {truth}\n#### {written}"):
        verdict = gsm8k_rule(text, truth)
        assert not verdict.correct, (text, verdict)
        assert verdict.extracted is not None
        assert gsm8k_rule(text, written).correct


@pytest.mark.parametrize(
    ("text", "extracted"),
    [
        ("3 + 4 = 7", "7"),
        ("it is 10-3", "3"),
        ("it is 10 - 3", "3"),
        ("it is $10 − $3", "3"),
        ("$10$ - $3$", "3"),
        ("pages 3–5", "5"),
        ("pages 3 – 5", "5"),
        ("10 -3", "-3"),
        ("the total – 5", "5"),
        ("7 or 1/2", "7"),
        ("1/2", None),
        ("12/4=3", "3"),
        ("1,2,3,4", None),
        ("1234,567", None),
        ("minus -3", "-3"),
        ("3.5", None),
        ("1,234", "1234"),
        ("0007", "7"),
        ("7.", "7"),
        ("", None),
    ],
)
def test_integer_rule(text: str, extracted: str | None) -> None:
    assert integer_rule(text, "x").extracted == extracted


@pytest.mark.parametrize("rule", [gsm8k_rule, integer_rule])
def test_number_rules_look_at_the_end_only(rule: Callable[[str, str], Verdict]) -> None:
    assert rule("#### 12" + " " * 290, "12").correct
    assert rule("#### 12" + " " * 300, "12") == Verdict(False, None, "none")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        *(("01,234.50", "1234.5"), ("-0", "0"), ("-0.0", "0"), ("$5", "5"), ("x", "x"), (".5", "0.5"), ("", "")),
        *(("− 5", "-5"), ("1,2", "1,2"), ("1,234,5", "1,234,5"), ("- x", "-x"), ("1 234", "1 234")),
    ],
)
def test_canonical_number(raw: str, expected: str) -> None:
    assert canonical_number(raw) == expected


def test_ground_truths_that_a_rule_cannot_find_right_are_counted() -> None:
    answers = ["5", r"\frac{1}{2}", "1,234", "-3", "x + 1", "3.5", "line\nbreak"]
    prompts = [make_prompt(str(i), answer=answer) for i, answer in enumerate(answers)]

    def said(kind: str, chosen: list[Prompt] = prompts) -> str | None:
        return unmatchable_answers(make_config(reward={"kind": kind}).reward, chosen)

    assert "4 of 7" in (said("integer") or "")
    assert r"e.g. '\\frac{1}{2}', 'x + 1', '3.5'" in (said("integer") or "")
    assert "3 of 7" in (said("gsm8k") or "")
    assert "1 of 7" in (said("dapo") or "")
    for kind in ("math", "json:loads"):  # not asked: a worker's time; another's code
        assert said(kind) is None
    assert said("integer", [prompts[0], prompts[2]]) is None


def test_length_penalty_is_equation_13() -> None:
    """The paper's own figures: 16384 expected tokens and 4096 of buffer."""
    expected = {1: 0.0, 16384: 0.0, 16385: -1 / 4096, 18432: -0.5, 20480: -1.0, 20481: -1.0, 10**6: -1.0}
    assert {length: length_penalty(length, 20480, 4096) for length in expected} == expected


def test_scoring_adds_the_parts_up() -> None:
    overlong = {"cache_length": 16, "filter": True}
    config = make_config(reward={"correct": 2.0, "incorrect": -0.5, "overlong": overlong})
    completions = [
        make_completion(10, "Answer: 7"),
        make_completion(56, "Answer: 7"),
        make_completion(64, "Answer: 8", truncated=True),
    ]
    (group,) = Scorer(config)([make_prompt(answer="7")], [completions])
    assert [sample.reward for sample in group.samples] == [2.0, 1.5, -1.5]
    assert [sample.trains for sample in group.samples] == [True, True, False]
    assert [sample.correct for sample in group.samples] == [True, True, False]
    (plain,) = Scorer(config, shaped=False)([make_prompt(answer="7")], [completions])
    assert [sample.reward for sample in plain.samples] == [2.0, 2.0, -0.5]
    assert all(sample.trains for sample in plain.samples)


def test_punishment_and_filtering_are_apart() -> None:
    completion = make_completion(64, "Answer: 8", truncated=True)
    for soft in (False, True):
        for drop in (False, True):
            overlong = {"cache_length": 16, "soft_punishment": soft, "filter": drop}
            config = make_config(reward={"overlong": overlong})
            ((sample,),) = (group.samples for group in Scorer(config)([make_prompt()], [[completion]]))
            assert (sample.length_penalty, sample.trains) == (-1.0 if soft else 0.0, not drop)
