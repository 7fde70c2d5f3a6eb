"""Servers asked ahead of the training, and for more than it needs: who answers when, and by which weights."""

from __future__ import annotations

import importlib
import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import make_config, make_sample
from fake_server import GENERATE, UPDATE, FakeServer, Hook
from served import PROMPTS, SAMPLING, Fleet, moved, steps_of, told, wait_until

from dapo_runner.config import parse_config
from dapo_runner.data.dataset import PromptCursor
from dapo_runner.logging.progress import Progress
from dapo_runner.parallel.world import Layout, World
from dapo_runner.policy.model import Policy
from dapo_runner.rollout import server as server_module
from dapo_runner.rollout.asynchronous import AsynchronousSampler
from dapo_runner.rollout.group_buffer import GroupBuffer
from dapo_runner.rollout.sampler import DynamicSampler
from dapo_runner.rollout.server import ServerEngine
from dapo_runner.run.builders import make_asynchronous
from dapo_runner.train import train
from dapo_runner.types import CallOptions, Group, Prompt, Sample, Verdict

ONE_AT_A_TIME = """
import threading

working, evaluating, overlaps, scored = threading.Lock(), threading.Event(), [], []

def judge(prompts, completions, rows):
    scored.append(threading.current_thread() is threading.main_thread())
    free = working.acquire(blocking=False)
    overlaps.extend([] if free else [scored[-1]])
    if scored[-1]:
        evaluating.set()
    elif scored.count(False) == 13:  # of the last step; the evaluation after another falls into it, were it let in
        evaluating.clear()
        evaluating.wait(5)
    if free:
        working.release()
    return [float(len(completion.text) % 2) for completion in completions]
"""


def test_training_and_evaluation_call_one_reward_one_after_the_other(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one_at_a_time.py").write_text(ONE_AT_A_TIME)
    monkeypatch.syspath_prepend(tmp_path)
    raw = fleet.recipe(2, steps=4, eval_every=1)
    raw["reward"] |= {"kind": "one_at_a_time:judge"}
    train(parse_config(raw), Progress())
    one_at_a_time = importlib.import_module("one_at_a_time")
    assert one_at_a_time.scored.count(False) == 16
    assert one_at_a_time.scored.count(True) > 16
    assert one_at_a_time.overlaps == []


def start(call: Callable[[], Any]) -> Callable[[], Any]:
    """Call on another thread; return what waits for its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()

    def result() -> Any:
        thread.join(60)
        return found[0]

    return result


def hold_halfway(servers: list[FakeServer]) -> tuple[threading.Barrier, threading.Event]:
    """Where to meet the two servers in the midst of their first answers, and what has them go on."""
    half, go_on = threading.Barrier(3), threading.Event()
    for server in servers:
        first = iter([True])

        def halfway(first: Iterator[bool] = first) -> None:
            if next(first, False):
                half.wait(60)
            go_on.wait(60)

        server.halfway = halfway
    return half, go_on


def test_weights_in_flight(fleet: Fleet, policy: Policy) -> None:
    """A response goes on with the new weights, and says which gave which token."""
    engine = fleet.open(ahead=1)
    engine.update_weights(policy.named_weights())
    half, go_on = hold_halfway(fleet.servers)
    found = start(lambda: engine.generate(PROMPTS, SAMPLING, CallOptions(0)))
    half.wait(60)
    engine.update_weights(moved(policy).items())
    probed = start(lambda: engine.generate(PROMPTS[:1], SAMPLING))
    go_on.set()
    assert probed()
    responses = [one for group in found() for one in group]
    priorities = {
        body.get("priority", 0) for server in fleet.servers for path, body, _ in server.asked if path == GENERATE
    }
    assert priorities == {0, -1}
    versions = {tuple(span.version for span in one.versions) for one in responses}
    assert (2, 3) in versions
    assert versions <= {(2,), (2, 3), (3,), (3, 3)}
    assert all(sum(span.length for span in one.versions) == one.length for one in responses)
    assert any("mode=keep" in path for path in fleet[0].queries)


def test_without_partial_responses_end_before_the_new_weights(fleet: Fleet, policy: Policy) -> None:
    engine = fleet.open(ahead=1, partial=False)
    half, go_on = hold_halfway(fleet.servers)
    found = start(lambda: engine.generate(PROMPTS, SAMPLING))
    half.wait(60)
    updated = start(lambda: engine.update_weights(moved(policy).items()))
    wait_until(lambda: all(server.seen("/pause") > 1 for server in fleet.servers))
    assert not any(server.seen(UPDATE) > 1 for server in fleet.servers)
    go_on.set()
    updated()
    versions = [{span.version for span in one.versions} for group in found() for one in group]
    assert sorted(map(min, versions)) == sorted(map(max, versions))
    assert {min(own) for own in versions} == {1, 2}
    assert any("mode=wait" in path for path in fleet[0].queries)


def steps_ahead(engine: ServerEngine, in_flight: int, lead: int = 1) -> list[list[tuple[str, list[list[int]]]]]:
    """Prompts and responses of the steps that a run ahead would train on, a round for each."""

    def scored(prompts: list[Prompt], round_number: int) -> list[Group]:
        found = engine.generate(prompts, replace(SAMPLING, seed=round_number), CallOptions(priority=round_number))
        return [
            Group(prompt, tuple(Sample(one, Verdict(True), 1.0) for one in answers))
            for prompt, answers in zip(prompts, found, strict=True)
        ]

    sampler = DynamicSampler(PromptCursor(PROMPTS, seed=0), GroupBuffer(make_config(sampler={"filter_groups": False})))
    ahead = AsynchronousSampler(sampler, lead, 6, 60.0, in_flight)
    taken = [ahead.next(scored).groups for _ in range(6)]
    ahead.close()
    return [
        [(one.prompt.id, [sample.completion.token_ids.tolist() for sample in one.samples]) for one in groups]
        for groups in taken
    ]


@pytest.mark.parametrize("lead", [1, 2])
def test_one_slow_prompt_holds_back_its_own_round_alone(fleet: Fleet, lead: int) -> None:
    """It is trained on in its turn, before those of the next rounds, which were all answered first."""
    engine = fleet.open(ahead=1)
    wanted = steps_ahead(engine, 1)
    (slow, *_), *rounds = ([list(PROMPTS[int(name)].token_ids) for name, _ in step] for step in wanted[2 : 3 + lead])
    later = list(itertools.chain(*rounds))
    answered, order = threading.Semaphore(0), list[bool]()

    def hold(server: FakeServer) -> Hook:
        def hook(body: dict[str, Any]) -> tuple[int, Any]:
            if body["token_ids"] == slow:
                order.extend(answered.acquire(timeout=30) for _ in later)
            answer = server.generate(body)
            if body["token_ids"] in later:
                answered.release()
            return 200, answer

        return hook

    for server in fleet.servers:
        server.hooks[GENERATE] = hold(server)
    assert steps_ahead(engine, lead + 1, lead) == wanted
    assert order == [True] * (4 * lead)
    asked = [body for server in fleet.servers for _, body, _ in server.asked if body.get("token_ids") == slow]
    assert {body["priority"] for body in asked} == {2}


@pytest.mark.parametrize(("ahead", "partial", "rounds"), [(1, True, 2), (3, True, 4), (3, False, 1)])
def test_how_many_rounds_are_in_flight(ahead: int, partial: bool, rounds: int) -> None:
    correction = {"weights": "token"}
    rollout = {"engine": "server", "max_staleness": ahead, "partial": partial, "correction": correction}
    config = make_config(rollout=rollout, sampler={"max_age": ahead})
    sampler = DynamicSampler(PromptCursor(PROMPTS, seed=0), GroupBuffer(config))
    assert make_asynchronous(sampler, config).n_rounds == rounds


def test_a_request_may_wait_behind_those_of_the_rounds_before(fleet: Fleet) -> None:
    engine = fleet.open(ahead=19, answer_within=0.2)  # 4 s with those
    fleet.hook(lambda body: time.sleep(0.25))
    assert all(engine.generate(PROMPTS[:4], SAMPLING))
    assert not engine.notes


@pytest.mark.parametrize(("priority", "wanted"), [(None, 4), (0, 8)])
def test_who_samples_ahead_asks_for_all_ranks(fleet: Fleet, priority: int | None, wanted: int) -> None:
    """Two batches at a time, of which each of two ranks would ask for half."""
    engine = fleet.open(1, ahead=1)
    engine.world = World(0, Layout(2))
    changed, n_open, most = threading.Condition(), 0, 0

    def hold(body: dict[str, Any]) -> None:
        nonlocal n_open, most
        with changed:
            n_open += 1
            most = max(most, n_open)
            changed.notify_all()
            changed.wait_for(lambda: most >= wanted, 30)
        time.sleep(0.05)  # in which more would come
        with changed:
            n_open -= 1

    fleet[0].hooks[GENERATE] = hold
    assert all(engine.generate(PROMPTS, SAMPLING, CallOptions(priority=priority)))
    assert most == wanted


def test_servers_that_die_with_two_rounds_in_flight(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "ATTEMPTS", 20)
    engine = fleet.open(ahead=1)
    wanted, count, rounds = steps_ahead(engine, 1), iter(range(1000)), list[int]()

    def kill_now_and_then(body: dict[str, Any]) -> None:
        time.sleep(0.01)
        if next(count) % 4 == 2 and fleet[1].alive:
            rounds.append(len(engine.calls))
            fleet[1].kill()
            threading.Timer(0.02, fleet[1].start).start()

    fleet[0].hooks[GENERATE] = kill_now_and_then
    fleet[1].hooks[GENERATE] = lambda body: time.sleep(0.02)
    assert steps_ahead(engine, 2) == wanted
    assert max(rounds) == 2
    assert any(fleet[1].url in note for note in engine.notes), (engine.notes, next(count))


def test_what_still_runs_when_enough_is_answered_is_dropped(fleet: Fleet) -> None:
    """Three of four are needed; six of the first twelve prompts hang, and the call ends without them."""
    engine = fleet.open()
    wanted = told(engine.generate(PROMPTS, SAMPLING))
    slow = [list(prompt.token_ids) for prompt in PROMPTS[:12:2]]
    fleet.hook(lambda body: fleet.hang(body) if body["token_ids"] in slow else None)
    began = time.monotonic()
    found = told(engine.generate(PROMPTS, SAMPLING, CallOptions(completion_fraction=3 / 4)))
    assert time.monotonic() - began < 30  # of the sixty that they hang for
    assert [place for place, answers in enumerate(found) if not answers] == list(range(0, 12, 2))
    assert all(answers == own for answers, own in zip(found, wanted, strict=True) if answers)
    assert not engine.notes  # the servers are none the worse
    fleet.over.set()
    assert told(engine.generate(PROMPTS, SAMPLING)) == wanted


def test_a_run_that_asks_for_more_than_it_needs(fleet: Fleet) -> None:
    raw = fleet.recipe(steps=2, eval_every=2)
    raw["sampler"] |= {"oversample": 1.5}
    slow = itertools.cycle([True, False, False])
    is_group = lambda body: body["sampling_params"]["n"] == raw["rollout"]["group_size"]  # noqa: E731
    fleet.hook(lambda body: fleet.hang(body) if is_group(body) and next(slow) else None)
    first, second = steps_of(raw)
    assert (first["sampling/groups"], first["sampling/dropped"]) == (4, 2)
    assert first["batch/groups"] == second["batch/groups"] == 4


def test_quick_answers_do_not_jump_the_queue(fleet: Fleet) -> None:
    """Answers that take as long as they are long make up the steps that answers given at once do, lengths and all."""
    engine = fleet.open(ahead=1)

    def scored(prompts: list[Prompt], round_number: int) -> list[Group]:
        found = engine.generate(prompts, replace(SAMPLING, seed=round_number))
        shapes = [[(bool(one.token_ids[0] % 2), one.length) for one in group] for group in found]
        return [
            Group(prompt, tuple(make_sample(right, length=length) for right, length in shape))
            for prompt, shape in zip(prompts, shapes, strict=True)
        ]

    def steps() -> list[list[tuple[str, list[int]]]]:
        config = make_config(sampler={"max_rounds": 9, "on_exhausted": "train_partial"})
        ahead = AsynchronousSampler(DynamicSampler(PromptCursor(PROMPTS, seed=0), GroupBuffer(config)), 1, 4, 60.0)
        taken = [ahead.next(scored).groups for _ in range(4)]
        ahead.close()
        return [[(one.prompt.id, [s.completion.length for s in one.samples]) for one in groups] for groups in taken]

    def slowed(server: FakeServer) -> Hook:
        def hook(body: dict[str, Any]) -> tuple[int, Any]:
            answer = server.generate(body)
            time.sleep(0.01 * sum(len(choice["token_ids"]) for choice in answer["choices"]))
            return 200, answer

        return hook

    wanted = steps()
    assert len({sum(lengths) for groups in wanted for _, lengths in groups}) > 3
    for server in fleet.servers:
        server.hooks[GENERATE] = slowed(server)
    assert steps() == wanted


class Notes(Progress):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_run_ahead(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One server comes and goes; the run is taken up again where a step ahead had been sampled already."""
    raw, count = fleet.recipe(2, steps=4, eval_every=2, keep=4), iter(range(1000))

    def kill_now_and_then(body: dict[str, Any]) -> None:
        if next(count) % 20 == 12 and fleet[1].alive:
            fleet[1].kill()
            threading.Timer(0.02, fleet[1].start).start()

    fleet[0].hooks[GENERATE] = kill_now_and_then
    state_dict = AsynchronousSampler.state_dict

    def once_one_step_waits(self: AsynchronousSampler) -> dict[str, Any]:
        if self.step == 2:
            wait_until(lambda: self.metrics([])["ready_steps"])
        return state_dict(self)

    monkeypatch.setattr(AsynchronousSampler, "state_dict", once_one_step_waits)
    for step in steps_of(raw):
        assert step["batch/age_max"] <= 2
        assert 0 < step["train/rollout_ess"] <= 1
        assert step["sync/gap"] < 1e-5
        assert step["train/tokens"] > 0
    for late in ("step_000003", "step_000004"):
        shutil.rmtree(tmp_path / "small" / "checkpoints" / late)
    progress = Notes()
    again = steps_of(raw, progress)
    assert [step["step"] for step in again] == [1, 2, 3, 4]
    assert max(step["batch/age_max"] for step in again) > 0
    (left_over,) = (note for note in progress.notes if "groups are left over" in note)
    assert int(left_over.split()[0]) >= 4
    assert not any(thread.name in ("ahead", "rollout") for thread in threading.enumerate())
