"""The server engine over servers that fail: what counts is what it would have been had none failed, and no wait is
without its end.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_config, make_sample
from fake_server import GENERATE, UPDATE, FakeServer, Hook
from small import small_recipe

from dapo_runner.commands.serve import server_arguments, server_environment
from dapo_runner.config import Config, ConfigError, SamplerConfig, parse_config
from dapo_runner.policy.model import Policy
from dapo_runner.records.metrics import read_log
from dapo_runner.records.progress import SilentProgress
from dapo_runner.rollout.client import RolloutError
from dapo_runner.rollout.probe import OutOfSyncError, SyncProbe
from dapo_runner.rollout.server import ServerEngine
from dapo_runner.sampling.ahead import AheadSampler
from dapo_runner.sampling.data import PromptCursor
from dapo_runner.sampling.sampler import DynamicSampler
from dapo_runner.tasks.tiny import make_tokenizer
from dapo_runner.train import train
from dapo_runner.types import Completion, Group, Prompt, Sample, SamplingParams, Verdict
from dapo_runner.update.learner import Learner

SAMPLING = SamplingParams(n=2, max_tokens=6, seed=5)
PROMPTS = [Prompt(str(i), (3 + i % 9, 4, 5 + i % 7), "", "") for i in range(24)]


@pytest.fixture
def servers(model_folder: Path) -> Iterator[list[FakeServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeServer(model_folder)) for _ in range(2)]


def server_config(
    model: Path, servers: list[FakeServer], folder: Path, ahead: int = 0, partial: bool = True, **server: Any
) -> Config:
    named = {"urls": [server.url for server in servers], "folder": str(folder), "health_within": 2.0, **server}
    return make_config(
        model={"tiny": None, "path": str(model), "dtype": "float32"},
        rollout={
            "engine": "server",
            "server": named,
            "max_batch_sequences": 8,
            "ahead": ahead,
            "partial": partial,
            "correction": {"weights": "token" if ahead else None},
        },
        evaluation={"k": 8},
    )


def open_engine(model: Path, servers: list[FakeServer], folder: Path, **server: Any) -> ServerEngine:
    notes: list[str] = []
    engine = ServerEngine(model, make_tokenizer(), server_config(model, servers, folder, **server), note=notes.append)
    engine.notes = notes  # type: ignore[attr-defined]
    return engine


def hang(over: threading.Event) -> Hook:
    """No answer for a minute."""

    def hook(body: dict[str, Any]) -> None:
        over.wait(60)

    return hook


def told(groups: list[list[Completion]]) -> list[list[tuple[list[int], list[float]]]]:
    return [[(one.token_ids.tolist(), one.logprobs.tolist()) for one in group] for group in groups]


def moved(policy: Policy, scale: float = 0.2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    named = {name: tensor.clone() for name, tensor in policy.named_weights()}
    return {name: x + scale * x.std() * torch.randn(x.shape, generator=generator) for name, x in named.items()}


def test_which_server_answers_makes_no_difference(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy
) -> None:
    one, both = (open_engine(model_folder, some, tmp_path / str(len(some))) for some in (servers[:1], servers))
    found = told(both.generate(PROMPTS, SAMPLING))
    assert all(server.seen(GENERATE) for server in servers)
    assert len({str(group) for group in found}) == len(PROMPTS)  # equal prompts do not share their dice
    shifted = [SamplingParams(n=2, max_tokens=6, seed=5, place=place) for place in range(12, 24)]
    assert told(both.generate(PROMPTS[12:], shifted)) == found[12:]  # nor does the call that a prompt is asked in
    one.update_weights(policy.named_weights())
    assert told(one.generate(PROMPTS, SAMPLING)) == found
    (greedy,) = one.generate(PROMPTS[:1], SamplingParams(n=3, temperature=0.0, max_tokens=6))
    assert told([greedy]) == [[told([greedy])[0][0]] * 3]
    assert greedy[0].text == one.tokenizer.decode(greedy[0].token_ids.tolist(), skip_special_tokens=True)


def test_servers_killed_and_restarted_at_ten_random_moments(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy
) -> None:
    """Nothing is lost, nothing comes twice, and nothing of the weights that a server came back with."""
    engine = open_engine(model_folder, servers, tmp_path, attempts=20)
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
    assert "got one of other:1" in engine.notes[0]


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
    path: str, model_folder: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    """By its deadline, or by its health, which does not wait for that."""
    within = {GENERATE: {"answer_within": 1.0}, "/health": {"health_within": 0.5}}[path]
    engine = open_engine(model_folder, servers, tmp_path, attempts=99, **within)
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
    engine = open_engine(model_folder, servers, tmp_path, back_within=1.0, sync_within=1.0)
    hung = threading.Event()
    for server in servers:
        server.hooks[UPDATE] = hang(hung)
    with pytest.raises(
        RolloutError, match=r"weights \w+:2 wait for a server, and none of 2 .* /update_weights: no answer"
    ):
        engine.update_weights(policy.named_weights())
    hung.set()
    for server in servers:
        server.kill()
    with pytest.raises(
        RolloutError, match=r"24 of 24 prompts wait for a server, .*refused.*`dapo serve RECIPE` starts"
    ):
        engine.generate(PROMPTS, SAMPLING)
    with pytest.raises(RolloutError, match=r"weights \w+:1 wait"):
        open_engine(model_folder, servers, tmp_path, back_within=0.1)


def test_a_prompt_that_breaks_every_server_ends_the_run(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    engine = open_engine(model_folder, servers, tmp_path, attempts=3)
    poison = list(PROMPTS[7].token_ids)
    for server in servers:
        server.hooks[GENERATE] = lambda body: (500, {"error": "dead"}) if body["token_ids"] == poison else None
    with pytest.raises(RolloutError, match=r"asked 3 times \(rollout.server.attempts\), at last .*HTTP 500"):
        engine.generate(PROMPTS, SAMPLING)


@pytest.mark.parametrize("status", [400, 401, 404])
def test_what_every_server_would_refuse_is_asked_once(
    status: int, model_folder: Path, servers: list[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    engine = open_engine(model_folder, servers[:1], tmp_path, key_env="MY_KEY")
    servers[0].hooks[GENERATE] = lambda body: (status, {"error": "no, Bearer s3cret"})
    with pytest.raises(RolloutError, match=rf"/inference/v1/generate: HTTP {status} .*Bearer \*\*\*"):
        engine.generate(PROMPTS[:1], SAMPLING)
    assert servers[0].seen(GENERATE) == 1
    assert all(headers["Authorization"] == "Bearer s3cret" for *_, headers in servers[0].asked)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match="MY_KEY, got nothing"):
        engine.generate(PROMPTS[:1], SAMPLING)


BROKEN: list[dict[str, Any]] = [
    {"logprobs": None},
    {"logprobs": {"content": []}},
    {"weight_versions": None},
    {"finish_reason": "abort"},
    {"token_ids": []},
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
    assert ["left out" in note for note in engine.notes] == [True, False]


def test_weights_that_do_not_fit_are_refused(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy
) -> None:
    engine = open_engine(model_folder, servers, tmp_path)
    version, weights = engine.transfer.version, dict(policy.named_weights())
    with pytest.raises(ValueError, match="no parameter 'extra'"):
        engine.update_weights({**weights, "extra": torch.ones(1)}.items())
    assert (engine.transfer.version, servers[0].version) == (version, version)
    assert engine.generate(PROMPTS[:2], SAMPLING)


def test_the_probe_works_as_with_any_engine(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy
) -> None:
    engine = open_engine(model_folder, servers, tmp_path)
    learner = Learner(policy, server_config(model_folder, servers, tmp_path))
    probe = SyncProbe(PROMPTS[:4], learner.config)
    assert probe(engine, learner)["gap"] < 1e-5
    engine.update_weights(moved(policy).items())
    with pytest.raises(OutOfSyncError):
        probe(engine, learner)


def test_weights_in_flight(model_folder: Path, servers: list[FakeServer], tmp_path: Path, policy: Policy) -> None:
    """A response goes on with the new weights, and says which gave which token."""
    engine = open_engine(model_folder, servers, tmp_path, ahead=1)
    engine.update_weights(policy.named_weights())
    half, go_on = threading.Barrier(3), threading.Event()
    for server in servers:
        first = iter([True])

        def halfway(first: Iterator[bool] = first) -> None:
            if next(first, False):
                half.wait(10)
            go_on.wait(10)

        server.halfway = halfway
    found: list[list[list[Completion]]] = []
    thread = threading.Thread(target=lambda: found.append(engine.generate(PROMPTS, SAMPLING)))
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
    half, go_on, found = threading.Barrier(3), threading.Event(), list[list[Completion]]()
    for server in servers:
        first = iter([True])

        def halfway(first: Iterator[bool] = first) -> None:
            if next(first, False):
                half.wait(10)
            go_on.wait(10)

        server.halfway = halfway
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


def steps_ahead(engine: ServerEngine, in_flight: int) -> list[list[tuple[str, list[list[int]]]]]:
    """Prompts and responses of the steps that a run ahead would train on, a round for each."""

    def scored(prompts: list[Prompt], round_number: int) -> list[Group]:
        found = engine.generate(prompts, replace(SAMPLING, seed=round_number, priority=round_number))
        return [
            Group(prompt, tuple(Sample(one, Verdict(True), 1.0) for one in answers))
            for prompt, answers in zip(prompts, found, strict=True)
        ]

    sampler = DynamicSampler(PromptCursor(PROMPTS, seed=0), SamplerConfig(prompts_per_step=4, filter_groups=False))
    ahead = AheadSampler(sampler, 1, 6, 60.0, in_flight)
    taken = [ahead.next(scored).groups for _ in range(6)]
    ahead.close()
    return [
        [(one.prompt.id, [sample.completion.token_ids.tolist() for sample in one.samples]) for one in groups]
        for groups in taken
    ]


def tokens_of(step: list[tuple[str, list[list[int]]]]) -> list[list[int]]:
    return [list(PROMPTS[int(name)].token_ids) for name, _ in step]


def test_one_slow_prompt_holds_back_its_own_round_alone(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    """It is trained on in its turn, before the next round's, which were all answered first."""
    engine = open_engine(model_folder, servers, tmp_path, ahead=1)
    wanted = steps_ahead(engine, 1)
    (slow, *_), later = map(tokens_of, wanted[2:4])
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
    assert steps_ahead(engine, 2) == wanted
    assert order == [True] * 4
    first = {body["priority"] for server in servers for path, body, _ in server.asked if body.get("token_ids") == slow}
    assert first == {2}


def test_servers_that_die_with_two_rounds_in_flight(
    model_folder: Path, servers: list[FakeServer], tmp_path: Path
) -> None:
    engine = open_engine(model_folder, servers, tmp_path, ahead=1, attempts=20)
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
    assert any("left out" in note for note in engine.notes)


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
    found = told(engine.generate(PROMPTS, replace(SAMPLING, needed=3 / 4)))
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
        event
        for event in read_log(train(parse_config(raw), SilentProgress()) / "metrics.jsonl")
        if event["kind"] == "step"
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
        config = SamplerConfig(prompts_per_step=4, max_rounds=9, on_exhausted="train_partial")
        ahead = AheadSampler(DynamicSampler(PromptCursor(PROMPTS, seed=0), config), 1, 4, 60.0)
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


def test_a_run_ahead(tmp_path: Path, model_folder: Path, servers: list[FakeServer]) -> None:
    """One server comes and goes; the run is taken up again where a step ahead had been sampled already."""
    raw = small_recipe(output_dir=str(tmp_path), steps=4, eval_every=2, keep=4)
    raw["model"] = {"dtype": "float32", "path": str(model_folder)}
    raw["sampler"] |= {"filter_groups": False, "max_age": 2}
    raw["rollout"] |= {
        "max_response_tokens": 6,
        "engine": "server",
        "server": {"urls": [server.url for server in servers], "folder": str(tmp_path)},
        "ahead": 2,
        "correction": {"weights": "token"},
    }
    count = iter(range(1000))

    def kill_now_and_then(body: dict[str, Any]) -> None:
        if next(count) % 20 == 12 and servers[1].alive:
            servers[1].kill()
            threading.Timer(0.02, servers[1].start).start()

    servers[0].hooks[GENERATE] = kill_now_and_then

    class Notes(SilentProgress):
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
    (told,) = (note for note in notes if "had not trained are there" in note)
    assert int(told.split()[0]) >= 4
    assert told.endswith("in flight are asked again")
    assert not any(thread.name in ("ahead", "rollout") for thread in threading.enumerate())


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
        return resident(), threading.active_count(), len(os.listdir("/proc/self/fd"))

    before, *held = sync(engine, 10)
    after, *still_held = sync(engine, 200)
    assert after - before < 4
    assert still_held <= [count + 2 for count in held]  # connections that the server is just closing
    assert [path.suffix for path in engine.transfer.folder.iterdir()] == [".safetensors"]
    folder = engine.transfer.folder
    del engine
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
    assert not any(thread.name == "rollout" for thread in threading.enumerate())
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
        events = read_log(train(parse_config(raw), SilentProgress()) / "metrics.jsonl")
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


def test_what_a_server_is_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {"urls": ["http://localhost:8000", "https://far.example:8443"], "key_env": "MY_KEY", "tensor": 2}
    config = make_config(rollout={"engine": "server", "server": raw}, model={"dtype": "float32"})
    flags = server_arguments(config, tmp_path, torch.device("cpu"), config.rollout.server.urls[1])
    for flag in (f"--model={tmp_path}", "--host=far.example", "--port=8443", "--tensor-parallel-size=2",
                 "--no-enable-chunked-prefill", "--enforce-eager", "--enable-scale-out", "--dtype=float32",
                 '--weight-transfer-config={"backend": "dapo_files"}', "--logprobs-mode=processed_logprobs",
                 "--middleware=dapo_runner.rollout.receiver.KeyForAll"):  # fmt: skip
        assert flag in flags
    with pytest.raises(ConfigError, match="in the environment variable MY_KEY, got nothing"):
        server_environment(config, "http://localhost:8000")
    monkeypatch.setenv("MY_KEY", "s3cret")
    assert server_environment(config, "x") == {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": "s3cret"}
    assert not any("s3cret" in flag for flag in flags)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"server": {"urls": ["localhost:8000"]}}}, "expected addresses like http://localhost:8000"),
        ({"rollout": {"server": {"urls": ["http://a:1/v1"]}}}, "expected addresses like"),
        ({"rollout": {"server": {"urls": ["http://a:1", "http://a:1/"]}}}, "expected each server once"),
        (
            {"evaluation": {"k": 16}, "rollout": {"max_batch_sequences": 8}},
            "expected at least 16 with rollout.engine=server",
        ),
        ({"rollout": {"engine": "hf"}, "sampler": {"oversample": 1.5}}, "sampler.oversample: expected 1 with rollout"),
        (
            {"advantage": {"segments": {"kind": "chain"}}, "sampler": {"oversample": 1.5}},
            "sampler.oversample: expected 1 beside advantage.segments, got 1.5",
        ),
        ({"rollout": {"engine": "hf", "ahead": 1}}, "rollout.ahead: expected 0 with rollout.engine=hf"),
        ({"rollout": {"ahead": 1}}, "rollout.correction.weights: expected token or sequence beside rollout.ahead=1"),
        (
            {"rollout": {"ahead": 2, "correction": {"weights": "token"}}},
            "sampler.max_age: expected at least rollout.ahead=2",
        ),
        (
            {"rollout": {"top_k": 5, "sampling_mask": True}},
            "rollout.sampling_mask: expected false with rollout.engine=ser",
        ),
        ({"rollout": {"temperature": 2.5}}, "expected 0.01 to 2 with rollout.engine=server"),
    ],
)
def test_settings_that_no_server_could_serve(sections: dict[str, Any], message: str) -> None:
    rollout = {"engine": "server", **sections.pop("rollout", {})}
    with pytest.raises(ConfigError, match=message):
        make_config(rollout=rollout, **sections)
