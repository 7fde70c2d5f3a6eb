"""Advantages against the formula worked by hand, and the records made from groups."""

from __future__ import annotations

import math

import pytest
import torch
from builders import make_group, make_prompt, make_sample
from hypothesis import given
from hypothesis import strategies as st

from dapo_runner.algorithms.advantage import ADVANTAGES, make_sequences
from dapo_runner.config import AdvantageConfig
from dapo_runner.config.training import BY_RESPONSE, BY_TOKEN
from dapo_runner.types import Group


def advantages_of(group: Group, **values: float | str) -> list[float]:
    sequences = make_sequences([group], AdvantageConfig.model_validate(values))
    return [float(sequence.advantages[-1]) for sequence in sequences]


def test_group_std_is_the_papers() -> None:
    """Rewards 1, 1, 1, −1: mean ½, unbiased std 1."""
    assert advantages_of(make_group("RRRW")) == pytest.approx([0.5, 0.5, 0.5, -1.5], abs=1e-5)


def test_group_mean_leaves_the_scale() -> None:
    assert advantages_of(make_group("RRRW"), kind="group_mean") == [0.5, 0.5, 0.5, -1.5]
    assert advantages_of(make_group("RW"), kind="group_mean") == [1.0, -1.0]


def step_of(*patterns: str, kind: str) -> list[list[float]]:
    groups = [make_group(pattern, str(index)) for index, pattern in enumerate(patterns)]
    sequences = make_sequences(groups, AdvantageConfig.model_validate({"kind": kind}))
    return [[float(s.advantages[-1]) for s in sequences if s.group_id == index] for index in range(len(groups))]


def test_batch_std_takes_the_scale_from_the_whole_step() -> None:
    """Rewards 1, −1 and 1, 1: group means 0 and 1; over all four, mean ½ and unbiased std 1."""
    assert step_of("RW", "RR", kind="batch_std") == [pytest.approx([1.0, -1.0], abs=1e-5), [0.0, 0.0]]
    # Mean 0 and unbiased std √(8/7) over the eight.
    scale = math.sqrt(8 / 7)
    first, second = step_of("RRRW", "WWWR", kind="batch_std")
    assert first == pytest.approx([0.5 / scale] * 3 + [-1.5 / scale], abs=1e-5)
    assert second == pytest.approx([-0.5 / scale] * 3 + [1.5 / scale], abs=1e-5)


def test_batch_whitened_knows_no_groups() -> None:
    first, second = step_of("RW", "RR", kind="batch_whitened")
    assert first + second == pytest.approx([0.5, -1.5, 0.5, 0.5], abs=1e-5)
    first, second = step_of("RW", "RRR", kind="batch_mean")  # rewards whose mean is 0.6
    assert first + second == pytest.approx([0.4, -1.6, 0.4, 0.4, 0.4])


def test_leave_one_out_is_the_reward_less_the_mean_of_the_others() -> None:
    (group,) = step_of("RRWR", kind="leave_one_out")
    rewards = [1.0, 1.0, -1.0, 1.0]
    expected = [r - (sum(rewards) - r) / 3 for r in rewards]
    assert group == pytest.approx(expected)


def test_every_kind_of_the_configuration_has_its_formula() -> None:
    assert set(ADVANTAGES) == {*BY_RESPONSE, *BY_TOKEN}
    for kind in ADVANTAGES:
        assert make_sequences([], AdvantageConfig.model_validate({"kind": kind})) == []


@given(
    rewards=st.lists(st.lists(st.floats(-2, 2), min_size=2, max_size=6), min_size=1, max_size=5),
    kind=st.sampled_from(sorted(ADVANTAGES.keys() - set(BY_TOKEN))),
)
def test_advantages_are_finite_centred_and_keep_the_order_of_rewards(rewards: list[list[float]], kind: str) -> None:
    groups = [torch.tensor(group, dtype=torch.float64) for group in rewards]
    batch = torch.cat(groups)
    values = [ADVANTAGES[kind](group, batch) for group in groups]
    assert all(bool(torch.isfinite(value).all()) for value in values)
    assert abs(float(torch.cat(values).sum())) < 1e-3  # 1e-16 of rounding over eps, at the worst
    for group, value in zip(groups, values, strict=True):
        order = group.argsort()
        assert bool((value[order].diff() >= -1e-12).all())


@pytest.mark.parametrize(
    ("kind", "rewards"), [("gae", [1.0, -1.0]), ("returns", [1.0, -1.0]), ("group_returns", [1.0, -1.0])]
)
def test_per_token_it_is_what_the_last_token_earns(kind: str, rewards: list[float]) -> None:
    sequences = make_sequences([make_group("RW"), make_group("RR")], AdvantageConfig.model_validate({"kind": kind}))
    assert [sequence.reward for sequence in sequences] == rewards + (
        [0.0] * 2 if kind == "group_returns" else [1.0] * 2
    )
    assert not any(sequence.advantages.any() for sequence in sequences)
    assert all(sequence.reward is None for sequence in make_sequences([make_group("RW")], AdvantageConfig()))


def test_length_penalty_is_part_of_the_reward() -> None:
    group = Group(make_prompt(), (make_sample(True), make_sample(True, penalty=-0.5)))
    assert advantages_of(group, kind="group_mean") == [0.25, -0.25]


@pytest.mark.parametrize("penalty", [0.0, -0.3, -1 / 3])
def test_equal_rewards_give_nothing(penalty: float) -> None:
    group = Group(make_prompt(), tuple(make_sample(False, penalty=penalty) for _ in range(7)))
    assert max(map(abs, advantages_of(group))) < 1e-9


def test_filtered_samples_count_in_the_group_but_do_not_train() -> None:
    samples = (make_sample(True), make_sample(False), make_sample(False, truncated=True, trains=False))
    sequences = make_sequences([Group(make_prompt(), samples)], AdvantageConfig())
    assert [bool(sequence.mask.any()) for sequence in sequences] == [True, True, False]
    third, scale = 1 / 3, math.sqrt(4 / 3)
    expected = [(1 + third) / scale, (-1 + third) / scale, (-1 + third) / scale]
    assert [float(s.advantages[-1]) for s in sequences] == pytest.approx(expected, abs=1e-5)


def test_sequences_line_up_with_their_tokens() -> None:
    sequences = make_sequences([make_group("RW"), make_group("WR")], AdvantageConfig())
    assert [sequence.group_id for sequence in sequences] == [0, 0, 1, 1]
    first = sequences[0]
    assert first.token_ids.tolist() == [1, 2, 3, 10, 11, 12, 13]
    assert first.mask.tolist() == [False] * 3 + [True] * 4
    assert first.rollout_logprobs.tolist() == [0, 0, 0, -0.125, -0.25, -0.375, -0.5]
    assert first.advantages[:3].tolist() == [0, 0, 0]
    assert len(set(first.advantages[3:].tolist())) == 1
    assert (first.token_ids.dtype, first.advantages.dtype) == (torch.int64, torch.float32)


@pytest.mark.parametrize("kind", ["batch_whitened", "batch_std", "group_std"])
def test_one_sample_has_no_spread(kind: str) -> None:
    assert step_of("R", kind=kind) == [[0.0]]
