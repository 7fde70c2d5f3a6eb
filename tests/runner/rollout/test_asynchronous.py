"""Sampling ahead of training: the groups that would have been sampled one step after the other, in that order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from builders import make_config, make_prompt
from test_group_buffer import Engine, every_third, ids, make_sampler

from dapo_runner.data.dataset import PromptCursor
from dapo_runner.rollout.asynchronous import AsynchronousSampler, SamplingStalledError
from dapo_runner.rollout.group_buffer import GroupBuffer, SamplingExhaustedError
from dapo_runner.rollout.sampler import DynamicSampler
from dapo_runner.types import Group, Prompt

STEPS = 8


class SlowEngine(Engine):
    """Each round takes a while, in which the one that trains may ask for more."""

    def __init__(self, broken_after: int = 99) -> None:
        super().__init__(every_third)
        self.dice, self.broken_after = random.Random(2), broken_after
        self.begun: list[int] = []  # the step that each round is for
        self.sampler: DynamicSampler | None = None

    def __call__(self, prompts: list[Prompt], round_index: int) -> list[Group]:
        if len(self.rounds) == self.broken_after:
            raise RuntimeError("no engine any more")
        assert self.sampler is not None
        self.begun.append(self.sampler.buffer.step)
        time.sleep(self.dice.uniform(0, 0.01))
        return super().__call__(prompts, round_index)


def make_ahead(engine: SlowEngine, lead: int = 2, within: float = 60.0, in_flight: int = 1) -> AsynchronousSampler:
    engine.sampler = make_sampler(max_age=9, initial_acceptance=1 / 3 if engine.script is every_third else 0.9)
    return AsynchronousSampler(engine.sampler, lead, STEPS, within, in_flight)


def take_all(ahead: AsynchronousSampler, engine: SlowEngine, found: list[list[str]]) -> None:
    """Until there are no more."""
    while True:
        found.append(ids(ahead.next(engine).groups))


def one_after_the_other(script: Callable[[int], str] = every_third) -> list[list[str]]:
    engine, sampler = Engine(script), make_sampler(max_age=9)
    return [ids(sampler.next(engine).groups) for _ in range(STEPS)]


@pytest.mark.parametrize("lead", [1, 3])
def test_the_same_steps_in_the_same_order_and_never_too_early(lead: int) -> None:
    engine = SlowEngine()
    ahead = make_ahead(engine, lead)
    steps, furthest = [], 0
    for step in range(1, STEPS + 1):
        steps.append(ids(ahead.next(engine).groups))
        while step > STEPS // 2 and ahead.in_flight:
            time.sleep(0.001)
        assert max(engine.begun) <= step + lead
        furthest = max(furthest, max(engine.begun) - step)
    ahead.close()
    assert steps == one_after_the_other()
    assert furthest == lead
    assert engine.rounds == sorted(engine.rounds)


@pytest.mark.parametrize("trained", [1, 4, STEPS - 1])
def test_what_was_sampled_is_not_lost_and_comes_once(trained: int) -> None:
    engine = SlowEngine()
    ahead = make_ahead(engine)
    steps = [ahead.next(engine) for _ in range(trained)]
    while not ahead.metrics([])["ready_steps"]:
        time.sleep(0.005)
    state = ahead.state_dict()
    ahead.close()
    assert state["steps"] == trained
    assert len(state["buffer"]) >= 4  # a step at least
    again = SlowEngine()
    resumed = make_ahead(again)
    resumed.load_state_dict(state)
    steps += [resumed.next(again) for _ in range(STEPS - trained)]
    resumed.close()
    assert [ids(step.groups) for step in steps] == one_after_the_other()
    of_a_prompt = steps[0].groups[0].n_generated
    accepted = engine.asked[: state["rounds_so_far"]] + again.asked
    assert sum(step.generated for step in steps) == of_a_prompt * sum(map(len, accepted))


def six_of_seven(i: int) -> str:
    return "RWRW" if i % 7 else "RRRR"


class HeldEngine(SlowEngine):
    """In every other round there is a prompt so slow that the round behind has been answered before, where one is."""

    def __init__(self) -> None:
        super().__init__()
        self.script = six_of_seven
        self.answered = [threading.Event() for _ in range(99)]
        self.overtaken = 0

    def __call__(self, prompts: list[Prompt], round_index: int) -> list[Group]:
        if round_index % 2 == 0:
            self.overtaken += self.answered[round_index + 1].wait(0.2)
        groups = super().__call__(prompts, round_index)
        self.answered[round_index].set()
        return groups


@pytest.mark.parametrize("lead", [1, 3])
def test_a_round_that_is_quicker_than_the_one_before_waits_for_its_turn(lead: int) -> None:
    engine = HeldEngine()
    ahead = make_ahead(engine, lead, in_flight=2)
    steps = [ids(ahead.next(engine).groups) for _ in range(STEPS)]
    ahead.close()
    assert steps == one_after_the_other(six_of_seven)
    assert engine.overtaken >= 2
    assert engine.rounds != sorted(engine.rounds)


def test_no_round_in_flight_takes_the_prompts_of_a_step_that_may_not_be_sampled_yet() -> None:
    """Of a curriculum, which looks at the step. Few prompts are accepted, so that one step has several rounds."""
    over, taken = threading.Event(), list[tuple[int, int]]()  # step of the prompts, furthest step

    class Cursor(PromptCursor):
        def take(self, n: int, step: int = 0) -> list[Prompt]:
            taken.append((step, min(ahead.step + 1, STEPS)))
            return super().take(n, step)

    class InTurn(Engine):
        def __call__(self, prompts: list[Prompt], round_index: int) -> list[Group]:
            while sampler.n_rounds < round_index and not over.is_set():  # others are in flight as one is accepted
                time.sleep(0.001)
            return super().__call__(prompts, round_index)

    config = make_config(sampler={"prompts_per_step": 4, "max_rounds": 99, "initial_acceptance": 0.9, "max_age": 9})
    cursor = Cursor([make_prompt(str(i)) for i in range(50)], seed=0)
    sampler, engine = DynamicSampler(cursor, GroupBuffer(config)), InTurn(lambda i: "RW" if i % 9 == 0 else "RR")
    ahead = AsynchronousSampler(sampler, 1, STEPS, 60.0, 3)
    for _ in range(STEPS):
        ahead.next(engine)
    over.set()
    ahead.close()
    assert all(step <= furthest for step, furthest in taken)
    assert {step for step, _ in taken} == set(range(1, STEPS + 1))


@pytest.mark.parametrize("lead", [1, 2])
def test_by_default_what_a_step_leaves_over_fills_the_next(lead: int) -> None:
    """As old as the steps ahead when it was accepted, it is one older when it trains."""
    rollout = {"engine": "server", "max_staleness": lead, "correction": {"weights": "token"}}

    def too_old(**settings: int) -> int:
        class Versions(Engine):
            def __call__(self, prompts: list[Prompt], round_index: int) -> list[Group]:
                step = max(1, sampler.buffer.step - lead)  # of the weights
                return [replace(group, step=step) for group in super().__call__(prompts, round_index)]

        config = make_config(rollout=rollout, sampler={"prompts_per_step": 4, **settings})
        engine, cursor = Versions(every_third), make_sampler().cursor
        sampler = DynamicSampler(cursor, GroupBuffer(config))
        return sum(sampler.next(engine).stats.too_old for _ in range(STEPS))

    assert 3 * too_old() < too_old(max_age=lead)


def test_two_rounds_in_flight_are_not_further_ahead_than_one() -> None:
    class Steps(HeldEngine):
        def __call__(self, prompts: list[Prompt], round_index: int) -> list[Group]:
            begun = max(1, ahead.step)
            return [replace(group, step=begun) for group in super().__call__(prompts, round_index)]

    engine = Steps()
    ahead = make_ahead(engine, lead=1, in_flight=2)
    for step in range(1, STEPS + 1):
        sampled = ahead.next(engine)
        fresh = sampled.groups[sampled.stats.carried_in :]
        assert all(step - group.step <= 1 for group in fresh)
    ahead.close()
    assert engine.overtaken >= 2


def test_a_group_that_waited_too_long_for_its_turn_is_not_accepted() -> None:
    class Late(Engine):
        def __call__(self, prompts: list[Prompt], round_index: int) -> list[Group]:
            groups = super().__call__(prompts, round_index)
            return [replace(group, step=sampler.buffer.step - place % 4) for place, group in enumerate(groups)]

    engine, sampler = Late(lambda i: "RW"), make_sampler(max_age=2, initial_acceptance=1.0)
    steps = [sampler.next(engine) for _ in range(6)]
    assert {number - group.step for number, step in enumerate(steps, 1) for group in step.groups} == {0, 1, 2}
    accepted = sum(len(step.groups) for step in steps) + len(sampler.buffer.groups)
    assert accepted + sum(step.stats.too_old for step in steps) == sum(map(len, engine.asked))


@pytest.mark.parametrize(("hung", "in_flight"), [(2, 2), (3, 2), (2, 3)])
def test_what_was_accepted_is_kept_and_the_rounds_in_flight_are_asked_again(hung: int, in_flight: int) -> None:
    """Those behind the first are answered already, and not accepted, or the first is accepted and the second hangs:
    what is not accepted comes again, in its place.
    """
    killed = threading.Event()

    class Killed(HeldEngine):
        def __call__(self, prompts: list[Prompt], round_index: int) -> list[Group]:
            if round_index == hung:
                killed.wait(10)
            return super().__call__(prompts, round_index)

    engine = Killed()
    ahead = make_ahead(engine, lead=in_flight, in_flight=in_flight)
    steps = [ahead.next(engine)]
    behind = range(3, 2 + in_flight)
    while not (
        all(engine.answered[number].is_set() for number in behind)
        if hung == 2
        else ahead.state_dict()["rounds_so_far"] == 3
    ):
        steps += [ahead.next(engine)] if ahead.metrics([])["ready_steps"] else []
        time.sleep(0.005)
    state = ahead.state_dict()
    killed.set()
    ahead.close()
    asked = dict(zip(engine.rounds, engine.asked, strict=True))
    assert state["in_flight"] >= sum(len(asked[number]) for number in behind)
    again = HeldEngine()
    resumed = make_ahead(again, lead=in_flight, in_flight=in_flight)
    resumed.load_state_dict(state)
    steps += [resumed.next(again) for _ in range(STEPS - len(steps))]
    resumed.close()
    asked_again = dict(zip(again.rounds, again.asked, strict=True))
    assert asked_again[hung][0] == asked[hung][0]
    assert [ids(step.groups) for step in steps] == one_after_the_other(six_of_seven)
    accepted = asked | asked_again
    n_accepted = sum(len(accepted[number]) for number in range(again.sampler.n_rounds))
    assert sum(step.generated for step in steps) == n_accepted * steps[0].groups[0].n_generated


def test_what_stops_the_sampling_comes_after_the_steps_before_it() -> None:
    engine = SlowEngine(broken_after=4)
    ahead = make_ahead(engine)
    wanted, found = one_after_the_other(), list[list[str]]()

    with pytest.raises(RuntimeError, match="no engine any more"):
        take_all(ahead, engine, found)
    assert found
    assert all(one == other for one, other in zip(found, wanted, strict=False))
    ahead.close()


def test_what_was_accepted_while_a_step_waited_in_vain_is_not_asked_again() -> None:
    engine = SlowEngine(broken_after=3)
    ahead, found = make_ahead(engine), list[list[str]]()
    with pytest.raises(RuntimeError, match="no engine any more"):
        take_all(ahead, engine, found)
    ahead.close()
    state = ahead.state_dict()
    assert state["steps"] == len(found)
    assert state["buffer"]
    again, resumed = Engine(every_third), make_sampler(max_age=9)
    resumed.load_state_dict(state)
    rest = [ids(resumed.next(again).groups) for _ in range(STEPS - len(found))]
    assert found + rest == one_after_the_other()
    asked = [one for prompts in engine.asked + again.asked for one in prompts]
    assert asked == [prompt.id for prompt in make_sampler().cursor.take(len(asked), 0)]


def test_a_round_that_does_not_end_is_named_and_one_that_exits_raised() -> None:
    hung = threading.Event()

    class Hanging(SlowEngine):
        def __call__(self, prompts: list[Prompt], round_index: int) -> list[Group]:
            if self.rounds and not hung.wait(60):
                raise AssertionError
            if self.rounds:
                raise SystemExit("a reward function has left")
            return super().__call__(prompts, round_index)

    engine, found = Hanging(), list[list[str]]()
    ahead = make_ahead(engine, within=0.3)
    with pytest.raises(SamplingStalledError, match=r"rollout\.server\.answer_within"):
        take_all(ahead, engine, found)
    assert found
    assert ahead.state_dict()["in_flight"] > 0
    hung.set()
    with pytest.raises(SystemExit, match="a reward function has left"):
        take_all(ahead, engine, found)
    ahead.close()


def test_how_long_a_step_may_take_when_every_round_ends_in_time() -> None:
    class Late(SlowEngine):
        def __call__(self, prompts: list[Prompt], round_index: int) -> list[Group]:
            time.sleep(0.12)
            return super().__call__(prompts, round_index)

    engine = Late()
    engine.script = lambda _: "RR"
    ahead, began = make_ahead(engine, within=1.0), time.monotonic()
    with pytest.raises(SamplingExhaustedError):
        ahead.next(engine)
    assert ahead.round_timeout < time.monotonic() - began < ahead.step_timeout
    ahead.close()


def test_a_group_keeps_the_step_whose_policy_gave_it() -> None:
    class Lagging(SlowEngine):
        def __call__(self, prompts: list[Prompt], round_index: int) -> list[Group]:
            groups = super().__call__(prompts, round_index)
            return [replace(group, step=max(1, self.begun[-1] - 2)) for group in groups]

    engine = Lagging()
    ahead = make_ahead(engine)
    firsts = [min(group.step for group in ahead.next(engine).groups) for _ in range(STEPS)]
    ahead.close()
    assert firsts[-1] >= STEPS - 4
    assert all(early <= late for early, late in pairwise(firsts))
    assert firsts[-1] < STEPS


def test_a_step_that_other_ranks_did_not_get_is_the_next_one_again() -> None:
    engine = SlowEngine()
    ahead = make_ahead(engine)
    taken = [ahead.next(engine) for _ in range(3)]
    ahead.return_step(taken.pop())
    assert ahead.state_dict()["steps"] == 2
    taken += [ahead.next(engine) for _ in range(STEPS - 2)]
    ahead.close()
    assert [ids(step.groups) for step in taken] == one_after_the_other()


def test_tokens_of_a_step_that_is_half_sampled_are_told_after_it_is_taken_up() -> None:
    held, generated = threading.Event(), list[int]()

    class Held(Engine):
        def __call__(self, prompts: list[Prompt], round_index: int) -> list[Group]:
            if round_index:
                held.wait(10)
            self.script = (lambda _: "RW") if round_index else (lambda _: "RR")
            groups = super().__call__(prompts, round_index)
            generated.append(sum(group.n_generated for group in groups))
            return groups

    ahead = AsynchronousSampler(make_sampler(max_age=9), 1, 1, 60.0)
    waiting = threading.Thread(target=ahead.next, args=[Held(every_third)], daemon=True)
    waiting.start()
    while ahead.state_dict()["rounds_so_far"] != 1:
        time.sleep(0.005)
    state = ahead.state_dict()
    held.set()
    waiting.join(10)
    ahead.close()
    resumed = make_sampler(max_age=9)
    resumed.load_state_dict(state | {"steps": 0})
    step = resumed.next(Engine(lambda _: "RW"))
    assert state["generated"] == generated[0] > 0
    assert step.generated == generated[0] + step.stats.groups * step.groups[0].n_generated
