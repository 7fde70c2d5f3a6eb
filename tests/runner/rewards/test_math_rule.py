"""math-verify in workers that can be killed: right answers, hostile ones, dead workers, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from builders import make_completion, make_config, make_prompt

from dapo_runner.logging.metrics import batch_metrics
from dapo_runner.rewards import rule_worker, workers
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.rewards.workers import TextRule, Worker, open_rule
from dapo_runner.types import Verdict

DEADLINE = 1.0


@pytest.fixture(scope="module")
def judge() -> TextRule:
    return TextRule("math", workers=2, deadline=DEADLINE)


@pytest.fixture(scope="module")
def patient() -> TextRule:
    """For answers that must be judged however busy the machine is."""
    return TextRule("math", workers=1, deadline=60.0)


def judge_all(reward: TextRule, texts: list[str], answer: str) -> list[Verdict]:
    return reward.judge_texts(texts, [answer] * len(texts))


@pytest.mark.parametrize(
    ("text", "answer", "correct"),
    [
        (r"so it is $\boxed{\frac{1}{2}}$.", "0.5", True),
        (r"Answer: $\frac{2}{4}$", r"\frac12", True),
        ("Answer: 1/2", r"\frac{1}{2}", True),
        (r"$x = 3$", "3", True),
        ("The answer is 1,234.", "1234", True),
        (r"$\{1, 2\}$", r"\{2, 1\}", True),
        (r"$336^\circ$", "336", True),
        (r"\boxed{2x + 3}", "3+2x", True),
        ("Answer: 4", "5", False),
        (r"$\boxed{\frac{1}{3}}$", "0.3333", False),
        ("x" * 5000 + "Answer: 7", "7", True),
    ],
)
def test_answers_compare_as_mathematics(patient: TextRule, text: str, answer: str, correct: bool) -> None:
    (verdict,) = judge_all(patient, [text], answer)
    assert (verdict.correct, verdict.rule) == (correct, "math-verify")
    assert verdict.extracted


def test_no_answer_is_told_apart_from_a_wrong_one(patient: TextRule) -> None:
    verdicts = judge_all(patient, ["", "I do not know.", "Answer: 4"], "5")
    assert [verdict.rule for verdict in verdicts] == ["none", "none", "math-verify"]
    assert [verdict.extracted for verdict in verdicts] == [None, None, "4"]


def test_verdicts_come_in_the_order_of_the_texts(patient: TextRule) -> None:
    verdicts = judge_all(patient, [f"Answer: {i}" for i in range(20)], "7")
    assert [verdict.extracted for verdict in verdicts] == [str(i) for i in range(20)]
    assert [i for i, verdict in enumerate(verdicts) if verdict.correct] == [7]
    assert judge_all(patient, [], "7") == []


HOSTILE = {
    "tower": "Answer: $9^{9^{9^{9}}}$",
    "factorial": "$ 99999999!$",
    "binomial": r"$\binom{10^{12}}{5\cdot10^{11}}$",
    "harmonic": r"$\sum_{n=1}^{10^{9}} \frac{1}{n}$",
    "parentheses": "$" + "(" * 900 + "1" + ")" * 900 + "$",
    "braces": r"$\boxed{" + "{" * 1500 + "}$",
    "nest": r"\frac{" * 400 + "1" + "}{2}" * 400,
    "digits": r"\boxed{" + "9" * 1900 + "}",
    "huge": "9" * 10_000_000,
    "surrogate and null": "Answer: \ud800 \x00 ٣",
    "matrix": r"$\begin{pmatrix}" + "1&" * 700 + r"\end{pmatrix}$",
}


def test_hostile_output_neither_hangs_nor_crashes_nor_scores(judge: TextRule) -> None:
    start = time.monotonic()
    verdicts = judge_all(judge, [*HOSTILE.values(), "Answer: 5"], "5")
    assert len(verdicts) == len(HOSTILE) + 1
    assert not any(verdict.correct for verdict in verdicts[:-1])
    rules = dict(zip(HOSTILE, (verdict.rule for verdict in verdicts), strict=False))
    assert set(rules.values()) <= {"math-verify", "none", "error", "timeout", "crash"}, rules
    assert rules["tower"] in ("timeout", "crash", "error")
    assert verdicts[-1].rule in ("math-verify", "timeout")  # after all that the workers are there again
    assert time.monotonic() - start < 120
    assert max(len(verdict.extracted or "") for verdict in verdicts) <= 200


def test_what_became_of_an_answer_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(reward={"kind": "math", "deadline": DEADLINE, "overlong": {"soft_punishment": False}})
    completions = [make_completion(text=text) for text in (HOSTILE["tower"], "", "Answer: 7")]
    (group,) = Scorer(config)([make_prompt(answer="7")], [completions])
    metrics = batch_metrics([group])
    assert metrics["batch/rule_none"] == pytest.approx(1 / 3)
    assert metrics["batch/rule_timeout"] >= 1 / 3 - 1e-9
    assert group.samples[0].reward == -1.0
    assert open_rule("math", 2, DEADLINE) is open_rule(
        "math", 2, DEADLINE
    )  # evaluations do not start workers of their own


def test_output_is_never_evaluated(patient: TextRule, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    for bomb in (f"__import__('pathlib').Path({str(flag)!r}).touch()", f"$__import__('os').system('touch {flag}')$"):
        judge_all(patient, [f"Answer: {bomb}", rf"\boxed{{{bomb}}}"], bomb)
    assert not flag.exists()


def process_of(judge: TextRule) -> subprocess.Popen[bytes]:
    (worker,) = judge._idle
    return worker.process


def test_a_worker_that_dies_at_work_is_counted_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = TextRule("math", workers=1, deadline=60.0)
    assert judge_all(judge, ["Answer: 1"], "1")[0].correct
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "send", lambda worker, request: os.kill(worker.process.pid, signal.SIGKILL))
        assert judge_all(judge, ["Answer: 1"], "1")[0].rule == "crash"
    assert judge_all(judge, ["Answer: 1"], "1")[0].correct


def test_a_worker_that_dies_idle_costs_no_sample_its_verdict() -> None:
    judge = TextRule("math", workers=1, deadline=60.0)
    assert judge_all(judge, ["Answer: 1"], "1")[0].correct
    process_of(judge).kill()
    process_of(judge).wait()
    assert judge_all(judge, ["Answer: 1"], "1")[0].correct


@pytest.mark.parametrize("workers", [1, 2])
def test_a_call_that_is_broken_off_leaves_no_verdict_behind(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C in the middle of it: the worker's answer is not that to the next question."""
    judge = TextRule("math", workers=workers, deadline=60.0)
    assert judge_all(judge, ["Answer: 1"], "1")[0].correct
    send, before = Worker.send, signal.signal(signal.SIGINT, signal.default_int_handler)

    def press(worker: Worker, request: bytes) -> None:
        send(worker, request)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.5)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "send", press)
        with pytest.raises(KeyboardInterrupt):
            judge_all(judge, ["Answer: 1"], "1")
    signal.signal(signal.SIGINT, before)
    assert judge_all(judge, ["Answer: 2"], "1")[0] == Verdict(correct=False, extracted="2", rule="math-verify")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_asks_a_run_to_stop_does_not_reach_the_workers(number: signal.Signals) -> None:
    judge = TextRule("math", workers=1, deadline=60.0)
    assert judge_all(judge, ["Answer: 1"], "1")[0].correct
    process = process_of(judge)
    os.kill(process.pid, number)
    assert judge_all(judge, ["Answer: 1"], "1")[0].correct
    assert process_of(judge) is process


def test_a_worker_out_of_memory_gives_way_to_a_new_one() -> None:
    def judge(text: str) -> dict[str, object]:
        raise MemoryError(text)

    with pytest.raises(MemoryError):
        rule_worker.answer_request(judge, {"text": "Answer: 1"})


def test_a_ground_truth_that_cannot_be_read_is_no_plain_wrong(patient: TextRule) -> None:
    assert judge_all(patient, ["Answer: 4"], "}{")[0].rule == "error"


def test_it_works_outside_the_main_thread_where_signals_do_not() -> None:
    judge, found = TextRule("math", workers=1, deadline=60.0), []
    thread = threading.Thread(target=lambda: found.append(judge_all(judge, [r"\boxed{\frac12}"], "0.5")[0]))
    thread.start()
    thread.join(timeout=120)
    assert found[0].correct


def test_a_worker_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.sys, "executable", "false")
    with pytest.raises(RuntimeError, match="reward math"):
        judge_all(TextRule("math", workers=1, deadline=1.0), ["1"], "1")


def test_workers_go_when_the_reward_does() -> None:
    judge = TextRule("math", workers=1, deadline=60.0)
    judge_all(judge, ["Answer: 1"], "1")
    process = process_of(judge)
    del judge
    assert process.poll() is not None
