"""Multiple choice, exact and fuzzy match, JSON under a schema."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from builders import make_completion, make_config, make_prompt
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from dapo_runner.config import ConfigError
from dapo_runner.rewards import workers
from dapo_runner.rewards.reward import RewardError
from dapo_runner.rewards.rules import choice_rule, exact_rule, fuzzy_rule
from dapo_runner.rewards.scoring import load_reward, unmatchable_answers
from dapo_runner.types import Verdict


@pytest.mark.parametrize(
    ("text", "extracted", "rule"),
    [
        ("Not A, not C.\nAnswer: B", "B", "answer-line"),
        ("Answer: A\nNo.\nAnswer: (B)", "B", "answer-line"),
        ("The answer is B.", "B", "answer-line"),
        ("**Answer:** B", None, "none"),
        ("Answer: **B**", "B", "answer-line"),
        (r"Answer: $\boxed{B}$", "B", "answer-line"),
        ("answer: B. Paris", "B", "answer-line"),
        (r"so it is \boxed{B}", "B", "boxed"),
        (r"so it is \boxed{B. Paris}", "B", "boxed"),
        ("B", "B", "letter"),
        (" (B) since …", "B", "letter"),
        ("B) Paris", "B", "letter"),
        ("Berlin", None, "none"),
        ("A cat.", None, "none"),
        ("The answer is Berlin", None, "none"),
        ("", None, "none"),
    ],
)
def test_multiple_choice(text: str, extracted: str | None, rule: str) -> None:
    assert choice_rule(text, "B") == Verdict(extracted == "B", extracted, rule)
    assert not choice_rule(text, "C").correct
    assert choice_rule("Answer: B", "B. Paris").correct


@pytest.mark.parametrize(
    ("text", "correct", "extracted"),
    [
        ("Paris", True, "paris"),
        (' "Paris." ', True, "paris"),
        ("It is.\nAnswer:  PARIS", True, "paris"),
        ("It is Paris", False, "it is paris"),
        ("Answer: New  Paris", False, "new paris"),
        ("", False, None),
        ("...", False, None),
    ],
)
def test_exact_match(text: str, correct: bool, extracted: str | None) -> None:
    verdict = exact_rule(text, "Paris")
    assert (verdict.correct, verdict.extracted) == (correct, extracted)
    assert exact_rule("Ｇrüße", "grüSSe").correct


def test_fuzzy_match_is_graded() -> None:
    pytest.importorskip("rapidfuzz", reason="rapidfuzz is not installed")
    texts = [f"Answer: {text}" for text in ("kitten", "kittens", "sitting", "", "xyz")]
    values = [fuzzy_rule(text, "kitten", 1.0, 0.0) for text in texts]
    assert [verdict.value for verdict in values] == pytest.approx([1.0, 12 / 13, 8 / 13, 0.0, 0.0])
    assert [verdict.correct for verdict in values] == [True, True, False, False, False]


@given(st.text(max_size=300), st.text(max_size=40))
def test_rules_judge_any_text(text: str, answer: str) -> None:
    for rule in (choice_rule, exact_rule):
        verdict = rule(text, answer)
        assert not (verdict.correct and verdict.extracted is None)


@pytest.mark.parametrize(
    "text", ["answer" + " " * 10**5, "answer " * 20000, "Answer:" * 10**5, "(" * 10**5, "A" * 10**5]
)
def test_hostile_output_takes_no_longer_than_other_output(text: str) -> None:
    start = time.process_time()
    for _ in range(20):
        choice_rule(text, "B")
        exact_rule(text, "B")
    assert time.process_time() - start < 1.0


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^(a+)+$"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "correct", "rule"),
    [
        ('{"name": "aa", "age": 3}', True, "json-schema"),
        ('Here:\n```json\n{"name": "b"}\n```\nno:\n```\n{"name": "a"}\n```', True, "json-schema"),
        ('{"name": "aa", "age": -3}', False, "json-schema"),
        ('{"age": 3}', False, "json-schema"),
        ("[1]", False, "json-schema"),
        ('{"name": "aa",}', False, "none"),
        ('{"name": "aa", "age": NaN}', False, "none"),
        ("", False, "none"),
        ("[" * 100_000, False, "none"),
        ("9" * 100_000, False, "none"),
        ('{"name": "aa", "age": 1e999}', False, "none"),
        ('{"name": "' + "a" * 60 + 'b"}', False, "timeout"),
    ],
)
def test_json_under_a_schema(text: str, correct: bool, rule: str, tmp_path: Path) -> None:
    pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    for schema in (None, tmp_path / "schema.json"):
        reward = {"kind": "json", "json_schema": schema, "deadline": 0.5 if rule == "timeout" else 60.0}
        (verdict,) = json_verdicts(reward, text, json.dumps(SCHEMA) if schema is None else "")
        assert (verdict.correct, verdict.rule) == (correct, rule)


def json_verdicts(reward: dict[str, Any], text: str, schema: str) -> list[Verdict | None]:
    rewarded = load_reward(make_config(reward=reward).reward, "json")
    (judged,) = rewarded.judge([make_prompt(answer=schema)], [[make_completion(text=text)]])
    assert not isinstance(judged, RewardError)
    return judged


def test_a_pattern_that_backtracks_is_late_beside_the_training_too() -> None:
    """In a thread the interpreter's lock is held by it: nothing else of the process would go on."""
    pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    reward = {"kind": "json", "deadline": 0.5}
    with ThreadPoolExecutor(1) as threads:
        judged = threads.submit(json_verdicts, reward, '"' + "a" * 40 + '!"', '{"pattern": "^(a+)+$"}')
        assert [verdict.rule for verdict in judged.result(60) if verdict is not None] == ["timeout"]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "https://json-schema.org/draft/2020-12/schema"},
        {"properties": {"$ref": {"type": "string"}, "a": {"$ref": "#/properties/$ref"}}, "enum": [{"$ref": "#no"}, {}]},
        {"$id": "http://a.example/b", "$ref": "c#d", "$defs": {"e": {"$id": "c", "$defs": {"f": {"$anchor": "d"}}}}},
        {"$dynamicAnchor": "tree", "properties": {"left": {"$dynamicRef": "#tree"}}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": {"$id": "#b"}}, "$ref": "#b"},
    ],
)
def test_references_that_a_schema_holds_are_followed(schema: dict[str, Any]) -> None:
    pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    (verdict,) = json_verdicts({"kind": "json", "deadline": 60.0}, "{}", json.dumps(schema))
    assert verdict == Verdict(True, "{}", "json-schema")


def test_a_schema_fetches_nothing_and_a_bad_one_is_told() -> None:
    pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    for schema in (
        '{"type": "objekt"}',
        '{"pattern": "("}',
        "no schema",
        '{"$ref": "http://example.invalid/schema.json"}',
        '{"properties": {"a": {"$ref": "#/$defs/none"}}}',
        '{"$ref": "#/x/y", "x": {"y": {"properties": {"a": {"$ref": "#gone"}}}}}',
        '{"not": {"$dynamicRef": "#gone"}}',
        '{"$ref": "http://["}',
    ):
        with pytest.raises(ConfigError, match="reward json"):
            json_verdicts({"kind": "json"}, '{"a": 1}', schema)
    with refused("reward.json_schema"):
        load_reward(make_config(reward={"kind": "json", "json_schema": "nowhere.json"}).reward, "json")


@pytest.mark.parametrize("kind", ["fuzzy", "json", "math"])
def test_a_missing_package_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=kind):
        load_reward(make_config(reward={"kind": kind, "workers": 7}).reward, kind)


def test_a_ground_truth_that_is_no_letter_is_told() -> None:
    prompts = [make_prompt(answer=answer) for answer in ("A", "Paris", "(C)")]
    assert "1 of 3" in (unmatchable_answers(make_config(reward={"kind": "choice"}).reward, prompts) or "")
