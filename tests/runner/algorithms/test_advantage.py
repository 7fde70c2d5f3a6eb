"""Advantages of responses, turns and segments against their formulas, and the training records made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import longhand
import pytest
import torch
from builders import make_group, make_prompt, make_sample, snippets_of
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.algorithms.packing import count_training_tokens
from dapo_runner.algorithms.segments import chain_segments, chain_starts, segment_metrics, tree_segments
from dapo_runner.config import AdvantageConfig, SegmentsConfig
from dapo_runner.config.training import BY_RESPONSE, BY_TOKEN
from dapo_runner.types import Branch, Completion, Group, Sample, TrainingSequence, Turn

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
    st.sampled_from([0.5, 1.0]),
)
def test_the_function_of_the_page_compares_turns_with_the_same_turn_of_others(groups: Any, gamma: float) -> None:
    """G_k = r_k + γ·G_{k+1}; the last turn also earns what of the reward the environment did not give."""
    exec(snippets_of("environments")["turns: function"], my_turns := dict[str, Any]())
    my_turns["GAMMA"] = gamma
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
        for places, values in zip(reached, longhand.advantages_of("group_mean", rewards), strict=True):
            expected |= {(*place, k): value for place, value in zip(places, values, strict=True)}
    found = my_turns["by_turn"](made)
    for g, group in enumerate(returns):
        for i, one in enumerate(group):
            tokens = [expected[g, i, k] for k in range(len(one)) for _ in range(k + 1)]
            mask = made[g].samples[i].completion.loss_mask
            assert found[g][i][mask].tolist() == pytest.approx(tokens, rel=1e-4, abs=1e-5)
    assert all(sequence.rollout_logprobs.isfinite().all() for sequence in make_sequences(made, AdvantageConfig()))


def response_of(*probabilities: float) -> Completion:
    return Completion(torch.arange(len(probabilities)), torch.tensor(probabilities).log(), "stop", "")


def leaf(reward: float, *path: tuple[int, int], trains: bool = True) -> Sample:
    """A response through the nodes (child, tokens) of a tree."""
    sample = make_sample(reward > 0, length=sum(length for _, length in path), trains=trains)
    completion = replace(sample.completion, path=tuple(Branch(*node) for node in path))
    return replace(sample, base_reward=reward, completion=completion)


UNMASKED = SegmentsConfig(kind="tree", mask=False)


def sequences_of(*samples: Sample, **config: Any) -> list[TrainingSequence]:
    segments = SegmentsConfig(**{"kind": "tree", "tokens": 3, "mask": False} | config)
    group = Group(make_prompt(n_tokens=2), samples)
    grown = group if samples[0].segments else tree_segments(group, segments)
    return make_sequences([grown], AdvantageConfig(segments=segments))


@pytest.mark.parametrize(
    ("interval", "threshold", "starts"), [(2, 0.9, [0, 4, 7]), (5, 0.9, [0]), (1, 0.25, [0, 7]), (1, 0.05, [0])]
)
def test_a_chain_is_cut_before_every_nth_cut_point(interval: int, threshold: float, starts: list[int]) -> None:
    """Below 0.9 are the tokens 1, 2, 4, 6, 7 and 8; the last token, 8, is no cut point, as nothing follows it."""
    response = response_of(0.95, 0.5, 0.89, 0.91, 0.1, 0.99, 0.3, 0.2, 0.2)
    sample, config = make_sample(True), SegmentsConfig(kind="chain", interval=interval, threshold=threshold)
    assert chain_starts(replace(sample, completion=response), config) == starts
    assert chain_starts(replace(sample, completion=response_of(0.01)), config) == [0]
    assert chain_starts(replace(sample, completion=response, trains=False), config) == [0]  # needs no continuations


def test_a_segment_of_a_chain_earns_the_difference_of_the_values_at_its_ends() -> None:
    """The last one ends in the reward, 1 and a length penalty of −¼. With a mask only cut points train and count."""
    sample = replace(make_sample(True, penalty=-0.25), completion=response_of(0.95, 0.5, 0.89, 0.91, 0.1))
    sample = replace(sample, segments=chain_segments(sample, [0, 2], [0.0, 0.5]))
    assert [(x.before, x.after) for x in sample.segments] == [(0.0, 0.5), (0.5, 0.75)]
    (sequence,) = sequences_of(sample, kind="chain", mask=True, tokens=None)
    assert sequence.mask.tolist() == [False, False, False, True, True, False, True]
    assert sequence.advantages.tolist() == [0, 0, 0.5, 0.5, 0.25, 0.25, 0.25]
    assert count_training_tokens([sequence]) == 3  # Z of the paper
    (unmasked,) = sequences_of(sample, kind="chain", tokens=None)
    assert unmasked.mask.tolist() == [False] * 2 + [True] * 5
    (filtered,) = sequences_of(replace(sample, trains=False), kind="chain", tokens=None)
    assert not filtered.mask.any()


def test_a_tree_from_its_leaves_up() -> None:
    """Rewards 1 and −1 under the first child, 1 of the second, which ended itself: values 0, 1 and of the root ½."""
    tree = [leaf(1, (0, 3), (0, 2)), leaf(-1, (0, 3), (1, 4)), leaf(1, (1, 2))]
    group = tree_segments(Group(make_prompt(), tuple(tree)), UNMASKED)
    found = [
        [(x.length, x.before, x.after, x.advantage, x.trains) for x in sample.segments] for sample in group.samples
    ]
    assert found == [
        [(3, 0.5, 0.0, -0.5, True), (2, 0.0, 1.0, 1.0, True)],
        [(3, 0.5, 0.0, -0.5, False), (4, 0.0, -1.0, -1.0, True)],  # what two responses share trains once
        [(2, 0.5, 1.0, 0.5, True)],
    ]
    sequences = sequences_of(*tree)
    assert [int(sequence.mask.sum()) for sequence in sequences] == [5, 4, 2]
    assert count_training_tokens(sequences) == group.n_generated == 3 + 2 + 4 + 2
    without_first = sequences_of(replace(tree[0], trains=False), *tree[1:])
    assert [int(sequence.mask.sum()) for sequence in without_first] == [0, 7, 2]  # the next trains what they share


def test_segments_without_an_advantage_do_not_train() -> None:
    """Both nodes are half right, so that only their children say something. Equal rewards say nothing at all."""
    halves = [leaf(1 if child else -1, (node, 3), (child, 2)) for node in (0, 1) for child in (0, 1)]
    assert [sequence.mask[2:].tolist() for sequence in sequences_of(*halves)] == [[False] * 3 + [True] * 2] * 4
    for reward in (-1.0, 0.1, 0.7):  # the mean of three times 0.1 is not 0.1
        equal = [leaf(reward, (node, 3), (child, 2)) for node in range(2) for child in range(3)]
        assert count_training_tokens(sequences_of(*equal)) == 0


@pytest.mark.parametrize(
    ("mask", "trains"), [(True, [[True, False], [False, True], [False]]), (False, [[True] * 2, [False, True], [True]])]
)
def test_with_a_mask_segments_without_a_cut_point_do_not_train(mask: bool, trains: list[list[bool]]) -> None:
    """So that they take no place in a step. Cut points are the first token of the tree, and that of the second leaf."""
    tree = [leaf(1, (0, 3), (0, 2)), leaf(-1, (0, 3), (1, 2)), leaf(1, (1, 2))]
    likely = ([0.1] + [0.99] * 4, [0.1, 0.99, 0.99, 0.1, 0.99], [0.99] * 2)
    tree = [
        replace(sample, completion=replace(sample.completion, logprobs=torch.tensor(row).log()))
        for sample, row in zip(tree, likely, strict=True)
    ]
    group = tree_segments(Group(make_prompt(), tuple(tree)), SegmentsConfig(kind="tree", mask=mask))
    assert [[segment.trains for segment in sample.segments] for sample in group.samples] == trains


def test_figures_count_a_shared_segment_once() -> None:
    """Sizes ½, 1, 1 and ½ in the first tree, three times 0 in the second."""
    tree = (leaf(1, (0, 3), (0, 2)), leaf(-1, (0, 3), (1, 4)), leaf(1, (1, 2)))
    solved = (leaf(1, (0, 3), (0, 2)), leaf(1, (0, 3), (1, 4)))
    figures = segment_metrics([tree_segments(Group(make_prompt(), leaves), UNMASKED) for leaves in (tree, solved)])
    assert figures == {"per_response": 9 / 5, "advantage": 3 / 7, "zero": 3 / 7}
    sample = make_sample(True, length=9)
    chains = tuple(replace(sample, segments=chain_segments(sample, [0, 4], values)) for values in ([0, 0.5], [0, 0]))
    assert segment_metrics([Group(make_prompt(), chains)]) == {"per_response": 2, "advantage": 0.5, "zero": 0.25}
    rounded = chain_segments(replace(sample, base_reward=0.7), [0], [fmean([0.7] * 3)])
    assert rounded[0].advantage != 0
    assert segment_metrics([Group(make_prompt(), (replace(sample, segments=rounded),))])["zero"] == 1
    assert segment_metrics([]) == {}


# Too few, of another length, not finite, no list, no number.
WRONG: list[Any] = [[0.0], [[0.0, 1.0], [0.0, 1.0]], [float("nan"), 0.0], 0.0, None, [None, 1.0], ["a", 1.0]]


def wrong(groups: list[Group]) -> list[Any]:
    return [WRONG[len(groups[0].prompt.id)] for _ in groups]


def raises(groups: list[Group]) -> Any:
    yield 1 / 0


def forgets_its_result(groups: list[Group]) -> None: ...


def test_wrong_advantages_of_ones_own_are_refused() -> None:
    line = raises.__code__.co_firstlineno + 1
    with refused("advantage.kind", parts=["ZeroDivisionError", f"({Path(__file__).name}:{line})"]):
        make_sequences([make_group("RW")], AdvantageConfig(kind=f"{__name__}:raises"))
    with refused("advantage.kind", parts=["[2]"]):
        make_sequences([make_group("RW")], AdvantageConfig(kind=f"{__name__}:forgets_its_result"))
    for n in range(len(WRONG)):
        with refused("advantage.kind"):
            make_sequences([make_group("RW", n * "p")], AdvantageConfig(kind=f"{__name__}:wrong"))
