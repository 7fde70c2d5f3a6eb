"""Advantages of responses, turns and segments against their formulas, and the training records made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import longhand
import pytest
import torch
from builders import make_group, make_prompt, make_sample
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.config import AdvantageConfig
from dapo_runner.config.training import BY_RESPONSE, BY_TOKEN
from dapo_runner.types import Completion, Group, Sample, Turn

GROUPS = st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=6), max_size=4)


def rewarded(reward: float, length: int = 4, **values: Any) -> Sample:
    return replace(make_sample(reward > 0, length=length), base_reward=reward, **values)


def group_of(rewards: list[float]) -> Group:
    return Group(make_prompt(), tuple(map(rewarded, rewards)))


@settings(max_examples=40)
@given(GROUPS, st.sampled_from([*BY_RESPONSE, *BY_TOKEN]))
def test_each_kind_is_its_formula(rewards: list[list[float]], kind: str) -> None:
    """Also of a single sample, which has no spread."""
    sequences = make_sequences(map(group_of, rewards), AdvantageConfig(kind=kind))
    found = [s.advantages[-1].item() if s.reward is None else s.reward for s in sequences]
    expected = [value for group in longhand.advantages_of(kind, rewards) for value in group]
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert all((sequence.reward is not None) == (kind in BY_TOKEN) for sequence in sequences)
    assert kind in BY_RESPONSE or not any(sequence.advantages.any() for sequence in sequences)


@pytest.mark.parametrize("reward", [0.0, -1.3, -4 / 3])
def test_equal_rewards_give_nothing(reward: float) -> None:
    """Whose mean in float32 would leave a residue larger than the ε beside the spread."""
    sequences = make_sequences([group_of([reward] * 7)], AdvantageConfig())
    assert max(float(sequence.advantages.abs().max()) for sequence in sequences) < 1e-9


def test_a_sample_that_does_not_train_still_counts_and_a_length_penalty_is_reward() -> None:
    samples = (rewarded(1.0), rewarded(0.5, length_penalty=-0.5), rewarded(-1.0, trains=False))
    sequences = make_sequences([Group(make_prompt(), samples)], AdvantageConfig(kind="group_mean"))
    assert [sequence.advantages[-1] for sequence in sequences] == [1.0, 0.0, -1.0]
    assert [bool(sequence.mask.any()) for sequence in sequences] == [True, True, False]


def test_a_record_lines_up_with_its_tokens() -> None:
    first, *_, last = make_sequences([make_group("RW"), replace(make_group("WR"), step=3)], AdvantageConfig(), step=5)
    assert (first.group_id, first.age, last.group_id, last.age) == (0, 5, 1, 2)
    assert first.token_ids.tolist() == [1, 2, 3, 10, 11, 12, 13]
    assert first.mask.tolist() == [False] * 3 + [True] * 4
    assert first.rollout_logprobs.tolist() == [0, 0, 0, -0.125, -0.25, -0.375, -0.5]
    assert first.advantages[:3].tolist() == [0, 0, 0]
    assert len(set(first.advantages[3:].tolist())) == 1
    assert (first.token_ids.dtype, first.advantages.dtype) == (torch.int64, torch.float32)


def episode(rewards: list[float | None], reward: float) -> Sample:
    """Turns of one, two, … tokens of the policy's, each followed by two of the environment's, which has no log-prob."""
    turns, place = list[Turn](), 0
    for n, earned in enumerate(rewards, start=1):
        turns.append(Turn("assistant", place, place + n, "", reward=earned))
        turns.append(Turn("environment", place + n, place + n + 2, ""))
        place += n + 2
    own = torch.zeros(place, dtype=torch.bool)
    for turn in turns[::2]:
        own[turn.start : turn.end] = True
    logprobs = torch.where(own, -0.5, torch.nan)
    completion = Completion(torch.arange(place), logprobs, "stop", "", loss_mask=own, turns=tuple(turns))
    return rewarded(reward, completion=completion)


@settings(max_examples=30)
@given(
    st.lists(
        st.lists(
            st.tuples(st.lists(st.floats(-2, 2) | st.none(), min_size=1, max_size=3), st.floats(-2, 2)),
            min_size=1,
            max_size=3,
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(BY_RESPONSE),
    st.sampled_from([0.5, 1.0]),
)
def test_turns_are_compared_with_the_same_turn_of_others(groups: Any, kind: str, gamma: float) -> None:
    """G_k = r_k + γ·G_{k+1}; the last turn also earns what of the reward the environment did not give."""
    made = [Group(make_prompt(), tuple(episode(*one) for one in group)) for group in groups]
    returns: list[list[list[float]]] = []
    for group in groups:
        returns.append([])
        for given_rewards, total in group:
            earned = [reward or 0.0 for reward in given_rewards]
            earned[-1] += total - sum(earned)
            n = len(earned)
            returns[-1].append([sum(earned[j] * gamma ** (j - k) for j in range(k, n)) for k in range(n)])
    expected: dict[tuple[int, int, int], float] = {}
    for k in range(3):
        reached = [[(g, i) for i, one in enumerate(group) if k < len(one)] for g, group in enumerate(returns)]
        rewards = [[returns[g][i][k] for g, i in places] for places in reached]
        for places, values in zip(reached, longhand.advantages_of(kind, rewards), strict=True):
            expected |= {(*place, k): value for place, value in zip(places, values, strict=True)}
    sequences = iter(make_sequences(made, AdvantageConfig(kind=kind, turn_gamma=gamma)))
    for g, group in enumerate(returns):
        for i, one in enumerate(group):
            sequence = next(sequences)
            tokens = [expected[g, i, k] for k in range(len(one)) for _ in range(k + 1)]
            assert sequence.advantages[sequence.mask].tolist() == pytest.approx(tokens, rel=1e-4, abs=1e-5)
            assert sequence.rollout_logprobs.isfinite().all()


def one_each(groups: list[Group]) -> list[list[float]]:
    return [[1.0 + index for index, _ in enumerate(group.samples)] for group in groups]


def of_tokens(groups: list[Group]) -> list[list[torch.Tensor]]:
    return [[torch.arange(sample.completion.length) for sample in group.samples] for group in groups]


WRONG: list[Any] = [[0.0], [[0.0, 1.0], [0.0, 1.0]], [float("nan"), 0.0]]  # too few, of another length, not finite


def wrong(groups: list[Group]) -> list[Any]:
    return [WRONG[len(groups[0].prompt.id)] for _ in groups]


def test_a_function_of_the_users_own() -> None:
    """It gives an advantage to each response or to each token; anything else is refused."""
    group = make_group("RW")
    first, second = make_sequences([group], AdvantageConfig(kind=f"{__name__}:one_each"))
    assert (first.advantages[3:].tolist(), second.advantages[3:].tolist()) == ([1.0] * 4, [2.0] * 4)
    one, _ = make_sequences([group], AdvantageConfig(kind=f"{__name__}:of_tokens"))
    assert one.advantages[3:].tolist() == [0, 1, 2, 3]
    for n in range(len(WRONG)):
        with refused("advantage.kind"):
            make_sequences([make_group("RW", n * "p")], AdvantageConfig(kind=f"{__name__}:wrong"))
