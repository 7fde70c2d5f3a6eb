"""Servers asked ahead of the training, and for more than it needs: who answers when, and by which weights."""

from __future__ import annotations

import importlib
import itertools
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import make_config, make_sample
from fake_server import GENERATE, UPDATE, FakeServer, Hook
from served import PROMPTS, SAMPLING, moved, open_engine, told
from small import small_recipe

from dapo_runner.config import parse_config
from dapo_runner.data.dataset import PromptCursor
from dapo_runner.logging.metrics import read_log
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
from dapo_runner.types import CallOptions, Completion, Group, Prompt, Sample, Verdict

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
    tmp_path: Path, model_folder: Path, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one_at_a_time.py").write_text(ONE_AT_A_TIME)
    monkeypatch.syspath_prepend(tmp_path)
    raw = small_recipe(output_dir=str(tmp_path), steps=4, eval_every=1)
    raw["model"] = {"dtype": "float32", "path": str(model_folder)}
    raw["reward"] |= {"kind": "one_at_a_time:judge"}
    raw["sampler"] |= {"filter_groups": False, "max_age": 2}
    raw["rollout"] |= {
        "max_response_tokens": 6,
        "engine": "server",
        "server": {"urls": [server.url for server in servers], "folder": str(tmp_path)},
        "max_staleness": 2,
        "correction": {"weights": "token"},
    }
    train(parse_config(raw), Progress())
    one_at_a_time = importlib.import_module("one_at_a_time")
    assert one_at_a_time.scored.count(False) == 16
    assert one_at_a_time.scored.count(True) > 16
    assert one_at_a_time.overlaps == []


def hold_halfway(servers: list[FakeServer]) -> tuple[threading.Barrier, threading.Event]:
    """Where to meet the two servers in the midst of their first answers, and what has them go on."""
    half, go_on = threading.Barrier(3), threading.Event()
    for server in servers:
        first = iter([True])

        def halfway(first: Iterator[bool] = first) -> None:
            if next(first, False):
                half.wait(10)
            go_on.wait(10)

        server.halfway = halfway
    return half, go_on


def test_weights_in_flight(model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy) -> None:
    """A response goes on with the new weights, and says which gave which token."""
    engine = open_engine(model_folder, servers, tmp_path, ahead=1)
    engine.update_weights(policy.named_weights())
    half, go_on = hold_halfway(servers)
    found: list[list[list[Completion]]] = []
    thread = threading.Thread(target=lambda: found.append(engine.generate(PROMPTS, SAMPLING, CallOptions(0))))
    thread.start()
    half.wait(10)
    engine.update_weights(moved(policy).items())
    probing = threading.Thread(target=lambda: found.append(engine.generate(PROMPTS[:1], SAMPLING)))
    probing.start()
    go_on.set()
    probing.join(10)
    thread.join(10)
    assert {body.get("priority", 0) for server in servers for path, body, _ in server.asked if path == GENERATE} == {
        0,
        -1,
    }
    responses = [one for group in max(found, key=len) for one in group]
    stretches = {tuple(stretch.version for stretch in one.versions) for one in responses}
    assert (2, 3) in stretches
    assert stretches <= {(2,), (2, 3), (3,), (3, 3)}
    assert all(sum(stretch.length for stretch in one.versions) == one.length for one in responses)
    assert any("mode=keep" in path for path in servers[0].queries)


def test_without_partial_responses_end_before_the_new_weights(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy
) -> None:
    engine = open_engine(model_folder, servers, tmp_path, ahead=1, partial=False)
    half, go_on = hold_halfway(servers)
    found: list[list[Completion]] = []
    thread = threading.Thread(target=lambda: found.extend(engine.generate(PROMPTS, SAMPLING)))
    thread.start()
    half.wait(10)
    updating = threading.Thread(target=engine.update_weights, args=[moved(policy).items()])
    updating.start()
    updating.join(0.1)
    assert updating.is_alive()
    assert not any(server.seen(UPDATE) > 1 for server in servers)
    go_on.set()
    updating.join(10)
    thread.join(10)
    versions = [{stretch.version for stretch in one.versions} for group in found for one in group]
    assert sorted(map(min, versions)) == sorted(map(max, versions))
    assert {min(own) for own in versions} == {1, 2}
    assert any("mode=wait" in path for path in servers[0].queries)


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


def tokens_of(step: list[tuple[str, list[list[int]]]]) -> list[list[int]]:
    return [list(PROMPTS[int(name)].token_ids) for name, _ in step]


@pytest.mark.parametrize("lead", [1, 2])
def test_one_slow_prompt_holds_back_its_own_round_alone(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, lead: int
) -> None:
    """It is trained on in its turn, before those of the next rounds, which were all answered first."""
    engine = open_engine(model_folder, servers, tmp_path, ahead=1)
    wanted = steps_ahead(engine, 1)
    (slow, *_), *rounds = map(tokens_of, wanted[2 : 3 + lead])
    later = [tokens for tokens_of_round in rounds for tokens in tokens_of_round]
    answered, order = threading.Semaphore(0), list[bool]()

    def hold(server: FakeServer) -> Hook:
        def hook(body: dict[str, Any]) -> tuple[int, Any]:
            if body["token_ids"] == slow:
                order.extend(answered.acquire(timeout=10) for _ in later)
            answer = server.generate(body)
            if body["token_ids"] in later:
                answered.release()
            return 200, answer

        return hook

    for server in servers:
        server.hooks[GENERATE] = hold(server)
    assert steps_ahead(engine, lead + 1, lead) == wanted
    assert order == [True] * (4 * lead)
    first = {body["priority"] for server in servers for path, body, _ in server.asked if body.get("token_ids") == slow}
    assert first == {2}


def test_how_many_rounds_are_in_flight() -> None:
    for ahead, partial, rounds in ((1, True, 2), (3, True, 4), (3, False, 1)):
        config = make_config(
            rollout={
                "engine": "server",
                "max_staleness": ahead,
                "partial": partial,
                "correction": {"weights": "token"},
            },
            sampler={"max_age": ahead},
        )
        sampler = DynamicSampler(PromptCursor(PROMPTS, seed=0), GroupBuffer(config))
        assert make_asynchronous(sampler, config).n_rounds == rounds


def test_a_request_may_wait_behind_those_of_the_rounds_before(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    engine = open_engine(model_folder, servers, tmp_path, ahead=1, answer_within=2.0)
    for server in servers:
        server.hooks[GENERATE] = lambda body: time.sleep(2.5)
    assert all(engine.generate(PROMPTS[:4], SAMPLING))
    assert not engine.notes


def test_who_samples_ahead_asks_for_all_ranks(model_folder: Path, servers: list[FakeServer], tmp_path: Path) -> None:
    """Two batches at a time, of which each of two ranks would ask for half."""
    engine = open_engine(model_folder, servers[:1], tmp_path, ahead=1)
    engine.world = World(0, Layout(2))
    changed = threading.Condition()
    for priority, wanted in ((None, 4), (0, 8)):
        n_open, most = 0, 0

        def hold(body: dict[str, Any], wanted: int = wanted) -> None:
            nonlocal n_open, most
            with changed:
                n_open += 1
                most = max(most, n_open)
                changed.notify_all()
                changed.wait_for(lambda: most >= wanted, 10)
            time.sleep(0.05 if threading.current_thread() is threading.main_thread() else 0.15)
            with changed:
                n_open -= 1

        servers[0].hooks[GENERATE] = hold
        assert all(engine.generate(PROMPTS, SAMPLING, CallOptions(priority=priority)))
        assert most == wanted


def test_servers_that_die_with_two_rounds_in_flight(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "ATTEMPTS", 20)
    engine = open_engine(model_folder, servers, tmp_path, ahead=1)
    wanted, count, rounds = steps_ahead(engine, 1), iter(range(1000)), list[int]()

    def kill_now_and_then(body: dict[str, Any]) -> None:
        time.sleep(0.01)
        if next(count) % 4 == 2 and servers[1].alive:
            rounds.append(len(engine.calls))
            servers[1].kill()
            threading.Timer(0.02, servers[1].start).start()

    servers[0].hooks[GENERATE] = kill_now_and_then
    servers[1].hooks[GENERATE] = lambda body: time.sleep(0.02)
    assert steps_ahead(engine, 2) == wanted
    assert max(rounds) == 2
    assert any(servers[1].url in note for note in engine.notes), (engine.notes, next(count))


def test_what_still_runs_when_enough_is_answered_is_dropped(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    """Three of four are needed; six of the first twelve prompts hang, and the call ends without them."""
    engine, hung = open_engine(model_folder, servers, tmp_path), threading.Event()
    wanted = told(engine.generate(PROMPTS, SAMPLING))
    slow = [list(prompt.token_ids) for prompt in PROMPTS[:12:2]]

    def hang_with_some(body: dict[str, Any]) -> None:
        if body["token_ids"] in slow:
            hung.wait(60)

    for server in servers:
        server.hooks[GENERATE] = hang_with_some
    began = time.monotonic()
    found = told(engine.generate(PROMPTS, SAMPLING, CallOptions(completion_fraction=3 / 4)))
    assert time.monotonic() - began < 10
    assert [place for place, answers in enumerate(found) if not answers] == list(range(0, 12, 2))
    assert all(answers == own for answers, own in zip(found, wanted, strict=True) if answers)
    assert not engine.notes  # the servers are none the worse
    hung.set()
    assert told(engine.generate(PROMPTS, SAMPLING)) == wanted


def test_a_run_that_asks_for_more_than_it_needs(tmp_path: Path, model_folder: Path, servers: list[FakeServer]) -> None:
    raw = small_recipe(output_dir=str(tmp_path), steps=2, eval_every=2)
    raw["model"] = {"dtype": "float32", "path": str(model_folder)}
    raw["sampler"] |= {"filter_groups": False, "oversample": 1.5}
    urls = [server.url for server in servers]
    raw["rollout"] |= {"max_response_tokens": 6, "engine": "server", "server": {"urls": urls, "folder": str(tmp_path)}}
    slow = itertools.cycle([True, False, False])

    def hook(body: dict[str, Any]) -> None:
        if body["sampling_params"]["n"] == raw["rollout"]["group_size"] and next(slow):
            time.sleep(0.3)

    for server in servers:
        server.hooks[GENERATE] = hook
    first, second = (
        event for event in read_log(train(parse_config(raw), Progress()) / "metrics.jsonl") if event["kind"] == "step"
    )
    assert first["sampling/groups"] + first["sampling/dropped"] == 6
    assert first["sampling/dropped"] > 0
    assert first["batch/groups"] == second["batch/groups"] == 4


def test_quick_answers_do_not_jump_the_queue(model_folder: Path, servers: list[FakeServer], tmp_path: Path) -> None:
    """Answers that take as long as they are long make up the steps that answers given at once do, lengths and all."""
    engine = open_engine(model_folder, servers, tmp_path, ahead=1)

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
    for server in servers:
        server.hooks[GENERATE] = slowed(server)
    assert steps() == wanted


def test_a_run_ahead(
    tmp_path: Path, model_folder: Path, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server comes and goes; the run is taken up again where a step ahead had been sampled already."""
    raw = small_recipe(output_dir=str(tmp_path), steps=4, eval_every=2, keep=4)
    raw["model"] = {"dtype": "float32", "path": str(model_folder)}
    raw["sampler"] |= {"filter_groups": False, "max_age": 2}
    raw["rollout"] |= {
        "max_response_tokens": 6,
        "engine": "server",
        "server": {"urls": [server.url for server in servers], "folder": str(tmp_path)},
        "max_staleness": 2,
        "correction": {"weights": "token"},
    }
    count = iter(range(1000))

    def kill_now_and_then(body: dict[str, Any]) -> None:
        if next(count) % 20 == 12 and servers[1].alive:
            servers[1].kill()
            threading.Timer(0.02, servers[1].start).start()

    servers[0].hooks[GENERATE] = kill_now_and_then
    state_dict = AsynchronousSampler.state_dict

    def once_one_step_waits(self: AsynchronousSampler) -> dict[str, Any]:
        until = time.monotonic() + 20
        while self.step == 2 and not self.metrics([])["ready_steps"] and time.monotonic() < until:
            time.sleep(0.01)
        return state_dict(self)

    monkeypatch.setattr(AsynchronousSampler, "state_dict", once_one_step_waits)

    class Notes(Progress):
        def note(self, text: str) -> None:
            notes.append(text)

    def steps() -> list[dict[str, Any]]:
        events = read_log(train(parse_config(raw), Notes()) / "metrics.jsonl")
        return [event for event in events if event["kind"] == "step"]

    notes: list[str] = []
    for step in steps():
        assert step["batch/age_max"] <= 2
        assert 0 < step["train/rollout_ess"] <= 1
        assert step["sync/gap"] < 1e-5
        assert step["train/tokens"] > 0
    for late in ("step_000003", "step_000004"):
        shutil.rmtree(tmp_path / "small" / "checkpoints" / late)
    again = steps()
    assert [step["step"] for step in again] == [1, 2, 3, 4]
    assert max(step["batch/age_max"] for step in again) > 0
    (left_over,) = (note for note in notes if "groups are left over" in note)
    assert int(left_over.split()[0]) >= 4
    assert not any(thread.name in ("ahead", "rollout") for thread in threading.enumerate())
