"""Reward functions of a batch: what they are given, how their calls overlap, and what becomes of those that fail."""

from __future__ import annotations

import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import make_completion, make_config, make_prompt
from small import small_recipe

from dapo_runner.config import Config, ConfigError, parse_config
from dapo_runner.logging.metrics import read_log
from dapo_runner.logging.progress import Progress
from dapo_runner.rewards import reward as rewards_module
from dapo_runner.rewards.reward import DeadlineError, RewardError, call_within
from dapo_runner.rewards.scoring import Scorer, load_reward
from dapo_runner.train import train
from dapo_runner.types import Completion, Group, Prompt, Verdict


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that functions are imported from; retries do not wait long."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(rewards_module, "PAUSE", 0.01)
    return tmp_path


def config_of(folder: Path, name: str, body: str, calls: dict[str, Any] | None = None, **reward: Any) -> Config:
    """One whose reward is the function ``reward`` of a module of that name."""
    start = "import asyncio, random, time\nfrom dapo_runner.types import Verdict\ncount = 0\n"
    (folder / f"{name}.py").write_text(start + textwrap.dedent(body))
    kind = {} if "parts" in reward else {"kind": f"{name}:reward"}
    return make_config(reward={**kind, "calls": calls or {}, "overlong": {"soft_punishment": False}, **reward})


def batch(n: int, k: int) -> tuple[list[Prompt], list[list[Completion]]]:
    """Prompts p0, p1, … with completions of the texts 0, 1, …"""
    prompts = [replace(make_prompt(f"p{i}"), row={"number": i}) for i in range(n)]
    return prompts, [[make_completion(text=str(j)) for j in range(k)] for _ in range(n)]


def rewards(groups: list[Group]) -> list[list[float]]:
    return [[sample.base_reward for sample in group.samples] for group in groups]


ADD = "[float(row['number'] * 10 + int(c.text)) for p, c, row in zip(prompts, completions, rows, strict=True)]"


@pytest.mark.parametrize("concurrency", [None, 3])
@pytest.mark.parametrize("how", ["def", "async def"])
def test_a_batch_is_judged_in_order(modules: Path, how: str, concurrency: int | None) -> None:
    config = config_of(
        modules,
        f"adds_{how[0]}_{concurrency}",
        f"""
        sizes = []
        {how} reward(prompts, completions, rows):
            sizes.append(len(rows))
            return {ADD}""",
        calls={"concurrency": concurrency},
    )
    scorer = Scorer(config)
    expected = [[i * 10.0 + j for j in range(3)] for i in range(5)]
    assert rewards(scorer(*batch(5, 3))) == expected
    sizes = __import__(config.reward.kind.partition(":")[0]).sizes
    assert sizes == [3] * 5
    assert scorer.take_counts() == {"calls": 5, "retried": 0, "failed": 0}
    assert scorer.take_counts()["calls"] == 0
    assert scorer([], []) == []


@pytest.mark.parametrize(
    ("name", "body", "concurrency"),
    [
        ("waits", "async def reward(p, c, r):\n    await asyncio.sleep(0.1)\n    return [1.0] * len(c)", None),
        ("sleeps", "def reward(p, c, r):\n    time.sleep(0.1)\n    return [1.0] * len(c)", 64),
    ],
)
def test_a_slow_reward_is_overlapped(modules: Path, name: str, body: str, concurrency: int | None) -> None:
    """512 calls of 0.1 s, 64 at a time: 0.8 s where one after another would take 51."""
    scorer = Scorer(config_of(modules, name, body, calls={"concurrency": concurrency}))
    start = time.monotonic()
    groups = scorer(*batch(512, 2))
    assert len(groups) == 512
    assert 0.8 <= time.monotonic() - start < 25


FLAKY = """
def reward(prompts, completions, rows):
    global count
    count += 1
    if rows[0]['number'] in {broken} and count <= {until}:
        raise ConnectionError('busy')
    return [1.0] * len(completions)
"""


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_failed_call_is_tried_again(modules: Path, concurrency: int) -> None:
    body = FLAKY.format(broken={1}, until=3)
    scorer = Scorer(config_of(modules, f"flaky_{concurrency}", body, calls={"concurrency": concurrency}))
    assert rewards(scorer(*batch(3, 2))) == [[1.0, 1.0]] * 3
    counts = scorer.take_counts()
    assert counts["failed"] == 0
    assert counts["retried"] >= 1


@pytest.mark.parametrize("how", ["plain", "threads", "async"])
@pytest.mark.parametrize("what", ["raises", "late", "short", "nan", "text", "number"])
def test_a_failure_ends_the_batch_and_is_never_a_zero(modules: Path, how: str, what: str) -> None:
    wait = "await asyncio.sleep" if how == "async" else "time.sleep"
    act, reason = {
        "raises": ("raise ConnectionError('gone')", r"ConnectionError: gone \(fails_\w+\.py:6\)"),
        "late": (f"{wait}(3)", r"no answer within 0\.2 s \(reward\.plugin_deadline"),
        "short": ("return [1.0]", "expected 2 rewards, one for each completion, got 1"),
        "nan": ("return [1.0, float('nan')]", "expected a finite reward, got nan"),
        "text": ("return 'ab'", "expected a list of 2 rewards, got str"),
        "number": ("return 1.0", "expected a list of 2 rewards, got float"),
    }[what]
    body = f"""
{"async " if how == "async" else ""}def reward(prompts, completions, rows):
    if rows[0]['number'] == 1: {act}
    return [1.0] * len(completions)"""
    name, calls = f"fails_{how}_{what}", {"retries": 1, "concurrency": 4 if how == "threads" else None}
    with pytest.raises(RewardError, match=reason) as caught:
        Scorer(config_of(modules, name, body, calls, plugin_deadline=0.2))(*batch(3, 2))
    assert "prompt p1: " in str(caught.value)
    assert f"reward {name}:reward: " in str(caught.value)
    allowed = config_of(modules, name, body, {**calls, "max_failed": 0.3}, plugin_deadline=0.2)
    scorer = Scorer(allowed)
    groups = [group for group in scorer(*batch(3, 2)) if group is not None]
    assert [group.prompt.id for group in groups] == ["p0", "p2"]
    assert scorer.take_counts() == {"calls": 3, "retried": 1, "failed": 1}
    (warning,) = scorer.take_warnings()
    assert "1 of 3" in warning
    assert f"reward {name}:reward: " in warning
    assert scorer.take_warnings() == []
    with pytest.raises(RewardError):  # an evaluation is whole
        scorer.unshaped()(*batch(3, 2))


def test_connections_outlive_a_batch_and_leaving_does_not_end_the_loop(modules: Path) -> None:
    body = """
loops = set()
async def reward(prompts, completions, rows):
    loops.add(asyncio.get_running_loop())
    if rows[0]['number'] == 9: raise SystemExit(3)
    return [1.0] * len(completions)"""
    scorer = Scorer(config_of(modules, "keeps", body, calls={"retries": 0}))
    for _ in range(2):
        scorer(*batch(2, 1))
    with pytest.raises(RewardError, match="SystemExit: 3"):
        scorer(*batch(10, 1))
    scorer(*batch(2, 1))
    assert len(__import__("keeps").loops) == 1


PARTS = """
def graded(prompts, completions, rows):
    return [int(c.text) / 4 for c in completions]
def odd(prompts, completions, rows):
    return [None if row['number'] else int(c.text) % 2 == 1 for c, row in zip(completions, rows)]
def nothing(prompts, completions, rows):
    return [None] * len(completions)
"""


def test_parts_add_up_by_weight_and_the_first_that_applies_says_what_is_right(modules: Path) -> None:
    parts = [{"use": "several:odd"}, {"use": "several:graded", "weight": 0.5, "name": "g"}]
    scorer = Scorer(config_of(modules, "several", PARTS, parts=parts))
    groups = scorer(*batch(2, 3))
    assert rewards(groups) == [[-1.0, 1.125, -0.75], [0.0, 0.125, 0.25]]
    assert [sample.correct for group in groups for sample in group.samples] == [False, True, False, False, True, True]
    assert dict(groups[0].samples[1].parts) == {"odd": 1.0, "g": 0.25}
    assert dict(groups[1].samples[1].parts) == {"g": 0.25}
    counts = scorer.take_counts()
    assert counts["odd_seconds"] > 0 < counts["g_seconds"]
    with pytest.raises(RewardError, match=r"several:nothing: .*p0"):
        Scorer(config_of(modules, "several", PARTS, parts=[{"use": "several:nothing"}]))(*batch(1, 1))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"parts": [{"use": "magic"}]}, r"reward\.parts\.0\.use: .*magic"),
        ({"parts": [{"use": "a:f"}, {"use": "b:f"}]}, r"reward.*parts: .*f, f"),
        ({"parts": [{"use": "a:f"}], "kind": "math"}, r"reward.*kind: "),
        ({"parts": [{"use": "a:f", "wieght": 1}]}, r"reward\.parts\.0\.wieght: .*'weight'"),
        ({"calls": {"max_failed": 1.0}}, r"reward\.calls\.max_failed: "),
    ],
)
def test_mistakes_in_parts_are_named(reward: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(reward=reward)


def test_a_function_of_trl_is_told_what_to_do(modules: Path) -> None:
    config = config_of(modules, "theirs", "def reward(prompts, completions, answer, **kwargs): return [0.0]")
    with pytest.raises(ConfigError, match=r"from_trl"):
        load_reward(config.reward, config.reward.kind)


def test_an_async_function_of_one_response_is_overlapped(modules: Path) -> None:
    body = "async def reward(prompt, completion):\n    await asyncio.sleep(0.1)\n    return float(completion.text)"
    start = time.monotonic()
    assert rewards(Scorer(config_of(modules, "single", body))(*batch(4, 64))) == [[float(j) for j in range(64)]] * 4
    assert time.monotonic() - start < 12  # of the 25.6 that they take one after the other


@pytest.mark.parametrize("how", ["def", "async def"])
def test_functions_of_trl_work_through_one_line(modules: Path, how: str) -> None:
    body = f"""
from dapo_runner.rewards.trl import from_trl
{how} length(completions, prompts, completion_ids, number, **columns):
    assert [len(ids) for ids in completion_ids] == [4] * len(completions)
    return [None if n == 1 else float(len(text)) for text, n in zip(completions, number, strict=True)]
{how} said(completions, prompts, **columns):
    assert prompts[0] == [{{'role': 'user', 'content': 'hi'}}]
    return [float(c[0]['content'] == '1') for c in completions]
length, said = from_trl(length), from_trl(said, chat=True)"""
    name = f"trl_{how[0]}"
    parts = [{"use": f"{name}:length"}, {"use": f"{name}:said"}]
    prompts, completions = batch(2, 2)
    prompts = [replace(prompt, messages=(("user", "hi"),)) for prompt in prompts]
    groups = Scorer(config_of(modules, name, body, parts=parts))(prompts, completions)
    assert rewards(groups) == [[1.0, 2.0], [0.0, 1.0]]


DRAWS = """
def reward(prompts, completions, rows):
    return [random.random() for _ in completions]
def short(prompts, completions, rows):
    return [Verdict(True, value=-c.length / 16) for c in completions]
"""


def test_a_run_with_parts_resumes_exactly_and_logs_each(modules: Path) -> None:
    parts = [{"use": "dapo"}, {"use": "draws:reward"}, {"use": "draws:short", "weight": 0.5}]
    config_of(modules, "draws", DRAWS, parts=parts)

    def run(name: str, steps: int) -> Path:
        raw = small_recipe(output_dir=str(modules), name=name, steps=steps, save_every=0)
        raw["reward"]["parts"] = parts
        return train(parse_config(raw), Progress())

    whole = run("whole", 4)
    run("resumed", 2)
    assert (run("resumed", 4) / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    evaluation, *events = read_log(whole / "metrics.jsonl")
    for step in (event for event in events if event["kind"] == "step"):
        total = step["reward/dapo"] + step["reward/reward"] + 0.5 * step["reward/short"] + step["batch/length_penalty"]
        assert step["batch/reward"] == pytest.approx(total)
        assert step["reward/reward_std"] > 0
        assert step["batch/groups"] == 4  # kept by spread: a reward by lot keeps them all
    total = evaluation["eval/reward_dapo"] + evaluation["eval/reward_reward"] + 0.5 * evaluation["eval/reward_short"]
    assert evaluation["eval/reward"] == pytest.approx(total)
    first = next(event for event in read_log(whole / "timings.jsonl") if event["kind"] == "step")
    assert first["reward/short_seconds"] > 0
    assert first["reward/short_calls"] > 0 == first["reward/short_failed"]


def test_a_verdict_survives_a_checkpoint(modules: Path) -> None:
    body = "def reward(p, c, r):\n    import numpy as np\n    return np.asarray([0.25] * len(c))"
    groups = Scorer(config_of(modules, "arrays", body))(*batch(1, 2))
    assert groups[0].samples[0].verdict == Verdict(True, value=0.25)
    assert type(groups[0].samples[0].base_reward) is float


def test_calls_after_one_that_blocks_the_event_loop_are_answered() -> None:
    over = threading.Event()

    async def blocks() -> None:
        over.wait(60)

    async def answers() -> int:
        return 7

    with pytest.raises(DeadlineError):
        call_within(0.2, blocks, is_async=True)
    assert call_within(30, answers, is_async=True) == 7
    over.set()
