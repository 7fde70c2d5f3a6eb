"""Two servers of which one is sick, hung, foreign or stale: the run goes on with the other, or says what is wrong."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from fake_server import GENERATE, UPDATE, FakeServer
from safetensors.torch import load_file
from served import PROMPTS, SAMPLING, Fleet, lost, moved, server_config, told, wait_until

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
    server.hooks |= {path: lambda _: (status, body) for path in PATHS}


@pytest.fixture
def _two_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "ATTEMPTS", 2)


@pytest.mark.usefixtures("_two_attempts")
def test_a_sick_server_does_not_use_up_the_attempts(fleet: Fleet) -> None:
    """Well by its health and weights, and no prompt is answered: it is asked ever more rarely."""
    engine, checked = fleet.open(), list[float]()
    wanted = told(engine.generate(PROMPTS, SAMPLING))
    fleet[0].hooks[GENERATE] = lambda body: (500, {"error": "dead"})
    fleet[1].hooks[GENERATE] = lambda body: time.sleep(0.05)
    while not lost(engine):
        assert told(engine.generate(PROMPTS, SAMPLING)) == wanted
    fleet[0].hooks["/health"] = lambda body: checked.append(time.monotonic())
    while len(checked) < 4:
        assert told(engine.generate(PROMPTS, SAMPLING)) == wanted
    assert len(engine.notes) == 1  # not one for every attempt
    for number, (one, other) in enumerate(pairwise(checked)):
        assert other - one > 0.19 * 2**number
    fleet[0].hooks.clear()
    wait_until(lambda: not lost(engine))


def test_servers_that_refuse_the_run_are_not_waited_for(
    fleet: Fleet, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has another model, and later the other another key."""
    monkeypatch.setattr(fleet[0].weights.config, "num_hidden_layers", 99)
    engine, began = fleet.open(), time.monotonic()
    wanted = told(engine.generate(PROMPTS, SAMPLING))
    answer_all(fleet[1], 401, {})
    for call in (
        lambda: engine.generate(PROMPTS, SAMPLING),
        lambda: engine.update_weights(policy.named_weights()),
        lambda: fleet.open(),
    ):
        with pytest.raises(RolloutError, match=r"model\.path"):
            call()
    assert time.monotonic() - began < 60
    fleet[1].hooks.clear()
    wait_until(lambda: len(lost(engine)) == 1)
    assert told(engine.generate(PROMPTS, SAMPLING)) == wanted


@pytest.mark.parametrize(("dtype", "refused"), [("float32", 0), ("bfloat16", 1)])
def test_a_server_in_another_dtype_is_refused(dtype: str, refused: int, fleet: Fleet) -> None:
    fleet[0].dtype = "bfloat16"
    (server,) = lost(fleet.open(dtype=dtype))
    assert server.url == fleet[refused].url
    assert dtype in str(server.error)


@pytest.mark.parametrize(("status", "body"), [(404, {}), (200, {}), (200, None)], ids=str)
def test_a_foreign_process_at_a_port_is_left_out(status: int, body: Any, fleet: Fleet, policy: Policy) -> None:
    engine = fleet.open()
    wanted = told(engine.generate(PROMPTS, SAMPLING))
    fleet[0].kill()
    fleet[0].start()
    answer_all(fleet[0], status, body)
    engine.update_weights(policy.named_weights())
    assert told(engine.generate(PROMPTS, SAMPLING)) == wanted
    engine.close()
    later = fleet.open()  # and by a run that begins with it there
    assert told(later.generate(PROMPTS, SAMPLING)) == wanted
    for one in (engine, later):
        assert any(fleet[0].url in note for note in one.notes)


@pytest.mark.usefixtures("_two_attempts")
@pytest.mark.parametrize("status", [404, 500])
def test_any_failure_may_pass_in_time(status: int, fleet: Fleet) -> None:
    engine, server = fleet.open(1), fleet[0]
    wanted = told(engine.generate(PROMPTS[:4], SAMPLING))

    def recover() -> None:
        wait_until(lambda: lost(engine))
        server.start()
        n_failures = server.seen("/health")
        wait_until(lambda: server.seen("/health") > n_failures + 1)
        server.hooks.clear()

    answer_all(server, status, {})
    server.hooks.pop(GENERATE)
    server.kill()
    thread = threading.Thread(target=recover)
    thread.start()
    assert told(engine.generate(PROMPTS[:4], SAMPLING)) == wanted
    thread.join()


@pytest.mark.usefixtures("_two_attempts")
def test_attempts_are_those_of_one_prompt_at_one_server(fleet: Fleet) -> None:
    """A prompt that one server cannot answer is left to the other; where that is lost, it waits for `sync_within`."""
    engine = fleet.open(sync_within=3.0)
    wanted = told(engine.generate(PROMPTS, SAMPLING))
    poison, failures, twice = list(PROMPTS[6].token_ids), iter(range(99)), threading.Event()

    def fail(body: dict[str, Any]) -> tuple[int, Any] | None:
        if body["token_ids"] != poison or body["sampling_params"]["n"] != SAMPLING.n:
            return None
        if next(failures) == 1:
            twice.set()
        return 400, {"error": "no"}

    fleet[0].hooks[GENERATE] = fail
    fleet[1].hooks[GENERATE] = lambda body: (twice.wait(60), None)[1]
    assert told(engine.generate(PROMPTS, SAMPLING)) == wanted
    assert next(failures) == 2
    fleet[1].kill()
    with pytest.raises(RolloutError, match=r"^rollout\.server\.sync_within: 1 of 24 "):
        engine.generate(PROMPTS, SAMPLING)


def test_a_hung_server_stalls_one_sync_and_comes_back_by_itself(fleet: Fleet, policy: Policy) -> None:
    engine = fleet.open(sync_within=3.0)
    fleet[0].hooks[UPDATE] = fleet.hang
    took = []
    for _ in range(4):
        began = time.monotonic()
        engine.update_weights(policy.named_weights())
        took.append(time.monotonic() - began)
        assert engine.generate(PROMPTS, SAMPLING)
    assert took[0] >= 3.0 > max(took[1:])
    fleet[0].hooks.clear()
    fleet.over.set()
    wait_until(lambda: fleet[0].version == engine.transfer.version)  # though nobody asks it for anything
    wait_until(lambda: not lost(engine))
    fleet[1].kill()
    assert engine.generate(PROMPTS, SAMPLING)
    assert any("is back" in note for note in engine.notes)


def test_a_server_that_loads_more_slowly_than_steps_follow_gets_in(fleet: Fleet, policy: Policy) -> None:
    engine = fleet.open()

    def load_slowly(body: dict[str, Any]) -> tuple[int, Any]:
        fleet[0].engine.update_weights(load_file(body["args"][0]).items())
        loaded = engine.updates
        wait_until(lambda: engine.updates > loaded or not lost(engine))
        return 200, {}

    fleet[0].kill()
    engine.update_weights(policy.named_weights())
    fleet[0].hooks[UPDATE] = load_slowly
    fleet[0].start()
    until = time.monotonic() + 60
    while lost(engine):
        engine.update_weights(policy.named_weights())
        assert time.monotonic() < until
    assert fleet[0].seen(UPDATE) > 1


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


def test_weights_that_are_published_during_the_only_servers_trial(fleet: Fleet, policy: Policy) -> None:
    """It has come back with those before: the sync sends it the new ones, or nobody would."""
    engine = fleet.open(1)
    there, go_on = hold_trials(fleet[0])
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.extend(engine.generate(PROMPTS, SAMPLING)))
    asking.start()
    assert there.wait(60)
    threading.Thread(target=lambda: (wait_until(lambda: engine.updates == 2), go_on.set())).start()
    engine.update_weights(policy.named_weights())
    asking.join(60)
    assert len(found) == len(PROMPTS)
    assert {span.version for group in found for one in group for span in one.versions} == {2}


def test_a_server_that_is_back_is_probed_with_the_present_weights(fleet: Fleet, policy: Policy) -> None:
    """It came back while newer ones were published, and is sent those."""
    engine = fleet.open()
    there, go_on = hold_trials(fleet[0])
    engine.generate(PROMPTS, SAMPLING)
    assert there.wait(60)
    engine.update_weights(policy.named_weights())
    go_on.set()
    wait_until(lambda: len(engine.pool.ready) == 2)
    assert engine.is_unprobed
    assert len(engine.answers_to_probe(PROMPTS[:2], SAMPLING, engine.world)) == 2
    assert not engine.is_unprobed


def test_a_server_that_hangs_on_prompts_alone_delays_ever_fewer_calls(fleet: Fleet) -> None:
    engine, hung = fleet.open(answer_within=1.0), [0.0]

    def hang_on_prompts(body: dict[str, Any]) -> None:
        if body["sampling_params"]["max_tokens"] > 1:
            hung.append(time.monotonic())
            fleet.hang(body)

    def waves() -> list[float]:
        """Return when it hung, of prompts that were asked together the first."""
        return [other for one, other in pairwise(hung) if other > one + 1]

    fleet[0].hooks[GENERATE] = hang_on_prompts
    while len(waves()) < 3:
        assert engine.generate(PROMPTS[:4], SAMPLING)
        assert engine.answers_to_probe(PROMPTS[:1], replace(SAMPLING, max_tokens=1), engine.world)  # no prompt for this
    first, second, third = waves()
    assert second - first > 1.9  # its deadline, and as long again
    assert third - second > 3.8
    fleet.over.set()
    fleet[0].hooks.clear()
    fleet[1].kill()
    began = time.monotonic()
    assert engine.generate(PROMPTS[:4], SAMPLING)
    assert time.monotonic() < began + 6  # seven are left: it is tried at once where no other is in


def swallow_updates(server: FakeServer) -> None:
    server.hooks[UPDATE] = lambda body: (200, {})


def test_the_probe_asks_every_server(fleet: Fleet, policy: Policy) -> None:
    """One of them swallows weight updates."""
    engine = fleet.open()
    learner = Learner(policy, server_config(fleet.model, fleet.servers, fleet.folder))
    probe = SyncProbe(PROMPTS[:4], learner.config)
    asked = [server.seen(GENERATE) for server in fleet.servers]
    assert probe(engine, learner)["gap"] < 1e-5
    assert [server.seen(GENERATE) - n for server, n in zip(fleet.servers, asked, strict=True)] == [4, 4]
    swallow_updates(fleet[1])
    weights = moved(policy)
    policy.model.load_state_dict(weights, strict=False)
    engine.update_weights(weights.items())
    with pytest.raises(OutOfSyncError, match=fleet[1].url):
        probe(engine, learner)
    fleet[1].kill()
    assert probe(engine, learner)["gap"] < 1e-5  # those that are in


def losing(fleet: Fleet, ahead: int, n: int, **run: Any) -> dict[str, Any]:
    raw = fleet.recipe(ahead, n, steps=60, **run)
    raw["optimizer"] |= {"lr": 1e-2}
    raw["sampler"] |= {"max_age": ahead + 1} if ahead else {}
    raw["rollout"]["server"] |= {"sync_within": 3.0}
    return raw


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_server_that_comes_back_stale_in_the_midst_of_a_step_trains_nothing(ahead: int, fleet: Fleet) -> None:
    """It says that it has the weights of now, and has those that it started with."""
    count = iter(range(10**6))

    def come_back_stale(body: dict[str, Any]) -> None:
        if next(count) == 60:
            fleet[1].kill()
            swallow_updates(fleet[1])
            fleet[1].start()
        time.sleep(0.02 if body["sampling_params"]["n"] > 1 else 0)

    fleet[0].hooks[GENERATE] = come_back_stale
    with pytest.raises(OutOfSyncError, match=fleet[1].url):
        train(parse_config(losing(fleet, ahead, 2, save_every=0)), Progress())
    assert next(count) > 60
    events = read_log(fleet.folder / "small" / "metrics.jsonl")
    assert all(event["train/rollout_gap"] < 1e-4 for event in events if event["kind"] == "step" and not ahead)


@pytest.mark.parametrize("lost", ["killed", "/pause", UPDATE, "probe"])
def test_losing_the_servers_loses_no_step(lost: str, fleet: Fleet) -> None:
    """Of an asynchronous run that has not saved yet, whatever of its only server fails after the eighth sync."""
    server, count = fleet[0], iter(range(10**6))

    def fail(body: dict[str, Any]) -> tuple[int, Any] | None:
        if next(count) < 9:
            return None
        if lost == "killed":
            server.kill()
        return (200, {}) if lost == "probe" else (500, {})

    server.hooks[{"killed": "/resume", "probe": UPDATE}.get(lost, lost)] = fail
    with pytest.raises(OutOfSyncError if lost == "probe" else RolloutError):
        train(parse_config(losing(fleet, 1, 1, save_every=100)), Progress())
    folder = fleet.folder / "small"
    steps = [event["step"] for event in read_log(folder / "metrics.jsonl") if event["kind"] == "step"]
    assert steps[-1] >= 8
    assert (folder / "checkpoints" / f"step_{steps[-1]:06d}").exists()
