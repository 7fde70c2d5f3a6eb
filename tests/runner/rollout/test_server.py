"""The server engine over servers that fail: what counts is what it would have been had none failed, and no wait is
without its end.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_server import GENERATE, UPDATE, FakeServer
from served import PROMPTS, SAMPLING, hang, moved, open_engine, told
from small import small_recipe

from dapo_runner.config import ConfigError, parse_config
from dapo_runner.logging.metrics import read_log
from dapo_runner.logging.progress import Progress
from dapo_runner.policy.model import Policy
from dapo_runner.rollout import pool
from dapo_runner.rollout import server as server_module
from dapo_runner.rollout.client import RolloutError
from dapo_runner.rollout.server import ServerEngine
from dapo_runner.train import train
from dapo_runner.types import SamplingParams


def test_which_server_answers_makes_no_difference(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy
) -> None:
    both = open_engine(model_folder, servers, tmp_path)
    found = told(both.generate(PROMPTS, SAMPLING))
    assert all(server.seen(GENERATE) for server in servers)
    assert len({str(group) for group in found}) == len(PROMPTS)  # equal prompts do not share their dice
    shifted = [SamplingParams(n=2, max_tokens=6, seed=5, index=place) for place in range(12, 24)]
    assert told(both.generate(PROMPTS[12:], shifted)) == found[12:]  # nor does the call that a prompt is asked in
    both.close()
    one = open_engine(model_folder, servers[:1], tmp_path)
    one.update_weights(policy.named_weights())
    assert told(one.generate(PROMPTS, SAMPLING)) == found
    (greedy,) = one.generate(PROMPTS[:1], SamplingParams(n=3, temperature=0.0, max_tokens=6))
    assert told([greedy]) == [[told([greedy])[0][0]] * 3]
    assert greedy[0].text == one.tokenizer.decode(greedy[0].token_ids.tolist(), skip_special_tokens=True)


def test_servers_killed_and_restarted_at_ten_random_moments(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost, nothing comes twice, and nothing of the weights that a server came back with."""
    monkeypatch.setattr(server_module, "ATTEMPTS", 20)
    engine = open_engine(model_folder, servers, tmp_path)
    engine.update_weights(moved(policy).items())
    wanted = told(engine.generate(PROMPTS, SAMPLING))
    dice, over = random.Random(1), threading.Event()
    for server in servers:
        server.hooks[GENERATE] = lambda body: time.sleep(0.02)

    def chaos() -> None:
        for _ in range(10):
            time.sleep(dice.uniform(0.01, 0.08))
            victim = dice.choice(servers)
            victim.kill()
            time.sleep(dice.uniform(0, 0.08))
            victim.start()
        over.set()

    thread = threading.Thread(target=chaos)
    thread.start()
    rounds = 0
    while not over.is_set() or not rounds:
        assert told(engine.generate(PROMPTS, SAMPLING)) == wanted
        rounds += 1
    thread.join()
    assert any("is back" in note for note in engine.notes)


def test_an_answer_of_other_weights_does_not_count(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy
) -> None:
    engine = open_engine(model_folder, servers, tmp_path)
    wanted = told(engine.generate(PROMPTS, SAMPLING))
    servers[0].engine.update_weights(moved(policy).items())  # by somebody else
    servers[0].version = "other:1"
    back = threading.Event()  # the other must not have answered everything before this one is asked
    servers[0].hooks[GENERATE] = lambda body: back.set() if servers[0].version != "other:1" else None
    servers[1].hooks[GENERATE] = hang(back)
    assert told(engine.generate(PROMPTS, SAMPLING)) == wanted
    assert servers[0].version == engine.transfer.version
    assert "other:1" in engine.notes[0]


def test_a_server_that_was_away_answers_with_the_weights_of_now(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy
) -> None:
    engine = open_engine(model_folder, servers, tmp_path)
    servers[1].kill()
    engine.update_weights(moved(policy).items())
    wanted = told(engine.generate(PROMPTS, SAMPLING))
    servers[1].start()
    servers[1].paused = servers[1].updating = True  # and as a trainer that was killed has left it
    servers[0].kill()
    assert told(engine.generate(PROMPTS, SAMPLING)) == wanted
    assert servers[1].version == engine.transfer.version


@pytest.mark.parametrize("path", [GENERATE, "/health"])
def test_a_server_that_hangs_is_left_out(
    path: str, model_folder: Path, servers: list[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its deadline, or by its health, which does not wait for that."""
    monkeypatch.setattr(server_module, "ATTEMPTS", 99)
    monkeypatch.setattr(pool, "RENEW", 0.3)
    if path != GENERATE:
        monkeypatch.setattr(pool, "HEALTH_WITHIN", 0.5)
    within = {"answer_within": 1.0} if path == GENERATE else {}
    engine = open_engine(model_folder, servers, tmp_path, **within)
    wanted = told(engine.generate(PROMPTS, SAMPLING))
    hung = threading.Event()

    def hang_with_prompts(body: dict[str, Any]) -> None:
        servers[0].hooks[path] = hang(hung)
        hung.wait(60)

    servers[0].hooks[GENERATE] = hang_with_prompts
    servers[1].hooks[GENERATE] = lambda body: time.sleep(0.05)  # leaves some to the other
    began = time.monotonic()
    assert told(engine.generate(PROMPTS, SAMPLING)) == wanted
    assert time.monotonic() - began < 15
    assert any(f"{path}: no answer within" in note for note in engine.notes)
    hung.set()


def test_a_wait_for_nobody_ends_and_says_for_whom(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy
) -> None:
    engine = open_engine(model_folder, servers, tmp_path, sync_within=1.0)
    hung = threading.Event()
    for server in servers:
        server.hooks[UPDATE] = hang(hung)
    with pytest.raises(RolloutError, match=r"weights \w+:2 .*collective_rpc"):
        engine.update_weights(policy.named_weights())
    hung.set()
    for server in servers:
        server.kill()
    with pytest.raises(RolloutError, match=r"24 of 24 prompts .*`dapo serve RECIPE`"):
        engine.generate(PROMPTS, SAMPLING)
    with pytest.raises(RolloutError, match=r"weights \w+:1 "):
        open_engine(model_folder, servers, tmp_path, sync_within=0.5)


def test_a_prompt_that_breaks_every_server_ends_the_run(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "ATTEMPTS", 3)
    engine = open_engine(model_folder, servers, tmp_path)
    poison = list(PROMPTS[7].token_ids)
    for server in servers:
        server.hooks[GENERATE] = lambda body: (500, {"error": "dead"}) if body["token_ids"] == poison else None
    with pytest.raises(RolloutError, match=r"3 times .*HTTP 500"):
        engine.generate(PROMPTS, SAMPLING)
    for server in servers:
        assert sum(body.get("token_ids") == poison for _, body, _ in server.asked) == 3


@pytest.mark.parametrize("status", [400, 401])
def test_what_every_server_refuses_ends_the_run(
    status: int, model_folder: Path, servers: list[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    monkeypatch.setattr(server_module, "ATTEMPTS", 2)
    engine = open_engine(model_folder, servers[:1], tmp_path, key_env="MY_KEY")
    refused = list(PROMPTS[0].token_ids)
    servers[0].hooks[GENERATE] = lambda body: (
        (status, {"error": "no, Bearer s3cret"}) if body["token_ids"] == refused else None
    )
    with pytest.raises(RolloutError, match=rf"/inference/v1/generate: HTTP {status} .*Bearer \*\*\*"):
        engine.generate(PROMPTS[:1], SAMPLING)
    assert sum(body.get("token_ids") == refused for _, body, _ in servers[0].asked) == (1 if status == 401 else 2)
    assert all(headers["Authorization"] == "Bearer s3cret" for *_, headers in servers[0].asked)
    engine.close()
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match="MY_KEY"):
        open_engine(model_folder, servers[:1], tmp_path, key_env="MY_KEY")


BROKEN: list[dict[str, Any]] = [
    {"logprobs": None},
    {"logprobs": {"content": []}},
    {"weight_versions": None},
    {"finish_reason": "abort"},
    {"token_ids": []},
    {"index": 0},
]


@pytest.mark.parametrize("broken", BROKEN, ids=str)
def test_an_answer_that_is_not_whole_is_asked_for_again(
    broken: dict[str, Any], model_folder: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    engine = open_engine(model_folder, servers[:1], tmp_path)
    wanted = told(engine.generate(PROMPTS[:4], SAMPLING))
    once = iter([True])

    def spoil(body: dict[str, Any]) -> tuple[int, Any] | None:
        if next(once, False):
            answer = servers[0].generate(body)
            answer["choices"][1] |= broken
            return 200, answer
        return None

    servers[0].hooks[GENERATE] = spoil
    assert told(engine.generate(PROMPTS[:4], SAMPLING)) == wanted
    assert [servers[0].url in note for note in engine.notes] == [True, True]  # excluded, and back


def test_a_response_of_weights_from_before_the_call_is_asked_for_again(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy
) -> None:
    engine = open_engine(model_folder, servers[:1], tmp_path)
    engine.update_weights(policy.named_weights())
    earlier = servers[0].version
    engine.update_weights(policy.named_weights())
    assert earlier is not None
    assert servers[0].version not in (None, earlier)
    wanted = told(engine.generate(PROMPTS[:4], SAMPLING))
    once = iter([True])

    def answer_as_before(body: dict[str, Any]) -> tuple[int, Any] | None:
        if not next(once, False):
            return None
        answer = servers[0].generate(body)
        answer["choices"][1]["weight_versions"][0]["version"] = earlier
        return 200, answer

    servers[0].hooks[GENERATE] = answer_as_before
    assert told(engine.generate(PROMPTS[:4], SAMPLING)) == wanted
    assert [servers[0].url in note for note in engine.notes] == [True, True]  # excluded, and back


def test_weights_that_do_not_fit_are_refused(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy
) -> None:
    engine = open_engine(model_folder, servers, tmp_path)
    version, weights = engine.transfer.version, dict(policy.named_weights())
    with pytest.raises(ValueError, match="'extra'"):
        engine.update_weights({**weights, "extra": torch.ones(1)}.items())
    assert (engine.transfer.version, servers[0].version) == (version, version)
    assert engine.generate(PROMPTS[:2], SAMPLING)


def resident() -> float:
    """MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_two_hundred_syncs_leave_nothing_behind(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy
) -> None:
    engine = open_engine(model_folder, servers[:1], tmp_path)

    def sync(engine: ServerEngine, times: int) -> tuple[float, int, int]:
        for _ in range(times):
            engine.update_weights(policy.named_weights())
            servers[0].asked.clear()
        return resident(), threading.active_count(), len(os.listdir("/proc/self/fd"))

    before, *held = sync(engine, 10)
    after, *still_held = sync(engine, 200)
    assert after - before < 4
    assert still_held <= [count + 2 for count in held]  # connections that the server is just closing
    assert len(list(engine.transfer.folder.glob("*.safetensors"))) == 1
    folder = engine.transfer.folder
    engine.close()
    assert not folder.exists()


def test_a_step_that_is_given_up_waits_for_no_server(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    engine, hung = open_engine(model_folder, servers, tmp_path), threading.Event()
    for server in servers:
        server.hooks[GENERATE] = hang(hung)

    def give_up(*_: Any) -> None:
        raise InterruptedError("enough")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    began = time.monotonic()
    try:
        with pytest.raises(InterruptedError, match="enough"):
            engine.generate(PROMPTS, SAMPLING)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 5
    assert not engine.calls
    hung.set()


def test_a_whole_run_over_servers_that_come_and_go(
    tmp_path: Path, model_folder: Path, servers: list[FakeServer]
) -> None:
    """The figures of the run whose servers stayed, over servers that still have that one's weights."""

    def run(name: str) -> list[dict[str, Any]]:
        raw = small_recipe(output_dir=str(tmp_path / name), steps=2, eval_every=0)
        raw["model"] = {"dtype": "float32", "path": str(model_folder)}
        raw["sampler"] |= {"filter_groups": False}
        urls = [server.url for server in servers]
        raw["rollout"] |= {
            "max_response_tokens": 6,
            "engine": "server",
            "server": {"urls": urls, "folder": str(tmp_path)},
        }
        events = read_log(train(parse_config(raw), Progress()) / "metrics.jsonl")
        return [event for event in events if event["kind"] == "step"]

    whole = run("whole")
    count = iter(range(1000))

    def kill_now_and_then(body: dict[str, Any]) -> None:
        if next(count) % 5 == 3 and servers[1].alive:
            servers[1].kill()
            threading.Timer(0.02, servers[1].start).start()

    servers[0].hooks[GENERATE] = kill_now_and_then
    assert run("again") == whole
    assert next(count) > 5
    assert all(step["sync/gap"] < 1e-5 and step["train/tokens"] > 0 for step in whole)
