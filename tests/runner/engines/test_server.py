"""The server engine over healthy servers: what it asks, what it takes from the answers, and what it leaves behind."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_server import GENERATE, UPDATE, Answer, FakeServer
from served import PROMPTS, REQUESTS, SAMPLING, Fleet, in_thread, moved, responses, wait_until

from dapo_runner.engines import pool
from dapo_runner.engines.client import RolloutError, ServerError
from dapo_runner.engines.engine import OpenCall
from dapo_runner.engines.pool import Signal
from dapo_runner.http import run
from dapo_runner.parallel.world import Layout, World
from dapo_runner.policy.model import Policy
from dapo_runner.types import SamplingParams, make_requests


def test_which_server_answers_makes_no_difference(fleet: Fleet, policy: Policy) -> None:
    both = fleet.open()
    found = responses(both.generate(REQUESTS))
    assert all(server.seen(GENERATE) for server in fleet.servers)
    assert len({str(group) for group in found}) == len(PROMPTS)  # equal prompts do not share their dice
    assert responses(both.generate(REQUESTS[12:])) == found[12:]  # nor does it matter in which call they are
    both.close()
    one = fleet.open(1)
    one.update_weights(policy.named_weights())
    assert responses(one.generate(REQUESTS)) == found
    assert one.generate([]) == []
    (greedy,) = one.generate(make_requests(PROMPTS[:1], SamplingParams(n=3, temperature=0.0, max_tokens=6)))
    assert responses([greedy]) == [[responses([greedy])[0][0]] * 3]
    assert greedy[0].text == one.tokenizer.decode(greedy[0].token_ids.tolist(), skip_special_tokens=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, -9999.0])
def test_a_log_prob_that_is_missing_is_unknown(value: float | None, fleet: Fleet) -> None:
    engine = fleet.open(1)

    def spoil(body: dict[str, Any]) -> Answer:
        answer = fleet[0].generate(body)
        answer["choices"][-1]["logprobs"]["content"][0]["logprob"] = value
        return 200, answer

    fleet[0].hooks[GENERATE] = spoil
    for other, spoiled in engine.generate(REQUESTS[:2]):
        assert spoiled.logprobs.isnan().tolist() == [True] + [False] * (spoiled.length - 1)
        assert other.logprobs.isfinite().all()
    assert not engine.notes


@pytest.mark.parametrize("wrong", ["missing", float("nan"), float("-inf")])
def test_weights_that_cannot_be_used_are_not_sent(wrong: Any, fleet: Fleet, policy: Policy) -> None:
    engine = fleet.open()
    version, wanted = fleet[0].version, responses(engine.generate(REQUESTS[:2]))
    weights = {name: tensor.clone() for name, tensor in policy.named_weights()}
    name = list(weights)[3]
    if wrong == "missing":
        del weights[name]
    else:
        weights[name].flatten()[-1] = wrong
    with pytest.raises(ValueError if wrong == "missing" else RolloutError, match=name):
        engine.update_weights(weights.items())
    assert [server.seen(UPDATE) for server in fleet.servers] == [1, 1]
    assert fleet[0].version == version
    assert responses(engine.generate(REQUESTS[:2])) == wanted


def test_a_paused_server_with_the_present_weights_is_resumed(fleet: Fleet) -> None:
    """It was lost between its new weights and their last request."""
    engine = fleet.open(1)
    fleet[0].paused = True
    assert run(engine.transfer.send(engine.pool.servers[0])) == engine.transfer.version
    assert not fleet[0].paused


def test_syncs_leave_nothing_behind(fleet: Fleet, policy: Policy) -> None:
    engine = fleet.open(1)

    def sync(times: int) -> list[float]:
        """Return MiB of memory, threads and open files afterwards."""
        for _ in range(times):
            engine.update_weights(policy.named_weights())
            fleet[0].asked.clear()
        gc.collect()  # garbage in cycles is not held
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        held = threading.active_count(), len(os.listdir("/proc/self/fd"))
        return [pages * os.sysconf("SC_PAGE_SIZE") / 2**20, *held]

    before = sync(10)
    after = sync(50)  # of weights of 90 kB
    assert after[0] - before[0] < 4
    assert after[1] <= before[1] + 2  # connections that the server is just closing
    assert after[2] <= before[2] + 2
    assert len(list(engine.transfer.folder.glob("*.safetensors"))) == 1
    folder = engine.transfer.folder
    engine.close()
    assert not folder.exists()
    with pytest.raises(RolloutError):
        engine.generate(REQUESTS)
    assert not engine.calls


@pytest.mark.parametrize("path", [GENERATE, UPDATE])
def test_ctrl_c_waits_for_no_server(path: str, fleet: Fleet, policy: Policy) -> None:
    engine, n_threads = fleet.open(), threading.active_count()
    fleet.hook(fleet.hang, path)
    n_asked = fleet[0].seen(path)

    def interrupt_once_it_hangs(*_: Any) -> None:
        if fleet[0].seen(path) > n_asked:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt_once_it_hangs)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)  # again and again: a signal just before a wait does not end it
        with pytest.raises(KeyboardInterrupt):
            engine.generate(REQUESTS) if path == GENERATE else engine.update_weights(policy.named_weights())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not engine.calls
    fleet.over.set()
    engine.close()
    wait_until(lambda: threading.active_count() <= n_threads)


def hold_halfway(servers: list[FakeServer]) -> tuple[threading.Barrier, threading.Event]:
    """Return where to meet the servers in the midst of their first answers, and what lets them go on."""
    half, go_on = threading.Barrier(3), threading.Event()

    for server in servers:
        first = iter([True])

        def halfway(first: Iterator[bool] = first) -> None:
            if next(first, False):
                half.wait(120)
            go_on.wait(120)

        server.halfway = halfway
    return half, go_on


def test_weights_in_flight(fleet: Fleet, policy: Policy) -> None:
    """A response goes on with the new weights, and has the version of each token."""
    engine = fleet.open(ahead=1)
    engine.update_weights(policy.named_weights())
    half, go_on = hold_halfway(fleet.servers)
    found = in_thread(lambda: engine.generate(REQUESTS, priority=0))
    half.wait(120)
    engine.update_weights(moved(policy).items())
    probed = in_thread(lambda: engine.generate(REQUESTS[:1]))
    go_on.set()
    assert probed()
    every = [one for group in found() for one in group]
    versions = {tuple(span.version for span in one.versions) for one in every}
    assert (2, 3) in versions
    assert versions <= {(2,), (2, 3), (3,), (3, 3)}
    assert all(sum(span.length for span in one.versions) == one.length for one in every)
    asked = [(path, body) for server in fleet.servers for path, body, _ in server.asked]
    assert {body.get("priority", 0) for path, body in asked if path == GENERATE} == {0, -1}
    assert {body["mode"] for path, body in asked if path == "/pause"} == {"keep"}
    assert all(body["reset_running_requests"] for path, body in asked if path == "/reset_prefix_cache")


def test_without_partial_responses_end_before_the_new_weights(fleet: Fleet, policy: Policy) -> None:
    engine = fleet.open(ahead=1, partial=False)
    half, go_on = hold_halfway(fleet.servers)
    found = in_thread(lambda: engine.generate(REQUESTS))
    half.wait(120)
    updated = in_thread(lambda: engine.update_weights(moved(policy).items()))
    wait_until(lambda: all(server.seen("/pause") > 1 for server in fleet.servers))
    assert not any(server.seen(UPDATE) > 1 for server in fleet.servers)
    go_on.set()
    updated()
    versions = [{span.version for span in one.versions} for group in found() for one in group]
    assert sorted(map(min, versions)) == sorted(map(max, versions))
    assert {min(own) for own in versions} == {1, 2}
    assert {body["mode"] for path, body, _ in fleet[0].asked if path == "/pause"} == {"wait"}
    assert engine.transfer.pause_timeout == engine.config.rollout.request_timeout  # of which earlier rounds take a part


def test_requests_refused_during_an_update_are_submitted_again(fleet: Fleet, policy: Policy) -> None:
    """vLLM 0.33 refuses requests that reach it during a pause, unless its mode is keep. No server is lost by that."""
    engine, first, refused = fleet.open(ahead=1, partial=False), fleet[0].version, set[FakeServer]()

    def arrive_late(server: FakeServer, body: dict[str, Any]) -> Answer | None:
        if server.version != first:
            return None
        refused.add(server)
        wait_until(lambda: server.paused or server.version != first)
        return 503, {"error": {"message": "Generation is paused. Please retry after it resumes.", "code": 503}}

    for server in fleet.servers:
        server.hooks[GENERATE] = partial(arrive_late, server)
    found = in_thread(lambda: engine.generate(REQUESTS))
    wait_until(lambda: len(refused) == len(fleet.servers))
    engine.update_weights(moved(policy).items())
    assert {span.version for group in found() for one in group for span in one.versions} == {2}
    assert not engine.notes


def test_one_slow_prompt_holds_back_its_own_round_alone(fleet: Fleet) -> None:
    engine, seeds = fleet.open(ahead=1), [replace(SAMPLING, seed=number) for number in range(3)]
    rounds = [make_requests(PROMPTS, sampling) for sampling in seeds]
    wanted = [responses(engine.generate(requests)) for requests in rounds]
    slow, others = list(PROMPTS[4].token_ids), threading.Event()

    def hold(body: dict[str, Any]) -> None:
        if (body["priority"], body["token_ids"]) == (0, slow):
            others.wait(120)

    fleet.hook(hold)
    first, *later = (
        in_thread(lambda number=number: engine.generate(rounds[number], priority=number)) for number in range(3)
    )
    assert [responses(answers()) for answers in later] == wanted[1:]
    others.set()
    assert responses(first()) == wanted[0]


def test_a_request_may_wait_behind_those_of_the_rounds_before(fleet: Fleet) -> None:
    engine = fleet.open(ahead=19, response_timeout=0.5)  # 10 s with those

    def wait(body: dict[str, Any]) -> None:
        fleet.over.wait(0.8)

    fleet.hook(wait)
    assert all(engine.generate(REQUESTS[:4]))
    assert not engine.notes


@pytest.mark.parametrize(("priority", "wanted"), [(None, 4), (0, 8)])
def test_who_samples_asynchronously_asks_for_all_ranks(fleet: Fleet, priority: int | None, wanted: int) -> None:
    """Two batches at a time, of which each of two ranks would ask for half."""
    engine = fleet.open(1, ahead=1)
    engine.world = World(0, Layout(2))
    fleet.hook(fleet.hang)
    n_before = fleet[0].seen(GENERATE)
    found = in_thread(lambda: engine.generate(REQUESTS, priority=priority))
    wait_until(lambda: fleet[0].seen(GENERATE) - n_before >= wanted)
    time.sleep(0.05)  # in which more would come
    assert fleet[0].seen(GENERATE) - n_before == wanted
    fleet.over.set()
    assert all(found())


def test_connections_stay_below_the_limit_of_open_files(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised as far as it may be, and half of it is for other files."""
    limits = [2, 8]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(2), new))
    engine = fleet.open()
    assert limits == [8, 8]
    fleet.hook(fleet.hang)
    found = in_thread(lambda: engine.generate(REQUESTS))
    wait_until(lambda: sum(server.seen(GENERATE) for server in fleet.servers) >= 4)
    time.sleep(0.05)  # in which more would come
    assert sum(server.seen(GENERATE) for server in fleet.servers) == 4
    fleet.over.set()
    assert all(found())


def test_an_open_call_takes_prompts_while_others_are_answered(fleet: Fleet) -> None:
    engine, woken = fleet.open(), threading.Semaphore(0)
    call = engine.open_call(None, woken.release, 4)
    (request,) = make_requests(PROMPTS[:1], replace(SAMPLING, n=1))
    ((wanted,),) = engine.generate([request])
    found: dict[int, Any] = {}
    for key in (3, 7):
        call.add(key, request)
        assert woken.acquire(timeout=120)
        assert call.is_ready(is_complete=False)
        found |= call.work()
        assert not call.is_ready(is_complete=True)
    assert responses([[found[3], found[7]]]) == responses([[wanted, wanted]])
    held = call._call  # type: ignore[attr-defined]
    assert (held.bodies, held.answers) == ([{}, {}], {0: [], 1: []})  # what an episode has taken is released
    call.close()
    wait_until(lambda: call.is_ready(is_complete=True))
    with pytest.raises(RolloutError):
        call.work()


ONE = replace(REQUESTS[0], sampling=replace(SAMPLING, n=1))


def take(call: OpenCall, n: int) -> set[int]:
    """Return the keys of ``n`` answers."""
    found = set[int]()

    def is_complete() -> bool:
        found.update(key for key, _ in call.work())
        return len(found) == n

    wait_until(is_complete)
    return found


def test_a_request_wakes_up_one_idle_task_and_an_answer_none(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    woken, wait = list[object](), asyncio.Event.wait

    async def count_and_wait(event: asyncio.Event) -> bool:
        found = await wait(event)
        woken.append(event)
        return found

    monkeypatch.setattr(asyncio.Event, "wait", count_and_wait)
    engine = fleet.open()
    call = engine.open_call(None, lambda: None, 16)  # 16 tasks for each server
    for key in range(10):
        call.add(key, ONE)
        assert take(call, 1) == {key}
    assert 10 <= len(woken) < 50  # with those that wait for new weights, or to renew a claim


def test_no_task_sleeps_while_a_request_waits(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "RENEW", 1000.0)  # what a server does by itself would wake them up
    engine = fleet.open()
    call = engine.open_call(None, lambda: None, 16)
    first, _ = engine.pool.servers

    async def lose(*added: int) -> None:
        for key in added:
            call.add(key, ONE)
        await asyncio.sleep(0)  # a task of the first server has been woken up, and has not run
        engine.pool.lose(first, ServerError("lost"))

    run(lose(0))
    assert take(call, 1) == {0}
    wait_until(lambda: len(engine.pool.ready) == 2)
    monkeypatch.setattr(pool, "REST", 1000.0)
    first.rest = 0.0
    before = [server.seen(GENERATE) for server in fleet.servers]
    fleet[0].hooks[GENERATE] = fleet.hang
    for key in range(8):  # at once
        call.add(key, ONE)
    wait_until(lambda: sum(server.seen(GENERATE) for server in fleet.servers) == sum(before) + 8)
    n_held = fleet[0].seen(GENERATE) - before[0]
    assert n_held > 1
    take(call, 8 - n_held)
    run(lose())  # the other server is idle, and takes all requests
    take(call, n_held)


def test_a_signal_wakes_up_those_whose_condition_is_true_longest_wait_first() -> None:
    async def wake() -> None:
        changed, part, true, returned = Signal(), Signal(), set[str](), list[str]()
        changed.parts.add(part)

        async def wait(name: str, by: Signal, within: float | None = None) -> None:
            await by.wait_until(lambda: name in true, within)
            returned.append(name)

        tasks = [asyncio.create_task(wait(name, part if name == "d" else changed)) for name in "abcd"]
        await wait("late", changed, 0.01)
        true.update("bcd")
        changed.set(at_most=1)
        await asyncio.sleep(0.01)
        assert returned == ["late", "b", "d"]
        true.symmetric_difference_update("abcd")
        changed.set()
        true.clear()  # before the task runs
        await asyncio.sleep(0.01)
        assert returned == ["late", "b", "d"]
        true.update("ac")
        changed.set()
        await asyncio.gather(*tasks)
        assert returned == ["late", "b", "d", "c", "a"]

    run(wake())


@pytest.mark.parametrize("turns", range(4))
def test_a_wait_that_is_cancelled_as_it_ends_does_not_go_on(turns: int) -> None:
    """Else an engine that is closed at that moment goes on to claim servers. ``turns`` are of the event loop."""

    async def cancel() -> tuple[bool, bool]:
        changed, true = Signal(), set[str]()
        task = asyncio.create_task(changed.wait_until(lambda: true, 60.0))
        await asyncio.sleep(0.01)
        true.add("a")
        changed.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        is_cancelled = task.cancel()
        await asyncio.wait([task])
        return is_cancelled, task.cancelled()

    expected, found = run(cancel())
    assert found == expected
