"""Dynamic sampling without a model: a scripted generator stands in for the engine."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from builders import make_config, make_group, make_prompt, make_sample
from hypothesis import given
from hypothesis import strategies as st

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.data.dataset import PromptCursor
from dapo_runner.errors import RunError
from dapo_runner.logging.metrics import sampling_metrics
from dapo_runner.rollout.group_buffer import (
    GroupBuffer,
    SamplingExhaustedError,
    SamplingStats,
    prompts_for,
)
from dapo_runner.rollout.sampler import DynamicSampler
from dapo_runner.types import Group, Prompt, Segment

# What a prompt's samples are like: right or wrong, with lengths and length penalties that correctness knows nothing of.
SHAPED = st.lists(st.tuples(st.booleans(), st.integers(1, 60), st.floats(-1, 0)), min_size=4, max_size=4)
SETTINGS = {
    "shapes": st.lists(SHAPED, min_size=1, max_size=12),
    "wanted": st.integers(1, 6),
    "max_rounds": st.integers(1, 4),
    "acceptance": st.sampled_from([0.05, 0.25, 1.0]),
    "steps": st.integers(1, 5),
}


class ShapedEngine:
    """Gives prompt number i the samples ``shapes[i]``, and remembers the groups in the order they were asked for."""

    def __init__(self, shapes: list[list[tuple[bool, int, float]]]) -> None:
        self.shapes = shapes
        self.given: list[Group] = []

    def __call__(self, prompts: list[Prompt], round_index: int) -> list[Group]:
        groups = [
            Group(prompt, tuple(make_sample(right, length=n, penalty=p) for right, n, p in self.shapes[int(prompt.id)]))
            for prompt in prompts
        ]
        self.given += groups
        return groups


@given(**SETTINGS)
def test_whatever_the_groups_are_like(
    shapes: list[list[tuple[bool, int, float]]], wanted: int, max_rounds: int, acceptance: float, steps: int
) -> None:
    """Any lengths and punishments, fewer prompts than a step needs, groups with one success, policies that fail."""
    engine = ShapedEngine(shapes)
    sampler = make_sampler(
        wanted,
        len(shapes),
        max_rounds=max_rounds,
        max_age=99,
        initial_acceptance=acceptance,
        on_exhausted="train_partial",
    )
    accepted: list[Group] = []
    for _ in range(steps):
        before = len(engine.given)
        step = sampler.next(engine)
        accepted += step.groups
        generated = engine.given[before:]
        assert (
            step.stats.groups == len(generated) == step.stats.all_correct + step.stats.all_incorrect + step.stats.mixed
        )
        assert step.stats.rounds <= max_rounds
        assert len(step.groups) <= wanted
        assert step.is_short == (len(step.groups) < wanted)
        assert len(step.groups) == wanted or not sampler.buffer.groups  # nothing is held back from a step that is short
        assert step.stats.carried_out == len(sampler.buffer.groups)
    right = [sum(sample.correct for sample in group.samples) for group in engine.given]
    kept = [group for group, n in zip(engine.given, right, strict=True) if 0 < n < 4]
    assert [id(group.samples) for group in accepted + sampler.buffer.groups] == [id(group.samples) for group in kept]


@given(stop_after=st.integers(0, 4), **SETTINGS)
def test_a_resume_anywhere_is_exact(
    shapes: list[list[tuple[bool, int, float]]],
    wanted: int,
    max_rounds: int,
    acceptance: float,
    steps: int,
    stop_after: int,
) -> None:
    def fresh() -> DynamicSampler:
        return make_sampler(
            wanted, len(shapes), max_rounds=max_rounds, initial_acceptance=acceptance, on_exhausted="train_partial"
        )

    def run(sampler: DynamicSampler, n: int) -> list[tuple[list[str], SamplingStats, str | None]]:
        results = (sampler.next(ShapedEngine(shapes)) for _ in range(n))
        return [(ids(step.groups), step.stats, step.is_short) for step in results]

    expected = run(fresh(), stop_after + steps)
    first = fresh()
    before = run(first, stop_after)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = fresh()
    second.load_state_dict(torch.load(file, weights_only=True))
    assert before + run(second, steps) == expected


def test_a_policy_that_always_fails_stops_at_the_limit_and_says_so() -> None:
    engine, sampler = Engine(lambda i: "WWWW"), make_sampler(max_rounds=5)
    with pytest.raises(SamplingExhaustedError, match=r"sampler\.on_exhausted"):
        sampler.next(engine)
    assert len(engine.asked) == 5
    assert sum(map(len, engine.asked)) <= 5 * prompts_for(4, 1 / 6)  # half of what is accepted at first


def test_data_that_run_out_are_gone_through_again() -> None:
    """Two prompts, one of them useful: a step of 40 groups cannot be had from them in so few rounds."""
    engine = Engine(lambda i: "RW" if i == 0 else "RR")
    sampler = make_sampler(wanted=40, n_prompts=2, max_rounds=1, initial_acceptance=1.0, on_exhausted="train_partial")
    step = sampler.next(engine)
    assert step.is_short
    assert sampler.buffer.notes(step)
    assert len(step.groups) == 20


class Engine:
    """Gives prompt number i the pattern that ``script(i)`` says, and remembers what it was asked."""

    def __init__(self, script: Callable[[int], str]) -> None:
        self.script = script
        self.asked: list[list[str]] = []
        self.rounds: list[int] = []

    def __call__(self, prompts: list[Prompt], round_index: int) -> list[Group]:
        self.asked.append([prompt.id for prompt in prompts])
        self.rounds.append(round_index)
        return [make_group(self.script(int(prompt.id)), prompt.id) for prompt in prompts]


def make_sampler(wanted: int = 4, n_prompts: int = 50, **values: Any) -> DynamicSampler:
    config = make_config(sampler={"prompts_per_step": wanted, **values})
    return DynamicSampler(PromptCursor([make_prompt(str(i)) for i in range(n_prompts)], seed=0), GroupBuffer(config))


def ids(groups: list[Group]) -> list[str]:
    return [group.prompt.id for group in groups]


def every_third(i: int) -> str:
    return ("RWRW", "RRRR", "WWWT")[i % 3]


def test_only_mixed_groups_in_prompt_order_and_none_lost() -> None:
    engine, sampler = Engine(every_third), make_sampler(max_age=99)
    accepted = [group for _ in range(6) for group in sampler.next(engine).groups]
    assert len(accepted) == 24
    asked = [name for prompts in engine.asked for name in prompts]
    mixed = [name for name in asked if every_third(int(name)) == "RWRW"]
    assert ids(accepted) + ids(sampler.buffer.groups) == mixed


class GradingEngine(Engine):
    """Gives every prompt the same rewards; from 0.5 on an answer is right."""

    def __init__(self, *rewards: float) -> None:
        super().__init__(lambda i: "")
        samples = (make_sample(reward >= 0.5, penalty=-index / 8) for index, reward in enumerate(rewards))
        self.samples = tuple(replace(sample, base_reward=r) for sample, r in zip(samples, rewards, strict=True))

    def __call__(self, prompts: list[Prompt], round_index: int) -> list[Group]:
        return [Group(group.prompt, self.samples) for group in super().__call__(prompts, round_index)]


@pytest.mark.parametrize(
    ("rewards", "by_correctness", "by_reward"),
    [
        ((0.55, 0.99, 0.7, 0.6), 0, 4),  # all right, some better
        ((0.0, 0.2, 0.0, 0.0), 0, 4),  # all wrong, one nearly right
        ((0.9, 0.9, 0.9, 0.9), 0, 0),  # nothing but unlike length terms
        ((0.1, 0.9, 0.9, 0.9), 4, 4),
    ],
)
def test_what_the_filter_goes_by(rewards: tuple[float, ...], by_correctness: int, by_reward: int) -> None:
    for filter_on, kept in (("correctness", by_correctness), ("reward", by_reward)):
        sampler = make_sampler(filter_on=filter_on, on_exhausted="train_partial", max_rounds=3)
        step = sampler.next(GradingEngine(*rewards))
        assert len(step.groups) == kept
        assert step.is_short == (kept == 0)
        assert (sampler.buffer.acceptance > 0.5) == (kept > 0)
        graded = step.stats.groups if by_reward > by_correctness else 0
        assert step.stats.varying_reward_only == graded
        figures = sampling_metrics(step.stats, filter_on)
        if filter_on == "reward":
            assert figures["sampling/varying_reward"] == (kept > 0) == 1 - figures["sampling/equal_reward"]
        assert figures.get("sampling/varying_reward_only") == (
            None if filter_on == "correctness" else graded / step.stats.groups
        )


def test_without_filter_every_group_trains() -> None:
    engine, sampler = Engine(lambda i: "WWWW"), make_sampler(filter_groups=False)
    step = sampler.next(engine)
    assert ids(step.groups) == engine.asked[0]
    assert step.stats.rounds == 1


def test_first_round_expects_the_configured_acceptance() -> None:
    engine, sampler = Engine(lambda i: "RW"), make_sampler(wanted=5, initial_acceptance=0.25)
    step = sampler.next(engine)
    assert len(engine.asked[0]) == prompts_for(5, 0.25) == 43
    assert (len(step.groups), step.stats.carried_out) == (5, 38)


def test_surplus_opens_the_next_step_without_generating() -> None:
    engine, sampler = Engine(lambda i: "RW"), make_sampler(wanted=4, initial_acceptance=0.5)
    first = sampler.next(engine)
    second = sampler.next(engine)
    assert len(engine.asked) == 1
    assert ids(first.groups) + ids(second.groups) + ids(sampler.buffer.groups) == engine.asked[0]
    left = len(engine.asked[0]) - 4
    assert (second.stats.rounds, second.stats.carried_in, second.stats.carried_out) == (0, left, left - 4)


def test_groups_know_the_step_that_sampled_them() -> None:
    sampler = make_sampler(wanted=4, initial_acceptance=0.6)
    for step in (1, 2, 3):
        sampled = sampler.next(Engine(lambda i: "RW"))
        carried = sampled.stats.carried_in
        assert [group.step for group in sampled.groups[carried:]] == [step] * (4 - carried)
        assert all(group.step == step - 1 for group in sampled.groups[:carried])


@pytest.mark.parametrize("max_age", [0, 1, 2, 10])
def test_groups_that_have_grown_too_old_go_and_are_counted(max_age: int) -> None:
    """Everything is accepted where a fifth was expected: a first round that would serve five steps, the last of them
    with groups four steps old.
    """
    engine = Engine(lambda i: "RW")
    sampler = make_sampler(wanted=4, initial_acceptance=0.2, max_age=max_age)
    steps = [sampler.next(engine) for _ in range(5)]
    ages = {number - group.step for number, step in enumerate(steps, start=1) for group in step.groups}
    assert ages == set(range(min(max_age, 4) + 1))
    dropped = sum(step.stats.too_old for step in steps)
    assert (dropped > 0) == (max_age < 4)
    assert sum(len(step.groups) for step in steps) + len(sampler.buffer.groups) + dropped == sum(map(len, engine.asked))
    for before, after in pairwise(steps):
        assert after.stats.carried_in + after.stats.too_old == before.stats.carried_out
    assert ids(steps[0].groups) == engine.asked[0][:4]


def test_a_tree_is_trained_on_over_several_steps() -> None:
    """Of five samples that have something to train on two at a time, far apart, until they are too old."""
    segments = [(Segment(1, 0.0, 1.0, 1.0, trains=place != 3),) for place in range(6)]
    samples = tuple(replace(make_sample(True, length=place + 1), segments=own) for place, own in enumerate(segments))
    sampler = make_sampler(max_age=2)
    too_old: list[float] = []

    def step(*groups: Group) -> list[tuple[str, list[int]]]:
        sampler.buffer.step += 1
        state = io.BytesIO()
        torch.save(sampler.state_dict(), state)
        state.seek(0)
        sampler.load_state_dict(torch.load(state, weights_only=True))
        spread, counts = sampler.buffer.spread([replace(group, step=sampler.buffer.step) for group in groups], 2)
        assert counts["waiting"] == sum(len(group.samples) for group in sampler.buffer.waiting)
        too_old.append(counts["too_old"])
        return [(group.prompt.id, [s.completion.length for s in group.samples]) for group in spread]

    first, second = Group(make_prompt("1"), samples), Group(make_prompt("2"), samples[3:])
    assert step(first) == [("1", [1, 5])]
    assert step(second) == [("1", [2, 6]), ("2", [5, 6])]
    assert step() == [("1", [3])]
    assert sampler.buffer.waiting == []
    assert step(Group(make_prompt("3"), samples)) == [("3", [1, 5])]
    sampler.buffer.max_age = 0
    assert step() == []
    assert step(Group(make_prompt("4"), samples[3:4])) == []  # nothing to train on
    assert too_old == [0, 0, 0, 0, 3, 0]


@given(leaves=st.integers(1, 60), per_step=st.integers(1, 30))
def test_a_tree_takes_the_steps_that_max_age_is_held_against(leaves: int, per_step: int) -> None:
    """One with less to train on takes no more of them."""
    sample = replace(make_sample(True), segments=(Segment(4, 0.0, 1.0, 1.0),))
    sampler, steps = make_sampler(), 0
    groups = [Group(make_prompt(), (sample,) * leaves)]
    while sampler.buffer.spread(groups, per_step)[0]:
        groups, steps = [], steps + 1
    assert steps == math.ceil(leaves / per_step)


def test_refill_is_sized_by_the_rate_so_far() -> None:
    """Everything is accepted, so the requests shrink to what is needed; then little is, and they grow."""
    sampler = make_sampler(wanted=20, n_prompts=1000, initial_acceptance=0.2)
    easy = Engine(lambda i: "RW")
    while not easy.asked or len(sampler.buffer.groups) >= 20:
        sampler.next(easy)
    for _ in range(30):
        sampler.next(easy)
    assert 0.9 < sampler.buffer.acceptance <= 1
    assert len(easy.asked[-1]) <= 25
    hard = Engine(lambda i: "RW" if i % 10 == 0 else "WW")
    for _ in range(4):
        sampler.next(hard)
    assert sampler.buffer.acceptance < 0.25
    assert max(map(len, hard.asked)) > 50
    assert max(map(len, hard.asked)) <= prompts_for(20, 0.1)  # never beyond half of the initial acceptance


@pytest.mark.parametrize(("share", "before"), [(1 / 3, 1.8), (0.2, 2.7)])
def test_a_step_takes_one_round(share: float, before: float) -> None:
    """Asking for the expectation fills a step every other time, and each round ends in a tail as long as the longest
    response: it took ``before`` rounds a step. No more is generated in the end: what is left over opens the next step.
    """
    lots, wanted, steps = random.Random(0), 64, 100
    prompt, right, wrong = make_prompt("0"), make_group("RW").samples, make_group("WW").samples

    def generate(prompts: list[Prompt], _: int) -> list[Group]:
        return [Group(prompt, right if lots.random() < share else wrong) for prompt in prompts]

    cursor = PromptCursor([prompt], seed=0)
    sampler = DynamicSampler(cursor, GroupBuffer(make_config(sampler={"prompts_per_step": wanted})))
    stats = [sampler.next(generate).stats for _ in range(steps)]
    assert sum(item.rounds for item in stats) / steps <= 1.05 < before
    assert sum(item.groups for item in stats) * share / (wanted * steps) == pytest.approx(1, abs=0.02)
    assert sum(item.too_old for item in stats) == 0


def test_the_number_of_prompts_is_the_binomials() -> None:
    """The smallest whose expectation, less two standard deviations, is what is wanted."""
    for wanted, share in ((512, 1 / 3), (64, 0.2), (1, 0.5), (7, 0.95)):
        n = prompts_for(wanted, share)
        assert n * share - 2 * math.sqrt(n * share * (1 - share)) >= wanted - 1e-9
        n -= 1
        assert n * share - 2 * math.sqrt(n * share * (1 - share)) < wanted
    assert [prompts_for(wanted, 1.0) for wanted in (1, 2, 3, 512)] == [1, 2, 3, 512]


def test_statistics_count_everything_generated() -> None:
    engine, sampler = Engine(every_third), make_sampler()
    seen: list[tuple[int, int]] = []
    sampler.on_round = lambda at_hand, stats: seen.append((at_hand, stats.groups))
    stats = sampler.next(engine).stats
    n = sum(map(len, engine.asked))
    assert stats.groups == n == stats.all_correct + stats.all_incorrect + stats.mixed
    assert stats.samples == 4 * n
    assert stats.correct == 2 * stats.mixed + 4 * stats.all_correct
    assert stats.truncated == stats.all_incorrect
    assert stats.tokens == 4 * stats.samples
    assert stats.reward == 2 * stats.correct - stats.samples
    assert seen[-1][1] == n
    assert len(seen) == stats.rounds


def test_saved_groups_have_their_rewards_masks_and_rows() -> None:
    """Rows come from the data set, not from the state."""
    prompt = replace(make_prompt(), row={"number": 1}, messages=(("user", "?"),))
    sample = replace(make_sample(True), parts={"a": 0.5})
    mask = torch.arange(sample.completion.length) > 1
    sample = replace(sample, completion=replace(sample.completion, loss_mask=mask))
    sampler = make_sampler()
    sampler.buffer.groups = [Group(prompt, (sample,), step=3)]
    state, file = sampler.buffer.state_dict(), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    sampler.buffer.load_state_dict(torch.load(file, weights_only=True), {prompt.id: prompt})
    (saved,), (read,) = state["buffer"], sampler.buffer.groups
    assert (saved.prompt.row, saved.prompt.messages) == ({}, ())
    assert (read.prompt, read.prompt.row, read.step) == (prompt, {"number": 1}, 3)
    assert read.samples[0].parts == {"a": 0.5}
    (sequence,) = make_sequences([read], make_config().advantage)
    assert sequence.mask.tolist() == [False] * len(prompt.token_ids) + mask.tolist()


def test_groups_of_a_version_with_fewer_fields_are_refused() -> None:
    """A saved response of an older version loads without the fields that it did not have."""
    buffer, group = GroupBuffer(make_config()), make_group("RW")
    state = {"steps": 0, "accepted": 0, "tried": 0, "generated": 0, "buffer": [group], "waiting": []}
    buffer.load_state_dict(state, {})
    object.__delattr__(group.samples[1].completion, "experts")
    with pytest.raises(RunError):
        buffer.load_state_dict(state, {})
