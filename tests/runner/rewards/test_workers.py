"""Rules in processes that can be killed: `math` and `json`; hostile responses, workers that die, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from builders import make_completion, make_config, make_prompt
from refusals import refused

from dapo_runner.logging.metrics import batch_metrics
from dapo_runner.rewards import rule_worker
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.rewards.workers import TextRule, open_rule
from dapo_runner.types import Verdict

for package in ("math_verify", "jsonschema"):
    pytest.importorskip(package)
PATIENT = 120.0  # for what must be judged however busy the machine is
TOWER = "Answer: $9^{9^{9^{9}}}$"
# Both take forever. A pattern that backtracks holds the interpreter's lock: in this process nothing else would go on.
FOREVER = {"math": (TOWER, "1"), "json": ('"' + "a" * 60 + '!"', '{"pattern": "^(a+)+$"}')}


@cache
def patient(kind: str = "math") -> TextRule:
    return TextRule(kind, workers=1, timeout=PATIENT)


def judge(rule: TextRule, text: str, answer: str) -> Verdict:
    (verdict,) = rule.judge_texts([text], [answer])
    return verdict


@pytest.mark.parametrize(
    ("text", "answer", "rule", "correct"),
    [
        (r"so it is $\boxed{\frac{1}{2}}$.", "0.5", "math-verify", True),
        ("Answer: 1/2", r"\frac{1}{2}", "math-verify", True),
        (r"$\{1, 2\}$", r"\{2, 1\}", "math-verify", True),
        ("Answer: −5", "-5", "math-verify", True),
        ("so x = -5.", "−5", "math-verify", True),
        ("So \\boxed{5}\n\nWait, I forgot a term.\n\n\\boxed{6}", "6", "math-verify", True),
        ("So \\boxed{5}\n\nWait, I forgot a term.\n\n\\boxed{6}", "5", "math-verify", False),
        ("x = \\boxed{1}\n\ny = \\boxed{2}", "1, 2", "math-verify", True),
        ("\\boxed{3}\n\nHence \\boxed 5", "3", "math-verify", False),  # 5 is its one guess
        ("\\boxed{3}\n\nHence \\boxed 5", "5", "math-verify", True),
        ("\\boxed{3\\text{ m}}\n\nso \\boxed{5\\text{ m}}", "3", "math-verify", False),
        ("\\boxed{3}\n\nin \\boxed as asked", "3", "math-verify", True),
        ("x = \\boxed{8}\n\ny = \\boxed{-2}", "(8,-2)", "math-verify", True),
        ("\\boxed{1}\n\n\\boxed{2,3}", "1, 2, 3", "math-verify", True),
        (r"So \boxed{5} and \boxed{6}", "5, 6", "math-verify", True),
        (r"$\boxed{1}$ and $\boxed{2}$", "1, 2", "math-verify", True),
        (r"\boxed{10000}", r"10\,000", "math-verify", True),
        (r"\boxed{0}", r"1\;000", "math-verify", False),
        (r"\boxed{0{,}125}", "0.125", "math-verify", True),
        (r"\boxed{(1,\!200)}", "(1,200)", "math-verify", True),
        (r"\boxed{\{1,\!200\}}", r"\{1,200\}", "math-verify", True),
        (r"\boxed{\{1,\!2,\!345\}}", r"\{1,2,345\}", "math-verify", True),
        (r"\boxed{(1\,200, 3{,}400)}", "(1200,3400)", "math-verify", True),
        (r"\boxed{2^3\,100}", "800", "math-verify", True),
        (r"\boxed{2^{3}\,100}", "800", "math-verify", True),
        (r"\boxed{\frac12\,345}", "172.5", "math-verify", True),
        (r"\boxed{\frac 12\,345}", "172.5", "math-verify", True),
        (r"\boxed{\frac{1{,}234}{5}}", "246.8", "math-verify", True),
        ("Step 1.\n\nAnswer: 2\\sqrt{3}.", r"2\sqrt{3}", "math-verify", True),  # without dollars
        (r"Answer: 2\sqrt{3}", "2", "math-verify", False),
        (r"**Answer:** \frac{\sqrt{3}}{2}", r"\frac{\sqrt{3}}{2}", "math-verify", True),
        ("Answer: (1, 2)", "(1,2)", "math-verify", True),
        ("Answer: x > 5", "5", "math-verify", False),
        (r"Answer: 2\,000x + 1", "2000x+1", "math-verify", True),
        ("Answer: 3.5%", "3.5", "math-verify", True),
        ("Answer: 5 A", "5", "math-verify", True),
        ("Answer：１８", "18", "math-verify", True),
        (r"\boxed{１２}", "１２", "math-verify", True),
        (r"\boxed{(1，200)}", "(1,200)", "math-verify", True),
        ("\\boxed{1\u202f234}", "1234", "math-verify", True),
        ("Answer: 5 or 6", "5", "math-verify", True),
        ("Answer: 1 1/2", "1", "math-verify", False),
        (r"\boxed{-1 1/2}", "-1.5", "math-verify", True),
        (r"\boxed{3/2}", "1 1/2", "math-verify", True),
        (r"\boxed{2^3 1/2}", "4", "math-verify", True),  # no mixed number
        ("so it is 1 1/2.", "3/2", "math-verify", True),
        ("Answer: 4", "5", "math-verify", False),
        ("Answer: 4", "}{", "error", False),  # a ground truth that cannot be read
        ("x" * 5000 + "Answer: 7", "7", "math-verify", True),
        ("$7$" + " " * 2000, "7", "none", False),
        ("", "5", "none", False),
    ],
)
def test_answers_are_compared_as_mathematics(text: str, answer: str, rule: str, correct: bool) -> None:
    verdict = judge(patient(), text, answer)
    assert (verdict.correct, verdict.rule) == (correct, rule)
    assert (verdict.extracted is not None) == (rule == "math-verify")


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^(a+)+$"},
        "age": {"type": "integer", "minimum": 0},
        "price": {"multipleOf": 0.01},
        "text": {"type": "string"},
        "day": {"format": "date"},
    },
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "correct", "rule"),
    [
        ('{"name": "aa", "age": 3}', True, "json-schema"),
        ('Here:\n```json\n{"name": "b"}\n```\nno:\n```json\n{"name": "a"}\n```', True, "json-schema"),
        ('```json\n{"name": "a"}\n```\nIt means:\n```\na is a\n```', True, "json-schema"),
        ('```json\n{"name": "a", "text": "use ```x``` now"}\n```', True, "json-schema"),
        ('{"name": "a"}\n```\nThis continues a block of the prompt.', True, "json-schema"),
        ('{"name": "a", "day": "2026-02-30"}', False, "json-schema"),
        ('```python\nx = 1\n```\nprints\n```JSON\r\n{"name": "a"}\n```', True, "json-schema"),
        ('{"name": "aa", "age": -3}', False, "json-schema"),
        ('{"name": "aa", "price": 1.25}', True, "json-schema"),
        ('{"name": "aa",}', False, "none"),
        ('{"name": "aa", "age": NaN}', False, "none"),
        ('{"name": "aa", "price": 1e999}', False, "none"),
        ("", False, "none"),
        ("[" * 100_000, False, "none"),
        ("9" * 100_000, False, "none"),
    ],
)
def test_json_is_judged_by_a_schema(text: str, correct: bool, rule: str) -> None:
    verdict = judge(patient("json"), text, json.dumps(SCHEMA))
    assert (verdict.correct, verdict.rule) == (correct, rule)


REFERENCES = [
    {"$ref": "https://json-schema.org/draft/2020-12/schema"},
    {"properties": {"$ref": {"type": "string"}, "a": {"$ref": "#/properties/$ref"}}, "enum": [{"$ref": "#no"}, {}]},
    {"$id": "http://a/b", "items": {"$id": "c", "$ref": "#d", "$defs": {"d": {"$anchor": "d"}}}, "$ref": "c"},
    {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "definitions": {"a": {}},
        "items": {"$ref": "#/definitions/a"},
    },
    {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": {}}, "$ref": "#/definitions/a"},
    {"$schema": "http://json-schema.org/draft-07/schema#", "$dynamicRef": "#none"},  # no keyword there
    {"$ref": "http://json-schema.org/draft-04/schema#"},
    {"$dynamicAnchor": "a", "properties": {"a": {"$dynamicRef": "#a"}}, "items": {"$dynamicRef": "#/properties/a"}},
    {"$ref": "#/b", "b": {"items": {"$ref": "#/c"}}, "c": {"items": {"$ref": "#/b"}}, "d": {"$ref": "#/none"}},
    True,
]
INVALID = [
    {"type": "objekt"},
    {"pattern": "("},
    {"properties": {"a": {"$ref": "#/$defs/none"}}},
    {"$ref": "http://["},
    {"properties": {"a": {"$dynamicRef": "#none"}}},
    {"properties": {"a": {"$ref": "#/b"}}, "b": {"items": {"$ref": "#/c"}}, "c": {"items": {"$ref": "#/none"}}},
    {"properties": {"a": {"$ref": "#/title"}}, "title": "no schema"},
]


def test_references_inside_a_schema_are_followed_and_nothing_is_fetched() -> None:
    for schema in REFERENCES:
        assert judge(patient("json"), "{}", json.dumps(schema)) == Verdict(True, "{}", "json-schema"), schema
    with socket.create_server(("127.0.0.1", 0)) as server:
        elsewhere = {"$ref": f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"}
        for text in ("no schema", *map(json.dumps, [*INVALID, elsewhere])):
            for response in ('{"a": 1}', "{}"):  # also one that the reference does not concern
                with refused("reward json"):
                    judge(patient("json"), response, text)


def test_hostile_responses_neither_hang_nor_score_and_are_counted() -> None:
    reward = {"kind": "math", "timeout": 1.0, "overlong": {"soft_punishment": False}}
    texts = [TOWER, r"\boxed{" + "9" * 1900 + "}", "9" * 10_000_000, ""]
    (group,) = Scorer(make_config(reward=reward))([make_prompt(answer="5")], [[make_completion(text=t) for t in texts]])
    tower, *_ = verdicts = [sample.verdict for sample in group.samples]
    assert tower.rule in ("timeout", "crash", "error")
    assert max(len(verdict.extracted or "") for verdict in verdicts) <= 200
    assert [sample.reward for sample in group.samples] == [-1.0] * len(texts)
    assert batch_metrics([group], 0)["batch/rule_none"] >= 1 / len(texts)
    assert open_rule("math", 2, 1.0) is open_rule("math", 2, 1.0)  # an evaluation uses the workers of the training


@pytest.mark.parametrize("kind", ["math", "json"])
def test_a_late_rule_is_ended_in_any_thread(kind: str) -> None:
    late = TextRule(kind, workers=1, timeout=0.3)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(judge, late, *FOREVER[kind]).result(PATIENT).rule == "timeout"


def process_of(rule: TextRule) -> subprocess.Popen[bytes]:
    (worker,) = rule._idle
    return worker.process


def while_it_judges(rule: TextRule, act: Callable[[], None]) -> threading.Thread:
    """Call ``act`` once the idle worker of a rule computes a verdict."""
    status = Path(f"/proc/{process_of(rule).pid}/stat")

    def wait() -> None:
        while rule._idle or status.read_text().rpartition(")")[2].split()[0] != "R":
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_worker_that_dies_is_replaced() -> None:
    rule = TextRule("json", workers=1, timeout=PATIENT)
    assert judge(rule, "1", "{}").correct
    thread = while_it_judges(rule, process_of(rule).kill)
    assert judge(rule, *FOREVER["json"]).rule == "crash"
    thread.join()
    assert judge(rule, "1", "{}").correct
    process_of(rule).kill()  # while it is idle: that costs no response its verdict
    process_of(rule).wait()
    assert judge(rule, "1", "{}").correct


@pytest.mark.parametrize("workers", [1, 2])
def test_a_call_that_ctrl_c_ends_leaves_no_verdict_behind(workers: int) -> None:
    """The answer of the worker to that call is not that to the next one."""
    rule = TextRule("json", workers, PATIENT)
    assert judge(rule, "1", "{}").correct
    process, main = process_of(rule), threading.main_thread().ident
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = while_it_judges(rule, lambda: signal.pthread_kill(main, signal.SIGINT))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        judge(rule, *FOREVER["json"])
    assert time.monotonic() - start < PATIENT / 2  # it does not wait for the call
    signal.signal(signal.SIGINT, before)
    thread.join()
    assert judge(rule, "2", "{}") == Verdict(True, "2", "json-schema")
    process.kill()


def test_signals_that_stop_a_run_do_not_reach_a_worker_and_it_ends_with_its_rule() -> None:
    rule = TextRule("json", workers=1, timeout=PATIENT)
    assert judge(rule, "1", "{}").correct
    process = process_of(rule)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
        assert judge(rule, "1", "{}").correct
    assert process_of(rule) is process
    del rule
    assert process.poll() is not None


def test_a_worker_without_memory_gives_way_to_a_new_one() -> None:
    with pytest.raises(MemoryError):
        rule_worker.answer_request(lambda text: bytearray(2**62), {"text": "1"})


def test_a_worker_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "false")
    with pytest.raises(RuntimeError, match="reward json"):
        judge(TextRule("json", workers=1, timeout=1.0), "1", "1")
