"""Asynchronous sampling: the groups that would have been sampled one step after the other, in that order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from builders import make_config, make_group, make_prompt
from served import wait_until
from test_group_buffer import Engine, every_third, ids, make_sampler

from dapo_runner.data.dataset import PromptCursor
from dapo_runner.rollout.asynchronous import AsynchronousSampler, SamplingStalledError
from dapo_runner.rollout.group_buffer import GroupBuffer, SampledStep, SamplingExhaustedError
from dapo_runner.rollout.sampler import DynamicSampler
from dapo_runner.types import Group, Prompt, VersionSpan

STEPS = 8


class Rounds(Engine):
    """An engine that notes for which step a round begins, runs ``before`` it and sets ``answered`` after it."""

    def __init__(
        self, script: Callable[[int], str] = every_third, before: Callable[[int], object] = lambda number: None
    ) -> None:
        super().__init__(script)
        self.before = before
        self.begun: list[int] = []
        self.answered = [threading.Event() for _ in range(99)]
        self.ahead: AsynchronousSampler

    def __call__(self, prompts: list[Prompt], round_index: int) -> list[Group]:
        self.begun.append(self.ahead.buffer.step)
        self.before(round_index)
        groups = super().__call__(prompts, round_index)
        self.answered[round_index].set()
        return groups


def ahead_of(sampler: DynamicSampler, lead: int, partial: bool = True, within: float = 300.0) -> AsynchronousSampler:
    rollout = {"engine": "server", "max_staleness": lead, "partial": partial, "correction": {"weights": "token"}}
    server = {"response_timeout": within / 8 / (1 + lead)}  # a request may take 1 + lead of these, a round 8 requests
    return AsynchronousSampler(sampler, make_config(rollout=rollout | {"server": server}, run={"steps": STEPS}))


def sample_ahead(engine: Rounds, lead: int = 2, n_rounds: int = 1, within: float = 300.0) -> AsynchronousSampler:
    acceptance = 1 / 3 if engine.script is every_third else 0.9
    engine.ahead = ahead_of(make_sampler(max_age=9, initial_acceptance=acceptance), lead, within=within)
    engine.ahead.n_rounds = n_rounds
    return engine.ahead


def six_of_seven(i: int) -> str:
    return "RWRW" if i % 7 else "RRRR"


def one_of_four(i: int) -> str:
    return "RRRR" if i % 4 else "RWRW"


def one_after_the_other(script: Callable[[int], str] = every_third) -> list[list[str]]:
    engine, sampler = Engine(script), make_sampler(max_age=9)
    return [ids(sampler.next(engine).groups) for _ in range(STEPS)]


@pytest.mark.parametrize(("lead", "n_rounds"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_the_same_steps_in_the_same_order_and_as_early_as_they_may(lead: int, n_rounds: int) -> None:
    """Of two rounds in flight the second ends first, and waits for its turn."""
    overtaken, furthest = list[bool](), 0
    engine = Rounds(six_of_seven)
    if n_rounds == 2:
        engine.before = lambda number: number % 2 or overtaken.append(engine.answered[number + 1].wait(0.2))
    ahead, steps = sample_ahead(engine, lead, n_rounds), list[list[str]]()
    for step in range(1, STEPS + 1):
        steps.append(ids(ahead.next(engine).groups))
        wait_until(lambda step=step: step <= STEPS // 2 or not ahead.in_flight)
        furthest = max(furthest, max(engine.begun) - step)
    ahead.close()
    assert steps == one_after_the_other(six_of_seven)
    assert furthest == lead
    assert (engine.rounds == sorted(engine.rounds)) == (sum(overtaken) < 2) == (n_rounds == 1)


def test_no_round_takes_the_prompts_of_a_step_that_may_not_be_sampled_yet() -> None:
    """Of a curriculum, which looks at the step. Few prompts are accepted, so that one step has several rounds."""
    taken = list[tuple[int, int]]()  # step of the prompts, furthest step

    class Cursor(PromptCursor):
        def take(self, n: int, step: int = 0) -> list[Prompt]:
            taken.append((step, min(ahead.step + 1, STEPS)))
            return super().take(n, step)

    config = make_config(sampler={"prompts_per_step": 4, "max_rounds": 99, "initial_acceptance": 0.9, "max_age": 9})
    sampler = DynamicSampler(Cursor([make_prompt(str(i)) for i in range(50)], seed=0), GroupBuffer(config))
    is_over = False
    engine = Rounds(lambda i: "RW" if i % 9 == 0 else "RR")
    engine.before = lambda number: wait_until(lambda: is_over or sampler.n_rounds >= number)
    engine.ahead = ahead = ahead_of(sampler, 1)
    ahead.n_rounds = 3
    for _ in range(STEPS):
        ahead.next(engine)
    is_over = True
    ahead.close()
    assert all(step <= furthest for step, furthest in taken)
    assert [step for step, _ in taken[:2]] == [1, 2]  # the second round is for the step after the one it runs beside
    assert {step for step, _ in taken} == set(range(1, STEPS + 1))


@pytest.mark.parametrize(("hung", "n_rounds"), [(2, 2), (3, 2), (2, 3)])
def test_what_was_sampled_is_not_lost_and_rounds_in_flight_are_asked_again_in_their_place(
    hung: int, n_rounds: int
) -> None:
    """Those behind the first are answered and not accepted, or the first is accepted and the second hangs."""
    killed = threading.Event()
    engine, again = Rounds(six_of_seven), Rounds(six_of_seven)
    engine.before = lambda number: number == hung and killed.wait(120)
    ahead, resumed = (sample_ahead(one, lead=n_rounds, n_rounds=n_rounds) for one in (engine, again))
    steps, behind = [ahead.next(engine)], range(3, 2 + n_rounds)

    def is_held() -> bool:
        if ahead.metrics([])["ready_steps"]:
            steps.append(ahead.next(engine))
        if hung == 2:
            return all(engine.answered[number].is_set() for number in behind)
        state = ahead.state_dict()  # a full buffer waits for `next` before it submits the round that hangs
        return state["rounds_so_far"] == 3 and state["in_flight"] > 0

    wait_until(is_held)
    ahead.return_step(steps.pop())  # other ranks did not get it
    state = ahead.state_dict()
    assert state["steps"] == len(steps)
    killed.set()
    ahead.close()
    asked = dict(zip(engine.rounds, engine.asked, strict=True))
    assert state["in_flight"] >= sum(len(asked[number]) for number in behind)
    resumed.load_state_dict(state)
    steps += [resumed.next(again) for _ in range(STEPS - len(steps))]
    resumed.close()
    asked_again = dict(zip(again.rounds, again.asked, strict=True))
    assert asked_again[hung][0] == asked[hung][0]
    assert [ids(step.groups) for step in steps] == one_after_the_other(six_of_seven)
    n_accepted = sum(len((asked | asked_again)[number]) for number in range(resumed.sampler.n_rounds))
    assert sum(step.generated for step in steps) == n_accepted * steps[0].groups[0].n_generated


@pytest.mark.parametrize("broken", [3, 4])
def test_what_stops_the_sampling_comes_after_the_steps_before_it(broken: int) -> None:
    """What was accepted while a step waited in vain is not asked again. A step has several rounds."""

    def fail(number: int) -> None:
        if number == broken:
            raise SystemExit("a reward function has left")

    engine, steps = Rounds(one_of_four, before=fail), list[SampledStep]()
    ahead = sample_ahead(engine)
    with pytest.raises(SystemExit):
        steps.extend(ahead.next(engine) for _ in range(STEPS))
    ahead.close()
    state = ahead.state_dict()
    assert state["steps"] == len(steps)
    again, resumed = Engine(one_of_four), make_sampler(max_age=9)
    resumed.load_state_dict(state)
    steps += [resumed.next(again) for _ in range(STEPS - len(steps))]
    assert [ids(step.groups) for step in steps] == one_after_the_other(one_of_four)
    asked = [one for prompts in engine.asked + again.asked for one in prompts]
    assert asked == [prompt.id for prompt in make_sampler().cursor.take(len(asked), 0)]
    assert sum(step.generated for step in steps) == len(asked) * steps[0].groups[0].n_generated


def test_a_round_that_does_not_end_stalls_its_step() -> None:
    hung, found = threading.Event(), list[int]()
    engine = Rounds(before=lambda number: number and hung.wait(120))
    ahead = sample_ahead(engine, within=0.5)
    with pytest.raises(SamplingStalledError, match=r"rollout\.server\.response_timeout"):
        found.extend(len(ahead.next(engine).groups) for _ in range(STEPS))
    assert found
    assert ahead.state_dict()["in_flight"] > 0
    hung.set()
    ahead.close()


def test_a_step_may_take_the_time_of_all_its_rounds() -> None:
    pause = threading.Event()
    engine = Rounds(lambda i: "RR", before=lambda number: pause.wait(0.25))
    ahead = sample_ahead(engine, within=2.0)
    with pytest.raises(SamplingExhaustedError):  # after ten rounds
        ahead.next(engine)
    assert ahead.step_timeout == 2 * (len(engine.rounds) + 1) * 2.0
    ahead.close()


@pytest.mark.parametrize(("ahead", "partial", "rounds"), [(1, True, 2), (3, True, 4), (3, False, 1)])
def test_how_many_rounds_are_in_flight(ahead: int, partial: bool, rounds: int) -> None:
    assert ahead_of(make_sampler(), ahead, partial).n_rounds == rounds


def test_the_share_of_responses_from_several_versions_of_the_weights() -> None:
    group = make_group("RWRW")
    spans = ((VersionSpan(1, 4),), (VersionSpan(1, 1), VersionSpan(2, 3)), (), ())
    samples = tuple(
        replace(sample, completion=replace(sample.completion, versions=versions))
        for sample, versions in zip(group.samples, spans, strict=True)
    )
    metrics = ahead_of(make_sampler(), 1).metrics([replace(group, samples=samples), make_group("RRRR")])
    assert metrics == {"ready_steps": 0, "in_flight": 0, "across_updates": 1 / 8}
