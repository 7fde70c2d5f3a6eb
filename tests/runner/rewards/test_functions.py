"""Reward functions of the user's own: what they may return, how their calls overlap, and what becomes of failures."""

from __future__ import annotations

import asyncio
import importlib
import signal
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from builders import make_completion, make_config, make_prompt
from refusals import refused
from small import config_in, events_of

from dapo_runner import http
from dapo_runner.checkpoint import find_checkpoints
from dapo_runner.config import Config
from dapo_runner.files import read_jsonl
from dapo_runner.logging.progress import Progress
from dapo_runner.logging.run_log import CHECKPOINTS
from dapo_runner.loop import train
from dapo_runner.rewards.calls import CallTimeoutError, RewardError, call_with_timeout
from dapo_runner.rewards.scoring import Scorer
from dapo_runner.threads import map_in_threads
from dapo_runner.types import Completion, Group, Prompt, Verdict

IMPORTS = "import asyncio, enum, random, re, sys, threading, time, numpy as np\nfrom dapo_runner.types import Verdict\n"
LIMIT = 60.0  # seconds for what takes no time on a machine that is not busy

MakeConfig = Callable[..., Config]


@pytest.fixture
def config_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeConfig:
    """Make a module of its own and a configuration whose reward is the function ``reward`` in it."""
    monkeypatch.syspath_prepend(tmp_path)
    names = (f"{tmp_path.name.replace('-', '_')}_{number}" for number in range(99))

    def make(body: str, **reward: Any) -> Config:
        name = next(names)
        (tmp_path / f"{name}.py").write_text(IMPORTS + textwrap.dedent(body))
        parts = [{**part, "use": f"{name}:{part['use']}"} for part in reward.pop("parts", [])]
        kind = {"parts": parts} if parts else {"kind": f"{name}:reward"}
        return make_config(reward={"calls": {"retries": 0}, "overlong": {"soft_punishment": False}, **kind, **reward})

    return make


def module_of(config: Config) -> Any:
    return importlib.import_module(config.reward.uses[0].partition(":")[0])


def batch(n: int, k: int) -> tuple[list[Prompt], list[list[Completion]]]:
    """Prompts p0, p1, … with completions of the texts 0, 1, …"""
    prompts = [replace(make_prompt(f"p{i}"), row={"number": i}, messages=(("user", "hi"),)) for i in range(n)]
    return prompts, [[make_completion(text=str(j)) for j in range(k)] for _ in range(n)]


def rewards(groups: list[Group]) -> list[list[float]]:
    return [[sample.base_reward for sample in group.samples] for group in groups]


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [
        ("Verdict(True, '7', 'mine', 0.25)", Verdict(True, "7", "mine", 0.25)),
        ("Verdict(True, rule=enum.Enum('Rule', {'MINE': 'mine'}, type=str).MINE)", Verdict(True, rule="mine")),
        ("Verdict(np.bool_(True), np.str_('7'), 'mine', np.float64(0.25))", Verdict(True, "7", "mine", 0.25)),
        ("True", Verdict(True)),
        ("type('Mine', (Verdict,), {})(True)", Verdict(True)),  # whose class no checkpoint could load
        ("1.25", Verdict(True, value=1.25)),
        ("1", Verdict(False, value=1.0)),  # the middle of incorrect (−1) and correct (3) is not above it
        ("np.bool_(True)", Verdict(True)),
        ("__import__('torch').tensor(-2.0)", Verdict(False, value=-2.0)),
    ],
)
def test_a_verdict_has_plain_values_whatever_is_returned(config_of: MakeConfig, returned: str, wanted: Verdict) -> None:
    """torch refuses to load a checkpoint with anything else in it."""
    for arguments, result in (("p, c", returned), ("prompts, completions, rows", f"[{returned}] * len(rows)")):
        body = f"def reward({arguments}): return {result}"
        (group,) = Scorer(config_of(body, correct=3.0))(*batch(1, 1))
        verdict = group.samples[0].verdict
        assert verdict == wanted
        assert list(map(type, astuple(verdict))) == list(map(type, astuple(wanted)))


RESULTS = {  # of a function of a prompt's responses, and of one of a response
    "prompts, completions, rows": "[row['number'] * 10.0 + int(c.text) for c, row in zip(completions, rows)]",
    "prompt, completion, unit=10.0": "prompt.row['number'] * unit + int(completion.text)",
}


@pytest.mark.parametrize(("arguments", "calls"), [*zip(RESULTS, (5, 15), strict=True)])
@pytest.mark.parametrize(("how", "concurrency"), [("def", None), ("def", 3), ("async def", None), ("async def", 3)])
def test_calls_overlap_and_their_results_stay_in_order(
    config_of: MakeConfig, how: str, concurrency: int | None, arguments: str, calls: int
) -> None:
    """Each waits for the others: one after another they would wait forever."""
    together, sleep = (calls, "await asyncio.sleep") if how == "async def" else (1, "time.sleep")
    body = f"""
        begun, ended, at_once = [], [], []
        {how} reward({arguments}):
            begun.append(1)
            at_once.append(len(begun) - len(ended))
            {sleep}(0.02)  # in which others would come
            while len(begun) < {concurrency or together}: {sleep}(0.001)
            ended.append(1)
            return {RESULTS[arguments]}"""
    config = config_of(body, calls={"retries": 0, "concurrency": concurrency}, timeout=LIMIT)
    scorer = Scorer(config)
    assert rewards(scorer(*batch(5, 3))) == [[i * 10.0 + j for j in range(3)] for i in range(5)]
    assert len(module_of(config).begun) == calls
    assert scorer.take_counts() == {"calls": calls, "retried": 0, "failed": 0}
    assert scorer.take_counts()["calls"] == 0
    assert scorer([], []) == []
    with ThreadPoolExecutor(2) as threads:  # training and evaluation, which take turns
        list(threads.map(lambda each: each(*batch(5, 3)), [scorer, scorer.unshaped()]))
    assert max(module_of(config).at_once) <= (concurrency or together)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_failed_call_is_retried(config_of: MakeConfig, concurrency: int) -> None:
    body = """
        count = 0
        def reward(prompts, completions, rows):
            global count
            if rows[0]['number'] == 1:
                count += 1
                if count <= 1: raise ConnectionError('busy')
            return [1.0] * len(completions)"""
    scorer = Scorer(config_of(body, calls={"concurrency": concurrency, "retries": 2}))
    assert rewards(scorer(*batch(3, 2))) == [[1.0, 1.0]] * 3
    assert scorer.take_counts() == {"calls": 3, "retried": 1, "failed": 0}


FAILURES = {  # what a function does, and what the message has of it
    "raise ConnectionError('gone')": ("ConnectionError", "gone", ".py:5)"),
    "sys.exit(0)": ("SystemExit", ".py:5)"),
    "inner()": ("ZeroDivisionError", ".py:3)"),
    "return [1.0]": ("ValueError", "2", "1"),
    "return [1.0, float('nan')]": ("ValueError", "nan"),
    "return [Verdict(True, value=float('inf'))] * 2": ("ValueError", "inf"),
    "return [True, '1.0']": ("TypeError", "Verdict", "'1.0'"),
    "return [True, Verdict(0.1)]": ("TypeError", "correct=0.1"),  # a score in the first field, which is no score
    "return [True, Verdict('no')]": ("TypeError", "correct='no'"),
    "return [True, Verdict(None)]": ("TypeError", "correct=None"),
    "return 'ab'": ("TypeError", "str"),
    "return {1.0, 2.0}": ("TypeError", "set"),
    "return 1.0": ("TypeError", "float"),
}


@pytest.mark.parametrize("how", ["one after another", "threads", "async"])
@pytest.mark.parametrize("act", FAILURES)
def test_a_failure_ends_the_batch_and_is_never_a_reward_of_0(config_of: MakeConfig, act: str, how: str) -> None:
    prefix, calls = "async " * (how == "async"), {"retries": 0, "concurrency": 4 if how == "threads" else None}
    body = f"""def inner(): 1 / 0
{prefix}def reward(prompts, completions, rows):
    if rows[0]['number'] == 1: {act}
    return [1.0] * len(completions)"""
    prompts, completions = batch(3, 2)
    completions[1][0] = make_completion(text="it is\n" + "very " * 1000 + "good")
    config = config_of(body, calls=calls)
    with pytest.raises(RewardError) as caught:
        Scorer(config)(prompts, completions)
    message = str(caught.value)
    for part in (
        config.reward.kind,
        "prompt p1",
        "the first of 2 responses",
        r"it is\nvery",
        "very good",
        *FAILURES[act],
    ):
        assert part in message
    assert "\n" not in message
    assert len(message) < 1500
    scorer = Scorer(config_of(body, calls={**calls, "max_failed": 0.3}))
    assert [group and group.prompt.id for group in scorer(prompts, completions)] == ["p0", None, "p2"]
    assert scorer.take_counts() == {"calls": 3, "retried": 0, "failed": 1}
    (warning,) = scorer.take_warnings()
    assert "1 of 3" in warning
    assert scorer.take_warnings() == []
    with refused("reward.calls.max_failed=0.3", RewardError):  # of each of these, one may fail
        scorer(prompts[1:2] * 3, completions[1:2] * 3)
    with pytest.raises(RewardError):  # an evaluation must be complete
        scorer.unshaped()(prompts, completions)


HANGING = {
    "loops": "while True: pass",
    "backtracks": "re.match('(a+)+$', 'a' * 60 + 'b')",  # holds the interpreter's lock
    "joins a thread that hangs": """
        from concurrent.futures import Future, ThreadPoolExecutor
        with ThreadPoolExecutor() as pool: pool.submit(time.sleep, 4).result()
        return [0.0]""",
    "tries again": """
        for _ in range(3):
            try: time.sleep(60)
            except: pass
        return [0.0]""",
    "forgives": """
        try: time.sleep(60)
        except: return [0.0]""",
}


@pytest.mark.parametrize("how", [*HANGING, "async"])
def test_a_function_that_hangs_is_ended_at_its_timeout(config_of: MakeConfig, how: str) -> None:
    body = textwrap.indent(textwrap.dedent(HANGING.get(how, "await asyncio.sleep(60)")), "    ")
    config = config_of(f"{'async ' * (how == 'async')}def reward(prompts, completions, rows):\n{body}", timeout=0.2)
    before = signal.getsignal(signal.SIGALRM)
    with refused("reward.timeout", RewardError):
        Scorer(config)(*batch(1, 1))
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_deadline_holds_in_any_thread_and_leaves_nothing_behind(config_of: MakeConfig) -> None:
    """With `rollout.max_staleness` responses are scored beside the main thread, where no alarm comes."""
    config = config_of(
        "def reward(prompt, completion):\n    time.sleep(600 * prompt.row['number'])\n    return 1.0", timeout=1.0
    )
    (quick, slow), (completion, _) = batch(2, 1)
    with ThreadPoolExecutor(1) as threads:
        for score in (Scorer(config), lambda *both: threads.submit(Scorer(config), *both).result()):
            assert rewards(score([quick], [completion])) == [[1.0]]
            assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        with refused("reward.timeout", RewardError):
            score([slow], [completion])


def test_many_calls_take_no_longer_each_than_few(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, done = list[object](), Future.done
    monkeypatch.setattr(Future, "done", lambda future: (looked.append(future), done(future))[1])
    assert map_in_threads(abs, range(-500, 0), 3) == list(range(500, 0, -1))
    assert len(looked) < 500 * 10
    called: list[int] = []
    with pytest.raises(ZeroDivisionError):
        map_in_threads(lambda i: called.append(1 // (100 - i)), range(500), 3)
    assert len(called) < 110


def test_calls_after_one_that_blocks_the_event_loop_are_answered() -> None:
    over = threading.Event()

    async def block() -> None:
        over.wait(LIMIT)

    async def answer() -> int:
        return 7

    with pytest.raises(CallTimeoutError):
        call_with_timeout(0.2, block, is_async=True)
    assert call_with_timeout(LIMIT, answer, is_async=True) == 7
    over.set()


def test_one_event_loop_serves_every_batch_also_after_an_exit(config_of: MakeConfig) -> None:
    """Connections that a function keeps open belong to it."""
    body = """
        loops = set()
        async def reward(prompts, completions, rows):
            loops.add(asyncio.get_running_loop())
            if rows[0]['number'] == 9: raise SystemExit(3)
            return [1.0] * len(completions)"""
    config = config_of(body)
    http.LOOPS.pop("rewards", None)
    scorer = Scorer(config)
    scorer(*batch(2, 1))
    with pytest.raises(RewardError):
        scorer(*batch(10, 1))
    scorer(*batch(2, 1))
    assert len(module_of(config).loops) == 1


def test_requests_go_on_after_an_exit() -> None:
    async def leave() -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        http.start(leave()).result(20)
    assert http.start(asyncio.sleep(0, 7)).result(20) == 7


@pytest.mark.parametrize(("lost", "is_allowed"), [([[0, 1], [1, 0]], True), ([[0, 1], [1, 2]], False)])
def test_prompts_that_all_parts_lose_count_together(
    config_of: MakeConfig, lost: list[list[int]], is_allowed: bool
) -> None:
    """Of three prompts two may be lost."""
    given = "(prompt, completion): return 1.0 / (prompt.row['number'] not in"
    body = f"def one{given} {lost[0]})\ndef two{given} {lost[1]})\n"
    parts, calls = [{"use": "one"}, {"use": "two"}], {"retries": 0, "max_failed": 0.5}
    scorer = Scorer(config_of(body, parts=parts, calls=calls))
    with nullcontext() if is_allowed else refused("reward.calls.max_failed=0.5", RewardError):
        assert [group and group.prompt.id for group in scorer(*batch(3, 1))] == [None, None, "p2"]
    assert [warning[:6] for warning in scorer.take_warnings()] == ["2 of 3"] * is_allowed


def test_an_evaluation_ends_at_its_first_failure_and_names_no_setting(config_of: MakeConfig) -> None:
    config = config_of(
        "called = []\ndef reward(prompt, completion): called.append(1); 1 / 0",
        calls={"retries": 0, "max_failed": 0.9},
    )
    with pytest.raises(RewardError, match=r"^reward \w+:reward: ZeroDivisionError"):
        Scorer(config).unshaped()(*batch(9, 1))
    assert len(module_of(config).called) == 1


PARTS = """
def graded(prompts, completions, rows):
    return [int(c.text) / 4 for c in completions]
def odd(prompts, completions, rows):
    return [None if row['number'] else int(c.text) % 2 == 1 for c, row in zip(completions, rows)]
def nothing(prompts, completions, rows):
    return [None] * len(completions)
"""


def test_parts_are_added_by_weight_and_the_first_that_applies_decides_correctness(config_of: MakeConfig) -> None:
    scorer = Scorer(config_of(PARTS, parts=[{"use": "odd"}, {"use": "graded", "weight": 0.5, "name": "g"}]))
    groups = scorer(*batch(2, 3))
    assert rewards(groups) == [[-1.0, 1.125, -0.75], [0.0, 0.125, 0.25]]
    assert [sample.correct for group in groups for sample in group.samples] == [False, True, False, False, True, True]
    assert dict(groups[0].samples[1].parts) == {"odd": 1.0, "g": 0.25}
    assert dict(groups[1].samples[1].parts) == {"g": 0.25}
    counts = scorer.take_counts()
    assert counts["odd_seconds"] > 0 < counts["g_seconds"]
    with pytest.raises(RewardError, match=r"nothing.*p0.*reward\.parts"):
        Scorer(config_of(PARTS, parts=[{"use": "nothing"}]))(*batch(1, 1))


def test_sums_of_equal_rewards_are_equal(config_of: MakeConfig) -> None:
    """0.1 + 0.2 and 0.3 + 0: rounding does not make a group that is accepted, nor a preference pair."""
    given = "(prompts, completions, rows): return"
    body = f"def one{given} [0.1, 0.3]\ndef two{given} [0.2, 0.0]\n"
    (group,) = Scorer(config_of(body, parts=[{"use": "one"}, {"use": "two"}]))(*batch(1, 2))
    assert not group.has_varying_reward


@pytest.mark.parametrize("how", ["def", "async def"])
def test_functions_of_trl_work_through_one_line(config_of: MakeConfig, how: str) -> None:
    body = f"""
        from dapo_runner.rewards.trl import from_trl
        {how} length(completions, prompts, completion_ids, number, **columns):
            assert [len(ids) for ids in completion_ids] == [4] * len(completions)
            return [None if n == 1 else float(len(text)) for text, n in zip(completions, number, strict=True)]
        {how} said(completions, prompts, **columns):
            assert prompts[0] == [{{'role': 'user', 'content': 'hi'}}]
            return [float(c[0]['content'] == '1') for c in completions]
        reward, length, said = length, from_trl(length), from_trl(said, chat=True)"""
    scorer = Scorer(config_of(body, parts=[{"use": "length"}, {"use": "said"}]))
    assert rewards(scorer(*batch(2, 2))) == [[1.0, 2.0], [0.0, 1.0]]
    for config in (config_of(body), make_config(reward={"kind": "nowhere:f"}), make_config(reward={"kind": "json:f"})):
        with refused("reward.kind"):
            Scorer(config)
    for mistake, named in (("def reward(:", "SyntaxError"), ("reward = 1 / 0", "ZeroDivisionError")):
        with refused("reward.kind", parts=[named, ".py"]):
            Scorer(config_of(mistake))


@pytest.mark.parametrize(
    "signature",
    [
        "completions, prompts, rows",
        "prompts, completions",
        "completion, rows",
        "completion, prompt",
        "a, b, c",
        "a, b, c, d",
    ],
)
def test_arguments_that_a_function_cannot_be_called_with(config_of: MakeConfig, signature: str) -> None:
    config = config_of(f"def reward({signature}): return 1.0")
    with refused("reward.kind", parts=["(prompts, completions, rows)", f"({signature})"]):
        Scorer(config)
    with refused("reward.kind", parts=["(prompts, completions, rows)"]):  # a class would make an object for each call
        Scorer(config_of("class reward:\n    def __init__(self, prompt=None, completion=None): ..."))


# Runs

# Judges at random, as exact resume has to bear, and fails at its ``bomb``-th call.
FRAGILE = """
import random
calls, bomb = 0, -1
def judge(prompt, completion):
    global calls
    calls += 1
    if calls == bomb:
        raise ConnectionError("the server is gone")
    return random.random() - 0.5
def short(prompts, completions, rows):
    return [-c.length / 16 for c in completions]
"""


def test_a_run_loses_no_step_to_a_reward_that_fails_and_resumes_exactly(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to lose every step since the last checkpoint; here there is none but the one that the failure makes."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fragile.py").write_text(FRAGILE)
    module = importlib.import_module("fragile")
    parts = [{"use": "dapo"}, {"use": "fragile:judge"}, {"use": "fragile:short", "weight": 0.5}]
    begins: list[int] = []

    class Watch(Progress):
        def step(self, *_: object) -> None:
            begins.append(module.calls + 1)

    def config_named(name: str) -> Config:
        run, sampler = {"name": name, "steps": 3, "save_every": 0}, {"filter_groups": "reward"}
        reward = {"calls": {"retries": 0}, "parts": parts}
        return config_in(tmp_path, model_folder, run=run, sampler=sampler, reward=reward)

    whole = train(config_named("whole"), Watch())
    heldout = 10 * 2  # problems, samples of each; step 2 is evaluated before step 3 begins
    for number, saved in ((heldout + 2, []), (begins[1] + 3, [2]), (begins[1] + heldout + 1, [2])):
        module.calls, module.bomb = 0, number
        config = config_named(f"broken_{number}")
        with pytest.raises(RewardError) as caught:
            train(config, Progress())
        assert "fragile:judge" in str(caught.value)
        assert [found.step for found in find_checkpoints(config.run_dir / CHECKPOINTS)] == saved
    module.bomb = -1
    resumed = train(config, Progress())
    assert (resumed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    evaluation, step, *_ = read_jsonl(whole / "metrics.jsonl")
    total = step["reward/dapo"] + step["reward/judge"] + 0.5 * step["reward/short"] + step["batch/length_penalty"]
    assert step["batch/reward"] == pytest.approx(total)
    assert step["batch/groups"] == 4  # filtered by reward: one at random keeps them all
    total = evaluation["eval/reward_dapo"] + evaluation["eval/reward_judge"] + 0.5 * evaluation["eval/reward_short"]
    assert evaluation["eval/reward"] == pytest.approx(total)
    first, *_ = events_of(whole, file="timings.jsonl")
    assert first["reward/short_calls"] > 0 == first["reward/short_failed"]
