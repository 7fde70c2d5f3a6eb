"""Dynamic sampling without a model: a scripted generator stands in for the engine."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from builders import make_config, make_group, make_prompt, make_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.data.dataset import PromptCursor
from dapo_runner.logging.metrics import sampling_metrics
from dapo_runner.rollout.group_buffer import GroupBuffer, SampledStep, prompts_for
from dapo_runner.rollout.sampler import DynamicSampler
from dapo_runner.types import Completion, Group, Prompt, Sample, Segment

Samples = tuple[Sample, ...]


class Engine:
    """Give prompt number i what ``script(i)`` is, a pattern or samples, and remember what is asked and given."""

    def __init__(self, script: Callable[[int], str | Samples]) -> None:
        self.script, self.asked, self.rounds, self.given = script, list[list[str]](), list[int](), list[Group]()

    def __call__(self, prompts: list[Prompt], round_index: int) -> list[Group]:
        self.asked.append([prompt.id for prompt in prompts])
        self.rounds.append(round_index)
        found = [(prompt, self.script(int(prompt.id))) for prompt in prompts]
        groups = [make_group(one, prompt.id) if isinstance(one, str) else Group(prompt, one) for prompt, one in found]
        self.given += groups
        return groups


def make_sampler(wanted: int = 4, n_prompts: int = 50, **values: Any) -> DynamicSampler:
    config = make_config(sampler={"prompts_per_step": wanted, **values})
    return DynamicSampler(PromptCursor([make_prompt(str(i)) for i in range(n_prompts)], seed=0), GroupBuffer(config))


def ids(groups: list[Group]) -> list[str]:
    return [group.prompt.id for group in groups]


def every_third(i: int) -> str:
    return ("RWRW", "RRRR", "WWWT")[i % 3]


def saved(state: Any) -> Any:
    """Return a state as a checkpoint holds it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# What a prompt's samples are like: correct or not, with lengths and length penalties that say nothing about it.
SHAPED = st.lists(st.tuples(st.booleans(), st.integers(1, 60), st.floats(-1, 0)), min_size=4, max_size=4)


@settings(max_examples=40)
@given(
    shapes=st.lists(SHAPED, min_size=1, max_size=12),
    wanted=st.integers(1, 6),
    max_rounds=st.integers(1, 4),
    acceptance=st.sampled_from([0.05, 0.25, 1.0]),
    steps=st.integers(1, 5),
    stop_after=st.integers(0, 4),
)
def test_any_groups_any_limits_and_a_resume_anywhere(
    shapes: list[Any], wanted: int, max_rounds: int, acceptance: float, steps: int, stop_after: int
) -> None:
    samples = [tuple(make_sample(right, length=n, penalty=p) for right, n, p in shape) for shape in shapes]
    engine, seen = Engine(lambda i: samples[i]), list[tuple[int, int]]()

    def fresh() -> DynamicSampler:
        limits = {"max_rounds": max_rounds, "max_age": 99, "initial_acceptance": acceptance}
        return make_sampler(wanted, len(shapes), on_exhausted="train_partial", **limits)

    sampler, taken = fresh(), list[SampledStep]()
    for number in range(steps):
        if number == stop_after:
            state, sampler = saved(sampler.state_dict()), fresh()
            sampler.load_state_dict(state)
            assert sampler.in_flight == 0  # only asynchronous rollouts leave prompts in flight
        sampler.on_round = lambda n_groups, stats: seen.append((n_groups, stats["groups"]))
        before, n_rounds = len(engine.given), len(engine.asked)
        step = sampler.next(engine)
        taken.append(step)
        generated, stats = engine.given[before:], step.stats
        every = [sample for group in generated for sample in group.samples]
        assert stats["groups"] == len(generated)
        assert stats["all_correct"] + stats["all_incorrect"] + stats["mixed"] == stats["groups"]
        assert (stats["samples"], stats["correct"]) == (len(every), sum(sample.correct for sample in every))
        assert stats["tokens"] == stats["generated"] == step.generated == sum(one.completion.length for one in every)
        assert stats["reward"] == pytest.approx(sum(one.base_reward + one.length_penalty for one in every))
        assert stats["rounds"] == len(engine.asked) - n_rounds <= max_rounds
        assert bool(step.shortfall) == (len(step.groups) < wanted)
        assert len(step.groups) <= wanted
        if step.shortfall:
            assert stats["rounds"] == max_rounds
            assert not sampler.buffer.groups  # it gets everything
        assert stats["carried_out"] == len(sampler.buffer.groups)
        assert not stats["rounds"] or seen[-1] == (len(step.groups) + stats["carried_out"], stats["groups"])
    assert max(map(len, engine.asked)) <= prompts_for(wanted, acceptance / 2)  # however little is accepted
    mixed = [group for group in engine.given if 0 < sum(sample.correct for sample in group.samples) < 4]
    accepted = [group for step in taken for group in step.groups] + sampler.buffer.groups
    assert ids(accepted) == ids(mixed)
    assert engine.rounds == list(range(len(engine.rounds)))
    cursor = fresh().cursor
    assert engine.asked == [[prompt.id for prompt in cursor.take(len(asked), 0)] for asked in engine.asked]


@pytest.mark.parametrize(
    ("rewards", "by_correctness", "by_reward"),
    [
        ((0.55, 0.99, 0.7, 0.6), 0, 4),  # all correct, some better
        ((0.0, 0.2, 0.0, 0.0), 0, 4),  # all incorrect, one nearly correct
        ((0.9, 0.9, 0.9, 0.9), 0, 0),  # only the length penalties differ
        ((0.1, 0.9, 0.9, 0.9), 4, 4),
    ],
)
def test_what_the_filter_goes_by(rewards: tuple[float, ...], by_correctness: int, by_reward: int) -> None:
    each = (make_sample(reward >= 0.5, penalty=-index / 8) for index, reward in enumerate(rewards))
    samples = tuple(replace(sample, base_reward=reward) for sample, reward in zip(each, rewards, strict=True))
    for filter_on, n_accepted in (("correctness", by_correctness), ("reward", by_reward), (None, 4)):
        sampler = make_sampler(filter_groups=filter_on, on_exhausted="train_partial", max_rounds=3)
        step = sampler.next(Engine(lambda i: samples))
        assert len(step.groups) == n_accepted
        assert (sampler.buffer.acceptance > 0.5) == (n_accepted > 0)
        assert step.stats["varying_reward_only"] == (step.stats["groups"] if by_reward > by_correctness else 0)
        shares = sampling_metrics(step.stats, "reward")
        assert shares["sampling/varying_reward_only"] == float(by_reward > by_correctness)
        assert shares["sampling/varying_reward"] == 1 - shares["sampling/equal_reward"] == float(by_reward > 0)


@pytest.mark.parametrize("max_age", [0, 1, 2, 10])
def test_what_is_left_over_opens_the_next_steps_until_it_is_too_old(max_age: int) -> None:
    """Everything is accepted where a fifth was expected: the first round would serve five steps."""
    engine, sampler = Engine(lambda i: "RW"), make_sampler(wanted=4, initial_acceptance=0.2, max_age=max_age)
    steps = [sampler.next(engine) for _ in range(5)]
    assert len(engine.asked[0]) == prompts_for(4, 0.2)
    assert ids(steps[0].groups) == engine.asked[0][:4]
    ages = {number - group.step for number, step in enumerate(steps, start=1) for group in step.groups}
    assert ages == set(range(min(max_age, 4) + 1))
    dropped = sum(step.stats["too_old"] for step in steps)
    assert (dropped > 0) == (max_age < 4)
    assert sum(len(step.groups) for step in steps) + len(sampler.buffer.groups) + dropped == len(engine.given)
    for number, (before, after) in enumerate(pairwise(steps), start=2):
        carried_in = after.stats["carried_in"]
        assert carried_in + after.stats["too_old"] == before.stats["carried_out"]
        assert [group.step for group in after.groups[carried_in:]] == [number] * max(0, 4 - carried_in)
        assert (after.stats["rounds"] == 0) == (carried_in >= 4)


def test_a_group_that_waited_too_long_for_its_turn_is_not_accepted() -> None:
    engine, sampler = Engine(lambda i: "RW"), make_sampler(max_age=2, initial_acceptance=1.0)

    def generate_late(prompts: list[Prompt], round_index: int) -> list[Group]:
        groups = engine(prompts, round_index)
        return [replace(group, step=sampler.buffer.step - place % 4) for place, group in enumerate(groups)]

    steps = [sampler.next(generate_late) for _ in range(6)]
    assert {number - group.step for number, step in enumerate(steps, 1) for group in step.groups} == {0, 1, 2}
    accepted = sum(len(step.groups) for step in steps) + len(sampler.buffer.groups)
    assert accepted + sum(step.stats["too_old"] for step in steps) == len(engine.given)


def test_a_tree_is_trained_on_over_several_steps() -> None:
    """Five samples have something to train on: two at a time, far apart, until they are too old."""
    segments = [(Segment(1, 0.0, 1.0, 1.0, trains=place != 3),) for place in range(6)]
    samples = tuple(replace(make_sample(True, length=place + 1), segments=own) for place, own in enumerate(segments))
    sampler = make_sampler(max_age=2)
    too_old: list[float] = []

    def step(*groups: Group) -> list[tuple[str, list[int]]]:
        sampler.buffer.step += 1
        sampler.load_state_dict(saved(sampler.state_dict()))
        spread, counts = sampler.buffer.spread([replace(group, step=sampler.buffer.step) for group in groups], 2)
        assert counts["waiting"] == sum(len(group.samples) for group in sampler.buffer.waiting)
        too_old.append(counts["too_old"])
        return [(group.prompt.id, [s.completion.length for s in group.samples]) for group in spread]

    first, second = Group(make_prompt("1"), samples), Group(make_prompt("2"), samples[3:])
    assert step(first) == [("1", [1, 5])]
    assert step(second) == [("2", [5, 6]), ("1", [2, 6])]  # the newest first, also in the rollout log
    assert step() == [("1", [3])]
    assert sampler.buffer.waiting == []
    assert step(Group(make_prompt("3"), samples)) == [("3", [1, 5])]
    sampler.buffer.max_age = 0
    assert step() == []
    assert step(Group(make_prompt("4"), samples[3:4])) == []  # nothing to train on
    assert too_old == [0, 0, 0, 0, 3, 0]
    step(first)
    assert sampler.drop_groups() == 1
    assert step() == []


def test_rounds_are_sized_by_the_acceptance_so_far() -> None:
    """Everything is accepted, so the rounds shrink to what is needed. Then little is, and they grow."""
    sampler = make_sampler(wanted=20, n_prompts=1000, initial_acceptance=0.2)
    easy, hard = Engine(lambda i: "RW"), Engine(lambda i: "RW" if i % 10 == 0 else "WW")
    while not easy.asked or len(sampler.buffer.groups) >= 20:
        sampler.next(easy)
    for _ in range(30):
        sampler.next(easy)
    assert 0.9 < sampler.buffer.acceptance <= 1
    assert len(easy.asked[-1]) <= 25
    for _ in range(4):
        sampler.next(hard)
    assert sampler.buffer.acceptance < 0.25
    assert 50 < max(map(len, hard.asked)) <= prompts_for(20, 0.1)  # never beyond half of the initial acceptance
    unfiltered = GroupBuffer(make_config(sampler={"filter_groups": None}))
    assert (unfiltered.round_size(8), unfiltered.expected(12)) == (8, 12)


@given(st.integers(1, 600), st.floats(0.02, 1.0))
def test_the_number_of_prompts_is_the_binomials(wanted: int, share: float) -> None:
    """The smallest whose expectation, less two standard deviations, is what is wanted."""

    def least(n: int) -> float:
        return n * share - 2 * math.sqrt(n * share * (1 - share))

    n = prompts_for(wanted, share)
    assert least(n) >= wanted - 1e-6
    assert least(n - 1) < wanted + 1e-6


def test_saved_groups_have_their_rewards_masks_and_rows() -> None:
    """Rows come from the data set, not from the state."""
    prompt = replace(make_prompt(), row={"number": 1}, messages=(("user", "?"),))
    sample = replace(make_sample(True), parts={"a": 0.5})
    mask = torch.arange(sample.completion.length) > 1
    sample = replace(sample, completion=replace(sample.completion, loss_mask=mask))
    buffer = make_sampler().buffer
    buffer.groups = [Group(prompt, (sample,), step=3)]
    state = saved(buffer.state_dict())
    buffer.load_state_dict(state, {prompt.id: prompt})
    (bare,), (read,) = state["buffer"], buffer.groups
    assert (bare.prompt.row, bare.prompt.messages) == ({}, ())
    assert (read.prompt, read.prompt.row, read.step) == (prompt, {"number": 1}, 3)
    assert read.samples[0].parts == {"a": 0.5}
    (sequence,) = make_sequences([read], make_config().advantage)
    assert sequence.mask.tolist() == [False] * len(prompt.token_ids) + mask.tolist()


Fields = dict[str, Any]


@pytest.mark.parametrize(
    "encode",
    [
        lambda fields: list(fields.values()),  # as versions of November 2026 wrote it
        lambda fields: {"gone": 1} | dict(reversed(fields.items())),
    ],
)
def test_groups_of_another_version_are_kept(
    encode: Callable[[Fields], list[Any] | Fields], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A completion without its last field used to load, and then no step could be saved."""

    def encode_without_last(completion: Completion) -> list[Any] | Fields:
        return encode({field.name: getattr(completion, field.name) for field in fields(completion)[:-1]})

    buffer = make_sampler().buffer
    buffer.groups = [make_group("RW")]
    with monkeypatch.context() as patch:
        patch.setattr(Completion, "__getstate__", encode_without_last)
        state = saved(buffer.state_dict())
    buffer.load_state_dict(state, {})
    group = buffer.groups[0]
    sample = group.samples[0]
    records: list[Any] = [group, group.prompt, sample, sample.completion, sample.verdict]
    assert {type(record.__getstate__()) for record in records} == {dict}
    for group in (*buffer.groups, *saved(buffer.state_dict())["buffer"]):
        for sample, wanted in zip(group.samples, make_group("RW").samples, strict=True):
            for field in fields(Completion):
                assert repr(getattr(sample.completion, field.name)) == repr(getattr(wanted.completion, field.name))
