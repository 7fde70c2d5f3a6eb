"""`dapo convert-answers`: what is read from a reply, what the rules hold against it, and a kill in its midst."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import write_rows
from fake_api import FakeAPI, says
from small import Dapo

from dapo_runner.data.dataset import apply_template
from dapo_runner.data.reading import read_problems
from dapo_runner.files import lock_file, read_jsonl
from dapo_runner.tools.convert import RejectedError, Reply, as_integer, check, read_reply, request

CIRCLE = "Let x and y be real numbers such that x^2+y^2-22x-16y+113=0. Determine the smallest possible value of x."
ASKED = "The original answer is in the form $k-m\\sqrt{n}$, where k, m and n are integers. Please find k + m + n."


def reply(
    form: str = "$k-m\\sqrt{n}$",
    question: str = f"{CIRCLE} {ASKED}",
    values: str = "k=11, m=2, n=6",
    quantity: str = "$k+m+n$",
    final: str = "19",
) -> str:
    return (
        f"<think>\n## Final Answer\n7\n</think>\nThe answer has a root in it.\n\n## Answer Format\n{form}\n\n"
        f"## Transformed Problem\n\n{question}\n\n### Answer Calculation for the Transformed Problem\n"
        f"- Matching: $k=11$.\n- Values: {values}\n- **Quantity:** {quantity}\n\n## Final Answer\n{final}\n"
    )


def test_what_is_read_from_a_reply() -> None:
    found = Reply("k-m\\sqrt{n}", f"{CIRCLE} {ASKED}", {"k": 11, "m": 2, "n": 6}, "k+m+n", 19)
    assert read_reply(reply(values="k=11, m=2, n=6.")) == read_reply(reply()) == found
    assert read_reply(reply(form="It is \\(k-m\\sqrt{n}\\).", quantity="k+m+n", final="$\\boxed{19}$.")) == found
    for quantity in ("$k+m+n=11+2+6=19$", "k+m+n = 19"):
        assert check(read_reply(reply(quantity=quantity)), CIRCLE, r"11-2\sqrt{6}")["quantity"]
    assert CIRCLE in request(CIRCLE, "{problem}")[0]["content"]
    assert request(CIRCLE, "{problem}")[0]["content"].endswith("Given answer:\n{problem}")


@pytest.mark.parametrize(
    ("text", "section"),
    [
        ("I cannot.", "Answer Format"),
        (reply()[:-20], "Final Answer"),
        (reply(final="none"), "integer"),
        (reply().replace("Quantity", "Sum"), "Quantity"),
    ],
)
def test_what_is_no_reply(text: str, section: str) -> None:
    with pytest.raises(RejectedError, match=section):
        read_reply(text)


def test_integers() -> None:
    integers = {"19": 19, "$-3$": -3, "1,234": 1234, "$1{,}234$": 1234, "**7**": 7, "\\boxed{0}": 0, "336^\\circ": None}
    integers |= {"3.": 3, "007": 7, " **$\\boxed{19}$**. ": 19, "2*3": None, "{1}{2}": None}
    assert {text: as_integer(text) for text in integers} == integers
    assert [as_integer(text) for text in ("1.5", "x", "", "1,2", "2^3", "\\frac{1}{2}", "٣", "1 2")] == [None] * 8


@pytest.mark.parametrize(
    ("answer", "form", "values", "quantity", "integer"),
    [
        ("$11-2\\sqrt{6}$", "k-m\\sqrt{n}", {"k": 11, "m": 2, "n": 6}, "k+m+n", 19),
        ("-\\frac{3}{4}", "-\\frac pq", {"p": 3, "q": 4}, "p+q", 7),
        ("\\frac{5\\pi}{12}", "\\frac{a\\pi}{b}", {"a": 5, "b": 12}, "10a+b", 62),
        ("0.125", "\\frac{p}{q}", {"p": 1, "q": 8}, "p+q", 9),
        ("\\frac{1+\\sqrt{5}}{2}", "\\frac{p+k\\sqrt{m}}{q}", {"p": 1, "k": 1, "m": 5, "q": 2}, "p+k+m+q", 9),
        ("\\frac{2}{5}", "\\frac{p}{q+r}", {"p": 2, "q": 4, "r": 1}, "p+q+r", 7),
        ("\\sqrt{6}", "\\sqrt{m+n}", {"m": 4, "n": 2}, "m+n", 6),
        ("5\\left(\\frac12\\right)^{3}", "a\\frac{p}{q}", {"a": 5, "p": 1, "q": 8}, "apq", 40),
    ],
)
def test_what_agrees_by_sympy(answer: str, form: str, values: dict[str, int], quantity: str, integer: int) -> None:
    found = Reply(form, f"{CIRCLE} In the form, find {', '.join(values)}.", values, quantity, integer)
    assert check(found, CIRCLE, answer) == {"quantity": True, "form": True}


@pytest.mark.parametrize(
    "changed",
    [
        {"form": "$k+m\\sqrt{n}$"},
        {"values": "k=11, m=2, n=5", "final": "18"},
        {"final": "20"},
        {"final": "20", "quantity": "$k+m+n = 11+2+6 = 20$"},
        {"question": CIRCLE},
        {"question": f"{CIRCLE} Find k + m."},
        {"question": f"{CIRCLE} {ASKED} Here k = 11."},
        {"question": f"{CIRCLE} {ASKED} It is $11-2\\sqrt{{6}}$."},
        {"values": "k=11, m=2"},
        {"quantity": "19"},
        {"form": "$11-2\\sqrt{6}$"},
        {"values": "k=11, m=1, n=24", "final": "36"},  # not in lowest terms
    ],
)
def test_what_is_rejected(changed: dict[str, str]) -> None:
    with pytest.raises(RejectedError):
        check(read_reply(reply(**changed)), CIRCLE, r"11-2\sqrt{6}")


@pytest.mark.parametrize(
    ("answer", "form", "values"),
    [
        (r"\frac12", r"\frac{p}{q}", {"p": 2, "q": 4}),
        (r"\frac12", "p/q", {"p": 2, "q": 4}),
        (r"\frac12", "p  /  q", {"p": 2, "q": 4}),
        (r"-\frac34", r"\frac pq", {"p": 3, "q": -4}),
        (r"\frac{\sqrt3}{2}", r"\frac{k\sqrt{m}}{n}", {"k": 2, "m": 3, "n": 4}),
        (r"\frac{1-\sqrt5}{2}", r"\dfrac{ -k\sqrt{m} + p }{ q }", {"p": 2, "k": 2, "m": 5, "q": 4}),
        (r"\frac{\pi}{2}", r"\frac{p\pi}{q}", {"p": 2, "q": 4}),
        (r"2\sqrt[3]{2}", r"\sqrt[3]{m}", {"m": 16}),
    ],
)
def test_values_that_are_not_in_lowest_terms_are_rejected(answer: str, form: str, values: dict[str, int]) -> None:
    found = Reply(form, f"{CIRCLE} {', '.join(values)}", values, "+".join(values), sum(values.values()))
    with pytest.raises(RejectedError, match="lowest terms"):
        check(found, CIRCLE, answer)


PROBLEMS = [(f"{number}. {CIRCLE}", "11-2\\sqrt{6}") for number in range(6)]
ROWS = [
    *({"question": apply_template("dapo", problem), "truth": answer} for problem, answer in PROBLEMS),
    {"question": "1 + 2?", "truth": "$3$."},
    {"question": PROBLEMS[0][0], "truth": "11-2\\sqrt{6}"},
    {"question": "Which colour?", "truth": "red"},
]


def answer_as(number: int) -> str:
    """To problem 2 a wrong one."""
    return reply(question=f"{PROBLEMS[number][0]} {ASKED}", final="20" if number == 2 else "19")


def answering(body: dict[str, Any]) -> dict[str, Any]:
    asked = body["messages"][-1]["content"].rpartition("Problem:\n")[2]
    return says(answer_as(int(asked[0])) if asked[0].isdigit() else reply(final="none"))


def arguments(folder: Path, api: FakeAPI, name: str = "out", *more: str) -> list[str]:
    here = ["model=large", f"url={api.url}", "columns={prompt: question, answer: truth}"]
    data = write_rows(folder / "in.jsonl", ROWS)
    return ["convert-answers", str(data), str(folder / f"{name}.jsonl"), *here, *more]


def test_what_passes_is_kept_with_its_evidence(tmp_path: Path, dapo: Dapo) -> None:
    with FakeAPI(answering) as api:
        assert re.search(r"^7\b.*out\.jsonl$", dapo(*arguments(tmp_path, api)), re.MULTILINE)
        assert len(api.bodies) == 8  # also of the problem without its instruction, but not of the integer
        dapo.refuses(str(tmp_path / "out.jsonl"), *arguments(tmp_path, api))
    kept, rejected = (read_jsonl(tmp_path / f"out{name}.jsonl") for name in ("", ".rejected"))
    assert [problem.answer for problem in read_problems(tmp_path / "out.jsonl")] == ["19"] * 5 + ["3", "19"]
    evidence = {"problem": PROBLEMS[0][0], "agrees": {"quantity": True, "form": True}}
    evidence |= {"values": {"k": 11, "m": 2, "n": 6}, "reply": answer_as(0)}
    assert evidence.items() <= kept[0]["conversion"].items()
    assert kept[5]["conversion"] == {"rule": "integer"}
    assert [row["reward_model"]["ground_truth"] for row in rejected] == ["11-2\\sqrt{6}", "red"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.rejected.jsonl"]


def test_an_interrupted_conversion_resumes_and_asks_no_question_twice(tmp_path: Path, dapo: Dapo) -> None:
    def failing(body: dict[str, Any]) -> Any:
        return (500, b"busy", {}) if failing_from <= len(api.bodies) else answering(body)

    with FakeAPI(answering) as api:
        dapo(*arguments(tmp_path, api, "whole"))
    with FakeAPI(failing) as api:
        failing_from, command = 4, arguments(tmp_path, api, "lost", "concurrency=1")
        dapo(*command, code=1)
        asked = len(api.bodies) - 3  # without the retries of the one that failed
        assert asked == 3
        journal = tmp_path / "lost.journal.jsonl"
        assert len(read_jsonl(journal)) == 1 + 1 + asked
        journal.write_text(journal.read_text() + '{"key": "cut')  # what a kill leaves
        assert not (tmp_path / "lost.jsonl").exists()
        dapo(*command, "model=another", code=2)
        with lock_file(journal):
            dapo.refuses(f"{journal}: expected a file that no other process writes", *command)
        failing_from, before = 99, len(api.bodies)
        dapo(*command)
        assert len(api.bodies) - before == 8 - asked
    for name in ("", ".rejected"):
        assert (tmp_path / f"lost{name}.jsonl").read_bytes() == (tmp_path / f"whole{name}.jsonl").read_bytes()


def test_a_problem_that_the_server_refuses_is_rejected_and_a_failure_loses_no_other_reply(
    tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reply(body: dict[str, Any]) -> Any:
        asked = body["messages"][-1]["content"].rpartition("Problem:\n")[2]
        is_failing = asked[0] == "4" or (status == 400 and asked[0] == "1")  # "1 + 1 = ?" tells whether all are refused
        return (status, b"", {}) if is_failing else (413, b"", {}) if "colour" in asked else answering(body)

    monkeypatch.setattr("dapo_runner.rewards.calls.PAUSE", 0.0)
    with FakeAPI(reply) as api:
        status = 500
        dapo(*arguments(tmp_path, api), code=1)
        assert len(read_jsonl(tmp_path / "out.journal.jsonl")) == len(ROWS)  # of the settings, and all rows but one
        status, before = 400, len(api.bodies)
        dapo(*arguments(tmp_path, api), code=1)
        assert len(api.bodies) - before == 2
        status, before = 422, len(api.bodies)
        dapo(*arguments(tmp_path, api))
        assert len(api.bodies) - before == 2
    rejected = read_jsonl(tmp_path / "out.rejected.jsonl")
    assert [row["conversion"]["rejected"][-10:] for row in rejected[1:]] == ["(HTTP 422)", "(HTTP 413)"]


def test_a_missing_package_is_named(tmp_path: Path, dapo: Dapo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    dapo("convert-answers", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "model=x", "url=http://here", code=2)
    assert "math_verify" in dapo.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["model=x", "url=here"], "url"),
        (["model=x"], "url"),
        (["model=x", "url=http://here", "columns={prompt: q}"], "columns.answer"),
        (["url=http://here"], "model"),
    ],
)
def test_a_mistake_names_its_setting(options: list[str], key: str, tmp_path: Path, dapo: Dapo) -> None:
    dapo.refuses(key, "convert-answers", tmp_path / "in.jsonl", tmp_path / "out.jsonl", *options)
    assert list(tmp_path.iterdir()) == []
