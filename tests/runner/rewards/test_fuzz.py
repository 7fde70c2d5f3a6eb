"""No answer of a model ends a run: every rule of the settings gives a verdict on whatever it is shown, in time."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from builders import make_completion, make_config, make_prompt
from fake_api import FakeAPI, asked, says
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dapo_runner.config import ConfigError
from dapo_runner.config.reward import RULES
from dapo_runner.rewards.rule_worker import FENCED
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.types import Verdict

PATIENT = 60.0
TASK = {"name": "countdown", "config": {"seed": 0, "size": 1}, "index": 0}
SCHEMA = {
    "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "properties": {
        "price": {"multipleOf": 0.01, "minimum": -1e300, "exclusiveMaximum": 1e308},
        "count": {"type": "integer", "multipleOf": 3},
        "name": {"pattern": "^(a|b)*$", "minLength": 1, "format": "email"},
        "tree": {"$ref": "#/$defs/tree"},
        "set": {"uniqueItems": True, "contains": {"const": 1.5}},
    },
    "patternProperties": {"^x": {"enum": [None, 1, "\ud800", [1, {"a": 2}]]}},
    "propertyNames": {"maxLength": 40},
    "unevaluatedProperties": False,
}
ANSWERS = {
    "json": json.dumps(SCHEMA),
    "code": "assert f(1) == 2",
    "choice": "B",
    "math": r"\frac{1}{2}",
    "reasoning_gym": "7",
}
PIECES = [
    *("Answer: ", "answer is ", "#### ", r"\boxed{", "}", "{", "$", r"\$", "\n", " ", "B", "(B)", "1,2,3", "a = b = "),
    *("```python\n", "```json\n", "```sh a\r\n", "```", "```\n", "null", "[]", "NaN", "Infinity", "1e999", "-1E400"),
    *("1/0", "0/0", "10^10^10"),
    *("9" * 400, "9" * 5000, "0." + "0" * 400 + "1", "²", "٣", "\ud800", "\udfff\ud800", "\0", "\x1b[2J", "\u202e"),
    *("ﷺ" * 99, "İ" * 99, "e\u0301", "−", "–", "(" * 3000, "[" * 3000, "-" * 3000, "x" * 3000, '{"a":' * 3000),
    *(r"\frac{" * 500, r"\sqrt" * 500),
    *('{"tree": ' + "[" * 900 + "]" * 900 + "}", '{"set": [' + "[1.5, {}]," * 300 + "1]}"),
    *('{"price": 1e999}', '{"price": ' + "7" * 400 + "}", '{"price": -0.0}', '{"price": 1e-400}'),
    *('{"count": ' + "3" * 4000 + "}", '{"name": "\\ud800"}', '{"x": "\\ud800"}', '"\\udc00"'),
    *("def f(x): return x + 1\n", "raise KeyboardInterrupt\n", "import sys\nsys.exit(0)\n"),
]
HOSTILE = [  # repeated to 100 kB: anything worse than linear in it takes seconds
    *("{", r"\boxed{", "Answer: ", "Answer:", "answer ", " ", "\n", "$", r"\text{", "1,", "-", "- ", "#", "9", "1 "),
    *("frac", "(", "[", "A", "a", "²", "1/", '"', '{"a":'),
]
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, 1e308, 1.5])
NAMES = st.sampled_from(["price", "count", "name", "tree", "set", "x", "\ud800", "y" * 50])
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=6).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
).map(json.dumps)
EXAMPLES = {"code": 10, "math": 20, "reasoning_gym": 8, "judge": 40, "votes": 20}  # a process or a request each
STRINGS = ("dapo", "gsm8k", "integer", "choice", "exact")  # rules that judge in this process
BOUNDS = [HealthCheck.too_slow, HealthCheck.data_too_large]


def fussy(body: dict[str, Any]) -> Any:
    """A provider that refuses, filters and repeats what it is shown, and answers a plain question."""
    text = asked(body, "response")
    if len(text) > 300 or not text.isprintable():
        return (400, 413, 422)[len(text) % 3], text.encode(errors="replace"), {}
    return says("", YES=1.0) if "B" in text else says(text, **{text: 0.5, "YES": 0.3, "NO": 0.0001})


@pytest.fixture(scope="module")
def sections() -> Iterator[dict[str, dict[str, Any]]]:
    """The settings of each rule that needs some. Of a judge by its first token and by votes."""
    with ExitStack() as stack:
        api = stack.enter_context(FakeAPI(fussy))
        judge = {"url": api.url, "model": "m", "shows": "response"}
        yield {
            "judge": {"reward": {"judge": judge}},
            "votes": {"reward": {"kind": "judge", "judge": {**judge, "votes": 2}}},
            "reasoning_gym": {"data": {"format": "auto", "reasoning_gym": [{"name": "countdown"}]}},
        }


@cache
def make_scorer(settings: str) -> Scorer:
    try:
        return Scorer(make_config(**json.loads(settings)))
    except ConfigError as error:
        pytest.skip(str(error))


def judge(rule: str, text: str, sections: dict[str, dict[str, Any]], answer: str = "7") -> Verdict:
    """Judge by the way a run takes."""
    raw = dict(sections.get(rule, {}))
    common = {"timeout": PATIENT, "memory_mb": 512, "calls": {"retries": 0}, "overlong": {"soft_punishment": False}}
    raw["reward"] = {"kind": rule, **raw.get("reward", {}), **common}
    prompt = replace(make_prompt(answer=ANSWERS.get(rule, answer)), row={"task": json.dumps(TASK)})
    (group,) = make_scorer(json.dumps(raw))([prompt], [[make_completion(text=text)]])
    (sample,) = group.samples
    assert math.isfinite(sample.reward)
    return sample.verdict


@pytest.mark.parametrize("rule", [*RULES, "votes"])
def test_no_answer_ends_a_run(rule: str, sections: dict[str, dict[str, Any]]) -> None:
    @settings(max_examples=EXAMPLES.get(rule, 80), suppress_health_check=BOUNDS, derandomize=True, database=None)
    @given(TEXTS | JSON, st.sampled_from(["7", "", " ", ".", "\n", "-"]) | st.text(max_size=20))
    @example("", "")
    @example('{"price": 1e999}', "7")
    @example('{"price": ' + "7" * 400 + "}", "7")
    @example('{"name": "\\ud800"}', "7")
    def check(text: str, answer: str) -> None:
        verdict = judge(rule, text, sections, answer)
        assert rule not in STRINGS or verdict.extracted is not None or not verdict.correct
        if rule == "json" and verdict.extracted is not None:
            verdict.extracted.encode()
        json.dumps([verdict.correct, verdict.extracted, verdict.rule, verdict.value], allow_nan=False)

    check()


@pytest.mark.parametrize("rule", [*STRINGS, "json"])
def test_no_piece_repeated_takes_long(rule: str, sections: dict[str, dict[str, Any]]) -> None:
    judge(rule, "", sections)
    for piece in [*PIECES, *HOSTILE]:
        start = time.process_time()
        repeated = piece * (100_000 // len(piece))
        for opening in ("", "Answer", "Answer: ", "#### "):
            judge(rule, opening + repeated, sections)
        assert time.process_time() - start < 5, piece[:20]


def test_no_fence_repeated_takes_long() -> None:
    lines = ("`", "x```a\n", "x```a b\n", "x```a b", "x```\t", "\n \t", "\n```a", "x```\r\n", "```a" + " " * 999)
    for piece in (*lines, "```python\n", "```json\n", "```sh a\r\n", "```", "```\n", "\n", " ", "a"):
        start = time.process_time()
        for opening in ("", "```", "```\n", "```a ", "x```a b\n"):
            FENCED.findall(opening + piece * (200_000 // len(piece)) + "```x")
        assert time.process_time() - start < 2, piece[:20]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "judge"])
def test_no_answer_is_evaluated(rule: str, tmp_path: Path, sections: dict[str, dict[str, Any]]) -> None:
    flag = tmp_path / "flag"
    for bomb in (f"__import__('pathlib').Path({str(flag)!r}).touch()", f"$__import__('os').system('touch {flag}')$"):
        judge(rule, f"\\boxed{{{bomb}}}\nAnswer: {bomb}\n#### {bomb}", sections, bomb)
        judge(rule, bomb, sections, bomb)
    assert not flag.exists()
