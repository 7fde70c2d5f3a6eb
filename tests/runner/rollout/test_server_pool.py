"""Two servers of which one is sick, hung, foreign or stale: the run goes on with the other, or says what is wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_server import GENERATE, UPDATE, FakeServer
from safetensors.torch import load_file
from served import PROMPTS, SAMPLING, hang, lost, moved, open_engine, server_config, told
from small import small_recipe

from dapo_runner.algorithms.learner import Learner
from dapo_runner.config import parse_config
from dapo_runner.logging.metrics import read_log
from dapo_runner.logging.progress import Progress
from dapo_runner.policy.model import Policy
from dapo_runner.rollout import server as server_module
from dapo_runner.rollout.client import RolloutError
from dapo_runner.rollout.probe import OutOfSyncError, SyncProbe
from dapo_runner.train import train

PATHS = ["/health", "/weight_info", "/is_paused", "/pause", UPDATE, "/reset_prefix_cache", "/update_weight_version",
         "/resume", GENERATE]  # fmt: skip


def answer_all(server: FakeServer, status: int, body: Any) -> None:
    """As a foreign process at its port does."""
    for path in PATHS:
        server.hooks[path] = lambda _: (status, body)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_sick_server_does_not_use_up_the_attempts(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Well by its health and weights, and no prompt is answered: it is asked ever more rarely."""
    monkeypatch.setattr(server_module, "ATTEMPTS", 2)
    engine = open_engine(model_folder, servers, tmp_path)
    wanted = told(engine.generate(PROMPTS, SAMPLING))
    servers[0].hooks[GENERATE] = lambda body: (500, {"error": "dead"})
    servers[1].hooks[GENERATE] = lambda body: time.sleep(0.3)
    for _ in range(3):
        assert told(engine.generate(PROMPTS, SAMPLING)) == wanted
    assert len(engine.notes) in (1, 2)  # not one for every attempt
    before = servers[0].seen("/health")
    time.sleep(1.0)
    assert servers[0].seen("/health") - before <= 3  # every 0.2 s it would be five
    servers[0].hooks.clear()
    wait_until(lambda: not lost(engine))
    engine.close()


def test_servers_that_refuse_the_run_are_not_waited_for(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has another model, and later the other another key."""
    monkeypatch.setattr(servers[0].weights.config, "num_hidden_layers", 99)
    engine, began = open_engine(model_folder, servers, tmp_path), time.monotonic()
    wanted = told(engine.generate(PROMPTS, SAMPLING))
    answer_all(servers[1], 401, {})
    for call in (
        lambda: engine.generate(PROMPTS, SAMPLING),
        lambda: engine.update_weights(policy.named_weights()),
        lambda: open_engine(model_folder, servers, tmp_path),
    ):
        with pytest.raises(RolloutError, match=r"model\.path"):
            call()
    assert time.monotonic() - began < 60
    servers[1].hooks.clear()
    wait_until(lambda: len(lost(engine)) == 1)
    assert told(engine.generate(PROMPTS, SAMPLING)) == wanted
    engine.close()


def test_a_server_in_another_dtype_is_refused(model_folder: Path, servers: list[FakeServer], tmp_path: Path) -> None:
    servers[0].dtype = "bfloat16"
    engine = open_engine(model_folder, servers, tmp_path)
    assert [server.url for server in lost(engine)] == [servers[0].url]
    assert "bfloat16" in str(lost(engine)[0].error)
    engine.close()


@pytest.mark.parametrize(("status", "body"), [(404, {}), (200, {}), (200, None)], ids=str)
def test_a_foreign_process_at_a_port_is_left_out(
    status: int, body: Any, model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy
) -> None:
    engine = open_engine(model_folder, servers, tmp_path)
    wanted = told(engine.generate(PROMPTS, SAMPLING))
    servers[0].kill()
    servers[0].start()
    answer_all(servers[0], status, body)
    engine.update_weights(policy.named_weights())
    assert told(engine.generate(PROMPTS, SAMPLING)) == wanted
    engine.close()
    later = open_engine(model_folder, servers, tmp_path)  # and by a run that begins with it there
    assert told(later.generate(PROMPTS, SAMPLING)) == wanted
    later.close()
    for one in (engine, later):
        assert any(servers[0].url in note for note in one.notes)


def test_any_failure_may_pass_in_time(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "ATTEMPTS", 2)
    engine = open_engine(model_folder, servers[:1], tmp_path)
    wanted = told(engine.generate(PROMPTS[:4], SAMPLING))
    for status in (404, 500):
        answer_all(servers[0], status, {})
        servers[0].hooks.pop(GENERATE)
        servers[0].kill()
        threading.Timer(0.5, servers[0].start).start()
        threading.Timer(1.5, servers[0].hooks.clear).start()
        assert told(engine.generate(PROMPTS[:4], SAMPLING)) == wanted
    engine.close()


def test_attempts_are_those_of_one_prompt_at_one_server(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that one server cannot answer is left to the other; where that is lost, it waits for `sync_within`."""
    monkeypatch.setattr(server_module, "ATTEMPTS", 2)
    engine = open_engine(model_folder, servers, tmp_path, sync_within=3.0)
    wanted = told(engine.generate(PROMPTS, SAMPLING))
    poison, asked = list(PROMPTS[7].token_ids), list[float]()

    def fail(body: dict[str, Any]) -> tuple[int, Any] | None:
        if body["token_ids"] == poison and body["sampling_params"]["n"] == SAMPLING.n:
            asked.append(time.monotonic())
            return 400, {"error": "no"}
        return None

    servers[0].hooks[GENERATE] = fail
    servers[1].hooks[GENERATE] = lambda body: time.sleep(1.5) if len(asked) < 2 else None
    assert told(engine.generate(PROMPTS, SAMPLING)) == wanted
    assert len(asked) <= 2
    servers[1].kill()
    with pytest.raises(RolloutError, match=r"sync_within: 1 of 24 "):
        engine.generate(PROMPTS, SAMPLING)
    engine.close()


def test_a_hung_server_stalls_one_sync_and_comes_back_by_itself(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy
) -> None:
    engine, hung = open_engine(model_folder, servers, tmp_path, sync_within=5.0), threading.Event()
    servers[0].hooks[UPDATE] = hang(hung)
    took = []
    for _ in range(4):
        began = time.monotonic()
        engine.update_weights(policy.named_weights())
        took.append(time.monotonic() - began)
        assert engine.generate(PROMPTS, SAMPLING)
    assert took[0] >= 5.0
    assert max(took[1:]) < 5.0
    servers[0].hooks.clear()
    hung.set()
    wait_until(lambda: servers[0].version == engine.transfer.version)  # though nobody asks it for anything
    wait_until(lambda: not lost(engine))
    servers[1].kill()
    assert engine.generate(PROMPTS, SAMPLING)
    assert any("is back" in note for note in engine.notes)
    engine.close()


def test_a_server_that_loads_more_slowly_than_steps_follow_gets_in(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy
) -> None:
    def load_slowly(body: dict[str, Any]) -> tuple[int, Any]:
        servers[0].engine.update_weights(load_file(body["args"][0]).items())
        time.sleep(1.5)
        return 200, {}

    engine = open_engine(model_folder, servers, tmp_path)
    servers[0].kill()
    engine.update_weights(policy.named_weights())
    servers[0].hooks[UPDATE] = load_slowly
    servers[0].start()
    until = time.monotonic() + 60
    while lost(engine):
        engine.update_weights(policy.named_weights())
        time.sleep(0.3)
        assert time.monotonic() < until
    engine.close()


def hold_trials(server: FakeServer) -> tuple[threading.Event, threading.Event]:
    """What is set when a trial is there, and what has it answered. The next prompt fails."""
    there, go_on, fails = threading.Event(), threading.Event(), iter([True])

    def hook(body: dict[str, Any]) -> tuple[int, Any] | None:
        if body["sampling_params"]["max_tokens"] == 1:
            there.set()
            go_on.wait(60)
            return None
        return (500, {}) if next(fails, False) else None

    server.hooks[GENERATE] = hook
    return there, go_on


def test_weights_that_are_published_during_the_only_servers_trial(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy
) -> None:
    """It has come back with those before: the sync sends it the new ones, or nobody would."""
    engine = open_engine(model_folder, servers[:1], tmp_path)
    there, go_on = hold_trials(servers[0])
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.extend(engine.generate(PROMPTS, SAMPLING)))
    asking.start()
    assert there.wait(60)
    threading.Timer(0.5, go_on.set).start()
    engine.update_weights(policy.named_weights())
    asking.join(20)
    engine.close()
    assert len(found) == len(PROMPTS)
    assert {span.version for group in found for one in group for span in one.versions} == {2}


def test_a_server_that_is_back_is_probed_with_the_present_weights(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy
) -> None:
    """It came back while newer ones were published, and is sent those."""
    engine = open_engine(model_folder, servers, tmp_path)
    there, go_on = hold_trials(servers[0])
    engine.generate(PROMPTS, SAMPLING)
    assert there.wait(60)
    engine.update_weights(policy.named_weights())
    go_on.set()
    wait_until(lambda: len(engine.pool.ready) == 2)
    assert engine.is_unprobed
    assert len(engine.answers_to_probe(PROMPTS[:2], SAMPLING, engine.world)) == 2
    assert not engine.is_unprobed
    engine.close()


def test_a_server_that_hangs_on_prompts_alone_delays_ever_fewer_calls(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    engine, over, hung = open_engine(model_folder, servers, tmp_path, answer_within=2.0), threading.Event(), [0.0]

    def hang_on_prompts(body: dict[str, Any]) -> None:
        if body["sampling_params"]["max_tokens"] > 1:
            hung.append(time.monotonic())
            over.wait(60)

    servers[0].hooks[GENERATE] = hang_on_prompts
    began = time.monotonic()
    while time.monotonic() < began + 11:
        assert engine.generate(PROMPTS[:4], SAMPLING)
        assert engine.answers_to_probe(PROMPTS[:1], replace(SAMPLING, max_tokens=1), engine.world)  # no prompt for this
    hangs = [b for a, b in pairwise(hung) if b > a + 1]
    assert 2 <= len(hangs) <= 3  # at 0, 4 and 12 s; every 2 s it would be five
    over.set()
    servers[0].hooks.clear()
    servers[1].kill()
    began = time.monotonic()
    assert engine.generate(PROMPTS[:4], SAMPLING)
    assert time.monotonic() < began + 5  # it is tried at once where no other is in
    engine.close()


def swallow_updates(server: FakeServer) -> None:
    server.hooks[UPDATE] = lambda body: (200, {})


def test_the_probe_asks_every_server(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy
) -> None:
    """One that swallows weight updates, and is slower than the other."""
    engine = open_engine(model_folder, servers, tmp_path)
    learner = Learner(policy, server_config(model_folder, servers, tmp_path))
    probe = SyncProbe(PROMPTS[:4], learner.config)
    asked = [server.seen(GENERATE) for server in servers]
    assert probe(engine, learner)["gap"] < 1e-5
    assert [server.seen(GENERATE) - n for server, n in zip(servers, asked, strict=True)] == [4, 4]
    swallow_updates(servers[1])
    servers[1].hooks["/health"] = lambda body: time.sleep(0.5)  # when all is answered by the other
    weights = moved(policy)
    policy.model.load_state_dict(weights, strict=False)
    engine.update_weights(weights.items())
    with pytest.raises(OutOfSyncError, match=servers[1].url):
        probe(engine, learner)
    servers[1].kill()
    assert probe(engine, learner)["gap"] < 1e-5  # those that are in
    engine.close()


def recipe_over(servers: list[FakeServer], model: Path, folder: Path, ahead: int, **run: Any) -> dict[str, Any]:
    raw = small_recipe(output_dir=str(folder), **run)
    raw["model"] = {"dtype": "float32", "path": str(model)}
    raw["optimizer"] |= {"lr": 1e-2}
    raw["sampler"] |= {"filter_groups": False, **({"max_age": ahead + 1} if ahead else {})}
    raw["rollout"] |= {
        "max_response_tokens": 6,
        "engine": "server",
        "max_staleness": ahead,
        "correction": {"weights": "token" if ahead else None},
        "server": {
            "urls": [server.url for server in servers], "folder": str(folder), "sync_within": 3.0,
        },
    }  # fmt: skip
    return raw


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_server_that_comes_back_stale_in_the_midst_of_a_step_trains_nothing(
    ahead: int, model_folder: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    """It says that it has the weights of now, and has those that it started with."""
    count = iter(range(10**6))

    def come_back_stale(body: dict[str, Any]) -> None:
        if next(count) == 60:
            servers[1].kill()
            swallow_updates(servers[1])
            servers[1].start()
        time.sleep(0.02 if body["sampling_params"]["n"] > 1 else 0)

    servers[0].hooks[GENERATE] = come_back_stale
    raw = recipe_over(servers, model_folder, tmp_path, ahead, steps=60, eval_every=0, save_every=0)
    with pytest.raises(OutOfSyncError, match=servers[1].url):
        train(parse_config(raw), Progress())
    assert next(count) > 60
    events = read_log(tmp_path / "small" / "metrics.jsonl")
    assert all(event["train/rollout_gap"] < 1e-4 for event in events if event["kind"] == "step" and not ahead)


@pytest.mark.parametrize("lost", ["killed", "/pause", UPDATE, "probe"])
def test_losing_the_servers_loses_no_step(
    lost: str, model_folder: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    """Of an asynchronous run that has not saved yet, whatever of its only server fails after the eighth sync."""
    server, count = servers[0], iter(range(10**6))

    def fail(body: dict[str, Any]) -> tuple[int, Any] | None:
        if next(count) < 9:
            return None
        if lost == "killed":
            server.kill()
        return (200, {}) if lost == "probe" else (500, {})

    server.hooks[{"killed": "/resume", "probe": UPDATE}.get(lost, lost)] = fail
    raw = recipe_over(servers[:1], model_folder, tmp_path, 1, steps=60, eval_every=0, save_every=100)
    with pytest.raises(OutOfSyncError if lost == "probe" else RolloutError):
        train(parse_config(raw), Progress())
    steps = [event["step"] for event in read_log(tmp_path / "small" / "metrics.jsonl") if event["kind"] == "step"]
    assert steps[-1] >= 8
    assert (tmp_path / "small" / "checkpoints" / f"step_{steps[-1]:06d}").exists()
