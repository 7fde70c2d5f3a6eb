"""A server that fails in any way beside a healthy one: no prompt is lost, the right one is blamed, the run goes on."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest
from fake_server import GENERATE, UPDATE, Answer, FakeServer
from refusals import naming, refused
from safetensors.torch import load_file
from served import PROMPTS, REQUESTS, Fleet, in_thread, is_trial, lost, moved, responses, wait_until

from dapo_runner.engines import pool
from dapo_runner.engines.client import RolloutError, Server
from dapo_runner.engines.guard import CLAIM
from dapo_runner.engines.server import ATTEMPTS, TRANSFERS
from dapo_runner.engines.transfer import FileTransfer
from dapo_runner.http import run
from dapo_runner.parallel.world import Layout, World
from dapo_runner.policy.model import Policy
from dapo_runner.tiny_model import make_tokenizer

FEW = REQUESTS[:8]
Fault = Callable[[Fleet, dict[str, Any]], Answer | None]  # gets the first prompt of a server, and may answer it


def kill(fleet: Fleet, body: Any) -> None:
    fleet[0].kill()


def restart(fleet: Fleet, body: Any, is_halfway: bool = False) -> None:
    """``is_halfway``: it is as a trainer that was killed has left it."""
    fleet[0].kill()
    fleet[0].start()
    fleet[0].paused = fleet[0].updating = is_halfway


def take_other_weights(fleet: Fleet, body: Any) -> None:
    fleet[0].engine.weights += 1
    fleet[0].version = "other:1"


def hang(fleet: Fleet, body: Any, path: str = GENERATE) -> None:
    fleet[0].hooks[path] = fleet.hang
    fleet.hang(body)


def always(status: int, answer: Any, fleet: Fleet, body: Any, paths: tuple[str, ...] = (GENERATE,)) -> Answer:
    fleet[0].hooks |= dict.fromkeys(paths, lambda body: (status, answer))
    return status, answer


FOREIGN = ("/health", CLAIM, "/weight_info", "/is_paused", "/pause", UPDATE, GENERATE)
foreign = partial(always, paths=FOREIGN)  # another process at the port


def drip(raw: bytes, fleet: Fleet, body: Any) -> Iterator[bytes]:
    for byte in raw:
        yield bytes([byte])
        fleet.over.wait(0.1)


def send(raw: bytes, fleet: Fleet, body: Any) -> Answer:
    return [raw]


def spoil(change: Callable[[dict[str, Any]], Any], fleet: Fleet, body: Any) -> Answer:
    answer = fleet[0].generate(body)
    change(answer["choices"][-1])
    return 200, answer


def replace_token(token: int, fleet: Fleet, body: Any) -> Answer:
    return spoil(lambda choice: choice["token_ids"].__setitem__(-1, token), fleet, body)


def take_old_weights(fleet: Fleet, body: Any) -> Answer:
    run, _, number = fleet[0].version.partition(":")
    older = f"{run}:{int(number) - 1}"
    return spoil(lambda choice: choice["weight_versions"][0].update(version=older), fleet, body)


def cut_off(choice: dict[str, Any]) -> None:
    """As vLLM does at its own limit, which may be lower than the one of the request."""
    choice |= {"finish_reason": "length", "token_ids": choice["token_ids"][:1]}
    choice["logprobs"] = {"content": choice["logprobs"]["content"][:1]}
    choice["weight_versions"][0]["end"] = 1


HEAD = b"HTTP/1.1 200 OK\r\n"
HUNG = {"response_timeout": 2.0}
FAULTS: dict[str, tuple[Fault, dict[str, Any]]] = {
    "killed": (kill, {}),
    "restarted": (restart, {}),
    "restarted, paused in an update": (partial(restart, is_halfway=True), {}),
    "with another trainer's weights": (take_other_weights, {}),
    "sick": (partial(always, 500, {"error": "dead"}), {}),
    "refuses prompts": (partial(always, 400, {"error": "no"}), {}),
    "refuses the key": (partial(foreign, 401, {}), {}),
    "foreign, not found": (partial(foreign, 404, {}), {}),
    "foreign, an object": (partial(foreign, 200, {}), {}),
    "foreign, null": (partial(foreign, 200, None), {}),
    "hung": (hang, HUNG),
    "hung health": (partial(hang, path="/health"), {"sync_timeout": 2.0}),
    "slow headers": (partial(drip, HEAD + 99 * b"X-A: b\r\n"), HUNG),
    "slow body": (partial(drip, HEAD + b"\r\n" + 999 * b" "), HUNG),
    "no length": (partial(send, HEAD + b"Content-Length: many\r\n\r\n{}"), {}),
    "too short": (partial(send, HEAD + b"Content-Length: 9\r\n\r\n{}"), {}),
    "deep JSON": (partial(send, HEAD + b"\r\n" + 10**5 * b"["), {}),
    "no log-probs": (partial(spoil, lambda choice: choice.update(logprobs=None)), {}),
    "log-probs of no token": (partial(spoil, lambda choice: choice.update(logprobs={"content": []})), {}),
    "no versions": (partial(spoil, lambda choice: choice.update(weight_versions=None)), {}),
    "weights from before the call": (take_old_weights, {}),
    "cut off": (partial(spoil, cut_off), {}),
    "aborted": (partial(spoil, lambda choice: choice.update(finish_reason="abort")), {}),
    "no tokens": (partial(spoil, lambda choice: choice.update(token_ids=[])), {}),
    "one response twice": (partial(spoil, lambda choice: choice.update(index=0)), {}),
    "a token of another model": (partial(replace_token, len(make_tokenizer())), {}),
    "a negative token": (partial(replace_token, -1), {}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_server_fails_and_recovers(
    name: str, fleet: Fleet, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, settings = FAULTS[name]
    if name == "hung health":
        monkeypatch.setattr(pool, "RENEW", 0.3)  # it is asked soon
    engine = fleet.open(**settings)
    engine.update_weights(policy.named_weights())
    wanted = responses(engine.generate(FEW))
    first, struck = iter([True]), threading.Event()

    def strike(body: dict[str, Any]) -> Answer | None:
        if is_trial(body) or not next(first, False):
            return None
        struck.set()
        return fault(fleet, body)

    fleet[0].hooks[GENERATE] = strike
    fleet[1].hooks[GENERATE] = lambda body: None if struck.wait(120) else (500, {})
    assert responses(engine.generate(FEW)) == wanted
    engine.update_weights(moved(policy).items())
    later = responses(engine.generate(FEW))
    assert later != wanted
    fleet.over.set()
    fleet[0].hooks.clear()
    if not fleet[0].alive:
        fleet[0].start()
    wait_until(lambda: not lost(engine))
    assert responses(engine.generate(FEW)) == later
    assert [fleet[0].url in note for note in engine.notes] == [True, True]  # excluded, and back
    timeouts = [settings.get(name, 0) for name in ("response_timeout", "sync_timeout")]
    penalty, waited = engine.pool.servers[0].penalty, sum(timeouts)
    assert penalty >= waited if waited else penalty == 0  # it doubles with each failure in a row
    fleet[1].kill()
    assert responses(engine.generate(FEW)) == later
    assert fleet[0].version == engine.transfer.version


def test_a_server_is_given_longer_to_be_healthy_while_it_works_on_prompts(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not listen while it writes a long answer. An idle server that does not is excluded soon."""
    monkeypatch.setattr(pool, "RENEW", 0.05)
    monkeypatch.setattr(pool, "HEALTH_TIMEOUT", 0.3)
    engine, written = fleet.open(1), threading.Event()

    def wait(body: dict[str, Any]) -> None:
        written.wait(120)

    def write(body: dict[str, Any]) -> None:
        written.wait(0.1)  # in which a check of the idle server ends
        fleet[0].hooks["/health"] = wait
        written.wait(0.8)
        written.set()

    fleet[0].hooks[GENERATE] = write
    assert engine.generate(FEW[:1])
    assert not engine.notes
    fleet[0].hooks["/health"] = fleet.hang
    wait_until(lambda: lost(engine))


def test_every_prompt_that_a_server_left_unanswered_has_failed(fleet: Fleet) -> None:
    """The first of them excludes the server. If only that one had failed, the same could repeat for hours."""
    engine, asked = fleet.open(1, response_timeout=0.2), Counter[str]()

    def count_and_hang(body: dict[str, Any]) -> None:
        if not is_trial(body) and asked[str(body["token_ids"])] < ATTEMPTS:
            asked[str(body["token_ids"])] += 1
            fleet.hang(body)

    fleet[0].hooks[GENERATE] = count_and_hang
    with pytest.raises(RolloutError, match=f"a prompt failed {ATTEMPTS} times"):
        engine.generate(FEW[:4])
    assert sorted(asked.values()) == [ATTEMPTS] * 4


def test_a_server_that_restarts_unasked_gets_the_weights_again(
    fleet: Fleet, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is asked with the key that it has then."""
    monkeypatch.setattr(pool, "RENEW", 0.1)
    monkeypatch.setenv("MY_KEY", "first")
    engine = fleet.open(key_env="MY_KEY")
    engine.update_weights(moved(policy).items())
    wanted = responses(engine.generate(FEW))
    monkeypatch.setenv("MY_KEY", "second")
    restart(fleet, None)
    wait_until(lambda: fleet[0].version == engine.transfer.version and not lost(engine))
    assert [server.asked[-1][2]["Authorization"] for server in fleet.servers] == ["Bearer second", "Bearer first"]
    fleet[1].kill()
    assert responses(engine.generate(FEW)) == wanted


def test_servers_killed_and_restarted_at_random_moments(fleet: Fleet, policy: Policy) -> None:
    engine, dice = fleet.open(), random.Random(1)
    engine.update_weights(moved(policy).items())
    wanted = responses(engine.generate(REQUESTS))

    def slow_down(body: dict[str, Any]) -> None:
        fleet.over.wait(0.02)

    def kill_often() -> bool:
        for _ in range(8):
            victim = dice.choice(fleet.servers)
            for act in (victim.kill, victim.start):
                time.sleep(dice.uniform(0.01, 0.08))
                act()
        return True

    fleet.hook(slow_down)
    killed = in_thread(kill_often)
    for _ in range(3):
        assert responses(engine.generate(REQUESTS)) == wanted
    assert killed()
    assert responses(engine.generate(REQUESTS)) == wanted


def test_a_server_whose_requests_time_out_is_excluded_for_as_long_and_then_longer(fleet: Fleet) -> None:
    engine = fleet.open(response_timeout=2.0)
    server, _ = engine.pool.servers
    fleet[0].hooks[GENERATE] = lambda body: None if is_trial(body) else fleet.hang(body)
    assert engine.generate(FEW)
    assert server.penalty == 2.0
    wait_until(lambda: server in engine.pool.ready)
    assert time.monotonic() >= server.out_until
    server.penalty = 1000.0
    assert engine.generate(FEW)
    assert server.penalty == 2002.0
    fleet[0].hooks.clear()
    fleet[1].kill()  # then it is tried at once
    assert engine.generate(FEW)
    assert (server.rest, server.error) == (0.0, None)
    assert time.monotonic() < server.out_until


def test_a_hung_server_stalls_one_sync_and_comes_back_by_itself(fleet: Fleet, policy: Policy) -> None:
    engine = fleet.open(sync_timeout=2.0)
    fleet[0].hooks[UPDATE] = fleet.hang
    stalled = []
    for _ in range(3):
        began = time.monotonic()
        engine.update_weights(policy.named_weights())
        stalled.append(time.monotonic() - began >= 2.0)
        assert engine.generate(FEW)
    assert stalled == [True, False, False]
    fleet[0].hooks.clear()
    fleet.over.set()
    wait_until(lambda: not lost(engine))  # though nobody asks it for anything
    assert fleet[0].version == engine.transfer.version


def test_a_server_that_loads_more_slowly_than_steps_follow_gets_in(fleet: Fleet, policy: Policy) -> None:
    engine = fleet.open()

    def load_slowly(body: dict[str, Any]) -> Answer:
        fleet[0].engine.update_weights(load_file(body["args"][0]).items())
        loaded = engine.updates
        wait_until(lambda: engine.updates > loaded or not lost(engine))
        return 200, {}

    fleet[0].kill()
    engine.update_weights(policy.named_weights())
    fleet[0].hooks[UPDATE] = load_slowly
    fleet[0].start()
    loaded = fleet[0].seen(UPDATE)
    while lost(engine):
        engine.update_weights(policy.named_weights())
        assert engine.updates < 1000
    assert fleet[0].seen(UPDATE) > loaded + 1


def hold_trials(server: FakeServer) -> tuple[threading.Event, threading.Event]:
    """Return what is set when a trial is there, and what lets it go on. The first prompt fails."""
    there, go_on, fails = threading.Event(), threading.Event(), iter([True])

    def hook(body: dict[str, Any]) -> Answer | None:
        if is_trial(body):
            there.set()
            go_on.wait(120)
            return None
        return (500, {}) if next(fails, False) else None

    server.hooks[GENERATE] = hook
    return there, go_on


def test_weights_that_are_published_during_the_only_servers_trial_are_sent(fleet: Fleet, policy: Policy) -> None:
    engine = fleet.open(1)
    there, go_on = hold_trials(fleet[0])
    found = in_thread(lambda: engine.generate(FEW))
    assert there.wait(120)
    synced = in_thread(lambda: engine.update_weights(policy.named_weights()) or True)
    wait_until(lambda: engine.updates == 2)
    go_on.set()
    versions = {span.version for group in found() for one in group for span in one.versions}
    assert 2 in versions <= {1, 2}
    assert synced()


def test_another_rank_does_not_use_a_server_with_old_weights_after_its_trial(fleet: Fleet) -> None:
    """Rank 0 sent newer weights during the trial."""
    engine = fleet.open(1)
    engine.transfer.world = World(1, Layout(2))
    there, go_on = hold_trials(fleet[0])
    found = in_thread(lambda: engine.generate(FEW))
    assert there.wait(120)
    engine.updates, fleet[0].version = 2, f"{engine.token}:2"
    engine.transfer._published = (fleet[0].version, None)
    run(engine.pool.follow([fleet[0].url]))
    go_on.set()
    wait_until(lambda: not lost(engine))
    assert engine.pool.ready == engine.pool.present
    assert len(found()) == len(FEW)


def test_a_server_that_is_back_has_to_be_probed_with_the_present_weights(fleet: Fleet, policy: Policy) -> None:
    """It came back while newer weights were published."""
    engine = fleet.open()
    there, go_on = hold_trials(fleet[0])
    engine.generate(REQUESTS)
    assert there.wait(120)
    engine.update_weights(policy.named_weights())
    go_on.set()
    wait_until(lambda: len(engine.pool.ready) == 2)
    assert engine.is_unprobed
    assert len(engine.answers_to_probe(FEW, engine.world)) == 2
    assert not engine.is_unprobed
    fleet[0].hooks[GENERATE] = lambda body: (500, {})
    assert len(engine.answers_to_probe(FEW, engine.world)) == 1
    assert lost(engine)[0].is_unprobed
    fleet[1].hooks[GENERATE] = lambda body: None if is_trial(body) or len(lost(engine)) == 2 else (500, {})
    fleet[0].hooks.clear()
    assert len(engine.answers_to_probe(FEW, engine.world)) == 1  # by whichever is back


def test_a_prompt_that_fails_at_every_server_ends_the_run_after_its_attempts(fleet: Fleet) -> None:
    engine, poison = fleet.open(), list(FEW[5].prompt.token_ids)
    fleet.hook(lambda body: (500, {}) if body["token_ids"] == poison else None)
    with pytest.raises(RolloutError):
        engine.generate(FEW)
    for server in fleet.servers:
        assert sum(body.get("token_ids") == poison for _, body, _ in server.asked) == ATTEMPTS


def test_a_prompt_that_one_server_cannot_answer_is_left_to_the_other(fleet: Fleet) -> None:
    engine = fleet.open(sync_timeout=2.0)
    wanted = responses(engine.generate(REQUESTS))
    poison, failures, enough = list(PROMPTS[6].token_ids), count(1), threading.Event()

    def fail(body: dict[str, Any]) -> Answer | None:
        if body["token_ids"] != poison:
            return None
        if next(failures) == ATTEMPTS:
            enough.set()
        return 400, {}

    fleet[0].hooks[GENERATE] = fail

    def wait_for_more(body: dict[str, Any]) -> None:
        enough.wait(120)
        wait_until(lambda: not lost(engine))
        fleet.over.wait(0.1)  # in which it would be asked once more

    fleet[1].hooks[GENERATE] = wait_for_more
    assert responses(engine.generate(REQUESTS)) == wanted
    assert next(failures) == ATTEMPTS + 1
    fleet[1].kill()  # then it waits, and not for ever
    with refused("rollout.server.sync_timeout", RolloutError):
        engine.generate(REQUESTS)


def test_a_crash_counts_against_one_of_the_prompts_in_progress(fleet: Fleet) -> None:
    """The second prompt is in progress whenever the first crashes the server, and crashes it afterwards itself."""
    engine, asked, second = fleet.open(1), Counter[str](), threading.Semaphore(0)
    names = {prompt.token_ids: prompt.id for prompt in PROMPTS[:2]}

    def crash(body: dict[str, Any]) -> Answer | None:
        name = names.get(tuple(body["token_ids"]), "trial")
        asked[name] += 1
        if name == "0" and asked[name] < ATTEMPTS:
            second.acquire(timeout=120)
            return 500, {}
        if name == "1" and asked[name] < ATTEMPTS:
            second.release()
            fleet.hang(body)
        return (500, {}) if name == "1" and asked[name] == ATTEMPTS else None

    fleet[0].hooks[GENERATE] = crash
    assert all(engine.generate(FEW[:2]))
    assert asked["0"] >= ATTEMPTS
    assert asked["1"] == ATTEMPTS + 1


class Unforeseen(FileTransfer):
    async def _load(self, server: Server, held: Any, *, is_halfway: bool) -> None:
        if str(self.version).endswith(":2"):
            raise ValueError("unforeseen")
        await super()._load(server, held, is_halfway=is_halfway)


@pytest.mark.parametrize("wait", ["sync", "unforeseen", "prompts", "start"])
def test_a_wait_for_no_server_ends(wait: str, fleet: Fleet, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    if wait == "unforeseen":
        monkeypatch.setitem(TRANSFERS, "file", Unforeseen)
    engine = fleet.open(sync_timeout=1.0)
    if wait == "sync":
        fleet.hook(fleet.hang, UPDATE)
    elif wait != "unforeseen":
        for server in fleet.servers:
            server.kill()
    calls = {"prompts": lambda: engine.generate(FEW), "start": lambda: fleet.open(sync_timeout=1.0)}
    with refused("rollout.server.sync_timeout", RolloutError):
        calls.get(wait, lambda: engine.update_weights(policy.named_weights()))()


def test_servers_that_refuse_the_run_are_not_waited_for(fleet: Fleet, policy: Policy) -> None:
    """One has another model. Then the other has another key, then its own again."""
    fleet[0].config.num_hidden_layers = 99
    engine = fleet.open()
    wanted = responses(engine.generate(FEW))
    assert [server.url for server in lost(engine)] == [fleet[0].url]
    fleet[1].hooks |= dict.fromkeys(FOREIGN, lambda body: (401, {}))
    calls: list[Callable[[], Any]] = [
        lambda: engine.generate(FEW),
        lambda: engine.update_weights(policy.named_weights()),
        fleet.open,
    ]
    for call in calls:  # `sync_timeout` is ten minutes
        with refused("rollout.server.urls", RolloutError, parts=["num_hidden_layers 2, got 99", "401"]) as caught:
            call()
        assert not re.search(naming("rollout.server.sync_timeout"), str(caught.value))
    fleet[1].hooks.clear()
    wait_until(lambda: len(lost(engine)) == 1)
    fleet[1].kill()  # for this one they wait
    found = in_thread(lambda: responses(engine.generate(FEW)))
    wait_until(lambda: len(lost(engine)) == 2)
    fleet[1].start()
    assert found() == wanted
    wait_until(lambda: engine.pool.servers[0].rest >= 8 * pool.REST)  # it is tried less and less


@pytest.mark.parametrize(("dtype", "excluded"), [("float32", 0), ("bfloat16", 1)])
def test_a_server_in_another_dtype_is_refused(dtype: str, excluded: int, fleet: Fleet) -> None:
    fleet[0].dtype = "bfloat16"
    (server,) = lost(fleet.open(dtype=dtype))
    assert server.url == fleet[excluded].url
    assert dtype in str(server.error)


@pytest.mark.parametrize(("limit", "needed"), [("max_model_len", 96), ("max_num_seqs", 8), ("priorities", 1)])
def test_a_server_with_lower_limits_is_refused(limit: str, needed: int, fleet: Fleet) -> None:
    """It was started for another recipe, and would end responses early, refuse groups or ignore priorities."""
    fleet[0].limits, fleet[1].limits = {limit: needed - 1}, {limit: needed}
    (server,) = lost(fleet.open(ahead=1))
    assert server.url == fleet[0].url
    assert f"'{limit}': {needed - 1}" in str(server.error)


def test_a_key_that_is_refused_ends_the_run_and_is_not_shown(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    engine, poison = fleet.open(1, key_env="MY_KEY"), list(FEW[0].prompt.token_ids)
    fleet.hook(lambda body: (401, {"error": "Bearer s3cret"}) if body["token_ids"] == poison else None)
    fleet[0].hooks[CLAIM] = lambda body: (401, {}) if any(one.error for one in engine.pool.servers) else None
    with pytest.raises(RolloutError, match="MY_KEY") as caught:
        engine.generate(FEW[:1])
    assert "s3cret" not in str(caught.value)
    assert sum(body.get("token_ids") == poison for _, body, _ in fleet[0].asked) == 1
    assert all(headers["Authorization"] == "Bearer s3cret" for *_, headers in fleet[0].asked)
