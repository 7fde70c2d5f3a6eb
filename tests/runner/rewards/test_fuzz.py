"""No answer of a model ends a run: every rule of the settings gives a verdict on whatever it is shown, in time."""

from __future__ import annotations

import json
import math
import time
from functools import cache
from typing import Any

import pytest
from builders import make_completion, make_config, make_prompt
from fake_api import FakeAPI, asked, says
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dapo_runner.config import ConfigError
from dapo_runner.config.reward import RULES
from dapo_runner.rewards.scoring import Scorer

PATIENT = 30.0
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
}
PIECES = [
    *("Answer: ", "answer is ", "#### ", r"\boxed{", "}", "{", "$", r"\$", "\n", " ", "B", "(B)", "1,2,3", "a = b = "),
    *("```python\n", "```json\n", "```", "null", "[]", "NaN", "Infinity", "1e999", "-1E400", "1/0", "0/0", "10^10^10"),
    *("9" * 400, "9" * 5000, "0." + "0" * 400 + "1", "²", "٣", "\ud800", "\udfff\ud800", "\0", "\x1b[2J", "\u202e"),
    *("ﷺ" * 99, "İ" * 99, "e\u0301", "−", "–", "(" * 3000, "[" * 3000, "-" * 3000, "x" * 3000, '{"a":' * 3000),
    *(
        r"\frac{" * 500,
        r"\sqrt" * 500,
        '{"tree": ' + "[" * 900 + "]" * 900 + "}",
        '{"set": [' + "[1.5, {}]," * 300 + "1]}",
    ),
    *('{"price": 1e999}', '{"price": ' + "7" * 400 + "}", '{"price": -0.0}', '{"price": 1e-400}'),
    *('{"count": ' + "3" * 4000 + "}", '{"name": "\\ud800"}', '{"x": "\\ud800"}', '"\\udc00"'),
    *("def f(x): return x + 1\n", "raise KeyboardInterrupt\n", "import sys\nsys.exit(0)\n"),
]
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, 1e308, 1.5])
NAMES = st.sampled_from(["price", "count", "name", "tree", "set", "x", "\ud800", "y" * 50])
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=6).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
).map(json.dumps)
SLOW = ("code", "math")  # a process for each text
FAST = [rule for rule in RULES if rule not in ("judge", *SLOW)]


@cache
def scorer(rule: str) -> Scorer:
    deadlines = {"deadline": PATIENT, "memory_mb": 512}
    overlong = {"soft_punishment": False}
    try:
        return Scorer(make_config(reward={"kind": rule, "overlong": overlong, **deadlines}))
    except ConfigError as error:
        pytest.skip(str(error))


def judge(rule: str, text: str) -> None:
    """By the way a run takes."""
    prompt = make_prompt(answer=ANSWERS.get(rule, "7"))
    completions = [[make_completion(text=text)]]
    (group,) = scorer(rule)([prompt], completions)
    (sample,) = group.samples
    assert math.isfinite(sample.reward)
    verdict = sample.verdict
    if verdict.extracted is not None and rule == "json":
        verdict.extracted.encode()
    json.dumps([verdict.correct, verdict.extracted, verdict.rule, verdict.value], allow_nan=False)


@pytest.mark.parametrize("rule", FAST)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], derandomize=True)
@given(TEXTS | JSON)
@example('{"price": 1e999}')
@example('{"price": ' + "7" * 400 + "}")
@example('{"name": "\\ud800"}')
def test_no_answer_ends_a_run(rule: str, text: str) -> None:
    judge(rule, text)


@pytest.mark.parametrize("rule", SLOW)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], derandomize=True)
@given(TEXTS)
def test_no_answer_ends_a_run_of_a_slow_rule(rule: str, text: str) -> None:
    judge(rule, text)


def fussy(body: dict[str, Any]) -> Any:
    """A provider that refuses, filters and repeats what it is shown, and answers a plain question."""
    text = asked(body, "response")
    if len(text) > 300 or not text.isprintable():
        return (400, 413, 422)[len(text) % 3], text.encode(errors="replace"), {}
    return says("", YES=1.0) if "B" in text else says(text, **{text: 0.5, "YES": 0.3, "NO": 0.0001})


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], derandomize=True)
@given(text=TEXTS | JSON, votes=st.sampled_from([0, 2]))
def test_no_answer_ends_a_run_of_a_judge(text: str, votes: int) -> None:
    with FakeAPI(fussy) as api:
        section = {"url": api.url, "model": "m", "shows": "response", "votes": votes}
        reward = {"kind": "judge", "judge": section, "calls": {"retries": 0}, "overlong": {"soft_punishment": False}}
        (group,) = Scorer(make_config(reward=reward))([make_prompt()], [[make_completion(text=text)]])
    assert group.samples[0].verdict.rule in ("judge", "unclear", "none")
    assert math.isfinite(group.samples[0].reward)


@pytest.mark.parametrize("rule", FAST)
def test_no_piece_repeated_takes_long(rule: str) -> None:
    for piece in PIECES:
        start = time.process_time()
        judge(rule, "Answer: " + piece * 20)
        assert time.process_time() - start < 5, piece[:20]
