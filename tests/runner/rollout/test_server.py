"""The server engine over servers that fail: what counts is what it would have been had none failed, and no wait is
without its end.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_server import GENERATE, UPDATE
from served import PROMPTS, SAMPLING, Fleet, hang, moved, spoiling, steps_of, told, wait_until

from dapo_runner.config import ConfigError
from dapo_runner.http import run
from dapo_runner.policy.model import Policy
from dapo_runner.rollout import pool
from dapo_runner.rollout import server as server_module
from dapo_runner.rollout.client import RolloutError
from dapo_runner.rollout.server import ServerEngine
from dapo_runner.run.tiny_model import make_tokenizer
from dapo_runner.types import SamplingParams


def test_which_server_answers_makes_no_difference(fleet: Fleet, policy: Policy) -> None:
    both = fleet.open()
    found = told(both.generate(PROMPTS, SAMPLING))
    assert all(server.seen(GENERATE) for server in fleet.servers)
    assert len({str(group) for group in found}) == len(PROMPTS)  # equal prompts do not share their dice
    shifted = [SamplingParams(n=2, max_tokens=6, seed=5, index=place) for place in range(12, 24)]
    assert told(both.generate(PROMPTS[12:], shifted)) == found[12:]  # nor does the call that a prompt is asked in
    both.close()
    one = fleet.open(1)
    one.update_weights(policy.named_weights())
    assert told(one.generate(PROMPTS, SAMPLING)) == found
    (greedy,) = one.generate(PROMPTS[:1], SamplingParams(n=3, temperature=0.0, max_tokens=6))
    assert told([greedy]) == [[told([greedy])[0][0]] * 3]
    assert greedy[0].text == one.tokenizer.decode(greedy[0].token_ids.tolist(), skip_special_tokens=True)


def test_servers_killed_and_restarted_at_ten_random_moments(
    fleet: Fleet, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost, nothing comes twice, and nothing of the weights that a server came back with."""
    monkeypatch.setattr(server_module, "ATTEMPTS", 20)
    engine = fleet.open()
    engine.update_weights(moved(policy).items())
    wanted = told(engine.generate(PROMPTS, SAMPLING))
    dice, over = random.Random(1), threading.Event()
    fleet.hook(lambda body: time.sleep(0.02))

    def chaos() -> None:
        for _ in range(10):
            time.sleep(dice.uniform(0.01, 0.08))
            victim = dice.choice(fleet.servers)
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


def test_an_answer_of_other_weights_does_not_count(fleet: Fleet, policy: Policy) -> None:
    engine = fleet.open()
    wanted = told(engine.generate(PROMPTS, SAMPLING))
    fleet[0].engine.update_weights(moved(policy).items())  # by somebody else
    fleet[0].version = "other:1"
    back = threading.Event()  # the other must not have answered everything before this one is asked
    fleet[0].hooks[GENERATE] = lambda body: back.set() if fleet[0].version != "other:1" else None
    fleet[1].hooks[GENERATE] = hang(back)
    assert told(engine.generate(PROMPTS, SAMPLING)) == wanted
    assert fleet[0].version == engine.transfer.version
    assert "other:1" in engine.notes[0]


def test_a_server_that_was_away_answers_with_the_weights_of_now(fleet: Fleet, policy: Policy) -> None:
    engine = fleet.open()
    fleet[1].kill()
    engine.update_weights(moved(policy).items())
    wanted = told(engine.generate(PROMPTS, SAMPLING))
    fleet[1].start()
    fleet[1].paused = fleet[1].updating = True  # and as a trainer that was killed has left it
    fleet[0].kill()
    assert told(engine.generate(PROMPTS, SAMPLING)) == wanted
    assert fleet[1].version == engine.transfer.version


def test_a_paused_server_with_the_present_weights_is_resumed(fleet: Fleet) -> None:
    """It was lost between its new weights and their last request."""
    engine = fleet.open(1)
    fleet[0].paused = True
    assert run(engine.transfer.send(engine.pool.servers[0])) == engine.transfer.version
    assert not fleet[0].paused


@pytest.mark.parametrize("path", [GENERATE, "/health"])
def test_a_server_that_hangs_is_left_out(path: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its deadline, or by its health, which does not wait for that."""
    monkeypatch.setattr(server_module, "ATTEMPTS", 99)
    monkeypatch.setattr(pool, "RENEW", 0.3)
    if path != GENERATE:
        monkeypatch.setattr(pool, "HEALTH_WITHIN", 0.5)
    engine = fleet.open(**({"answer_within": 1.0} if path == GENERATE else {}))
    wanted = told(engine.generate(PROMPTS, SAMPLING))

    def hang_with_prompts(body: dict[str, Any]) -> None:
        fleet[0].hooks[path] = fleet.hang
        fleet.hang(body)

    fleet[0].hooks[GENERATE] = hang_with_prompts
    began = time.monotonic()
    assert told(engine.generate(PROMPTS, SAMPLING)) == wanted
    assert time.monotonic() - began < 30  # of the sixty that it hangs for
    assert any(f"{path}: no answer within" in note for note in engine.notes)


def test_a_wait_for_nobody_ends_and_says_for_whom(fleet: Fleet, policy: Policy) -> None:
    engine = fleet.open(sync_within=1.0)
    fleet.hook(fleet.hang, UPDATE)
    with pytest.raises(RolloutError, match=r"weights \w+:2 .*collective_rpc"):
        engine.update_weights(policy.named_weights())
    fleet.over.set()
    for server in fleet.servers:
        server.kill()
    with pytest.raises(RolloutError, match=r"24 of 24 "):
        engine.generate(PROMPTS, SAMPLING)
    with pytest.raises(RolloutError, match=r"weights \w+:1 "):
        fleet.open(sync_within=0.5)


def test_a_prompt_that_breaks_every_server_ends_the_run(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "ATTEMPTS", 3)
    engine, poison = fleet.open(), list(PROMPTS[7].token_ids)
    fleet.hook(lambda body: (500, {"error": "dead"}) if body["token_ids"] == poison else None)
    with pytest.raises(RolloutError, match=r"3 times .*HTTP 500"):
        engine.generate(PROMPTS, SAMPLING)
    for server in fleet.servers:
        assert sum(body.get("token_ids") == poison for _, body, _ in server.asked) == 3


def test_a_crash_counts_against_one_of_the_prompts_in_progress(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt crashes the server once, then the second, which was in progress then."""
    monkeypatch.setattr(server_module, "ATTEMPTS", 2)
    engine, both, asked = fleet.open(1), threading.Event(), Counter[str]()
    names = {prompt.token_ids: prompt.id for prompt in PROMPTS[:2]}

    def crash(body: dict[str, Any]) -> tuple[int, Any] | None:
        name = names.get(tuple(body["token_ids"]), "trial")
        asked[name] += 1
        if name == "0" and asked[name] == 1:
            both.wait(60)
            return 500, {}
        if name == "1" and asked[name] == 1:
            both.set()
            fleet.hang(body)
        return (500, {}) if name == "1" and asked[name] == 2 else None

    fleet[0].hooks[GENERATE] = crash
    assert all(engine.generate(PROMPTS[:2], SAMPLING))
    assert (asked["0"], asked["1"]) >= (2, 3)


@pytest.mark.parametrize("status", [400, 401])
def test_what_every_server_refuses_ends_the_run(status: int, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    monkeypatch.setattr(server_module, "ATTEMPTS", 2)
    engine, refused = fleet.open(1, key_env="MY_KEY"), list(PROMPTS[0].token_ids)
    no = status, {"error": "no, Bearer s3cret"}
    fleet.hook(lambda body: no if body["token_ids"] == refused else None)
    with pytest.raises(RolloutError, match=rf"/inference/v1/generate: HTTP {status} ") as raised:
        engine.generate(PROMPTS[:1], SAMPLING)
    assert "s3cret" not in str(raised.value)
    assert sum(body.get("token_ids") == refused for _, body, _ in fleet[0].asked) == (1 if status == 401 else 2)
    assert all(headers["Authorization"] == "Bearer s3cret" for *_, headers in fleet[0].asked)
    engine.close()
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match="MY_KEY"):
        fleet.open(1, key_env="MY_KEY")


SPOILED: dict[str, Callable[[dict[str, Any], ServerEngine], Any]] = {
    "no log-probs": lambda choice, _: choice.update(logprobs=None),
    "no log-prob of a token": lambda choice, _: choice.update(logprobs={"content": []}),
    "no versions": lambda choice, _: choice.update(weight_versions=None),
    "dropped by the server": lambda choice, _: choice.update(finish_reason="abort"),
    "no tokens": lambda choice, _: choice.update(token_ids=[]),
    "one twice": lambda choice, _: choice.update(index=0),
    "a token of another model": lambda choice, _: choice["token_ids"].__setitem__(-1, len(make_tokenizer())),
    "of weights from before the call": lambda choice, engine: choice["weight_versions"][0].update(
        version=f"{engine.run}:{engine.updates - 1}"
    ),
}


@pytest.mark.parametrize("how", SPOILED)
def test_an_answer_that_cannot_count_is_asked_for_again(how: str, fleet: Fleet, policy: Policy) -> None:
    engine = fleet.open(1)
    engine.update_weights(policy.named_weights())
    wanted = told(engine.generate(PROMPTS[:4], SAMPLING))
    fleet[0].hooks[GENERATE] = spoiling(fleet[0], lambda choice: SPOILED[how](choice, engine))
    assert told(engine.generate(PROMPTS[:4], SAMPLING)) == wanted
    assert [fleet[0].url in note for note in engine.notes] == [True, True]  # excluded, and back


def test_weights_that_do_not_fit_are_refused(fleet: Fleet, policy: Policy) -> None:
    engine = fleet.open()
    version, weights = engine.transfer.version, dict(policy.named_weights())
    with pytest.raises(ValueError, match="'extra'"):
        engine.update_weights({**weights, "extra": torch.ones(1)}.items())
    assert (engine.transfer.version, fleet[0].version) == (version, version)
    assert engine.generate(PROMPTS[:2], SAMPLING)


def resident() -> float:
    """MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_two_hundred_syncs_leave_nothing_behind(fleet: Fleet, policy: Policy) -> None:
    engine = fleet.open(1)

    def sync(times: int) -> tuple[float, int, int]:
        for _ in range(times):
            engine.update_weights(policy.named_weights())
            fleet[0].asked.clear()
        return resident(), threading.active_count(), len(os.listdir("/proc/self/fd"))

    before, *held = sync(10)
    after, *still_held = sync(200)
    assert after - before < 4
    assert still_held <= [count + 2 for count in held]  # connections that the server is just closing
    assert len(list(engine.transfer.folder.glob("*.safetensors"))) == 1
    folder = engine.transfer.folder
    engine.close()
    assert not folder.exists()


@pytest.mark.parametrize("path", [GENERATE, UPDATE])
def test_ctrl_c_waits_for_no_server(path: str, fleet: Fleet, policy: Policy) -> None:
    engine, n_threads = fleet.open(), threading.active_count()
    calls = {GENERATE: (engine.generate, PROMPTS, SAMPLING), UPDATE: (engine.update_weights, policy.named_weights())}
    call = partial(*calls[path])
    fleet.hook(fleet.hang, path)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 30  # of the sixty that they hang for
    assert not engine.calls
    fleet.over.set()
    engine.close()
    wait_until(lambda: threading.active_count() <= n_threads)  # the servers' own too


def test_a_whole_run_over_servers_that_come_and_go(fleet: Fleet) -> None:
    """The figures of the run whose servers stayed, over servers that still have that one's weights."""
    whole = steps_of(fleet.recipe(steps=2, name="whole"))
    count = iter(range(1000))

    def kill_now_and_then(body: dict[str, Any]) -> None:
        if next(count) % 5 == 3 and fleet[1].alive:
            fleet[1].kill()
            threading.Timer(0.02, fleet[1].start).start()

    fleet[0].hooks[GENERATE] = kill_now_and_then
    assert steps_of(fleet.recipe(steps=2, name="again")) == whole
    assert next(count) > 5
    assert all(step["sync/gap"] < 1e-5 and step["train/tokens"] > 0 for step in whole)
