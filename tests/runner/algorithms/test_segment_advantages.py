"""Segment advantages against chains and trees worked by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from builders import make_prompt, make_sample
from hypothesis import given
from hypothesis import strategies as st

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.algorithms.packing import count_training_tokens
from dapo_runner.algorithms.segments import chain_segments, chain_starts, node_values, segment_metrics, tree_segments
from dapo_runner.config import AdvantageConfig, SegmentsConfig
from dapo_runner.types import Branch, Completion, Group, Sample, Sequence

CHAIN = SegmentsConfig(kind="chain", interval=2)
TREE = SegmentsConfig(kind="tree", branching=[2, 2], tokens=3, mask=False)


def response_of(*probabilities: float) -> Completion:
    logprobs = torch.tensor(probabilities).log()
    return Completion(torch.arange(len(probabilities)), logprobs, "stop", "")


def leaf(right: bool, *path: tuple[int, int], trains: bool = True, penalty: float = 0.0) -> Sample:
    sample = make_sample(right, length=sum(length for _, length in path), trains=trains, penalty=penalty)
    return replace(sample, completion=replace(sample.completion, path=tuple(Branch(*node) for node in path)))


def tree_of(*leaves: Sample) -> Group:
    return Group(make_prompt(), leaves)


def sequences_of(group: Group, segments: SegmentsConfig) -> list[Sequence]:
    return make_sequences([group], AdvantageConfig(segments=segments))


def test_a_chain_is_cut_before_every_second_cut_point() -> None:
    """Cut points are the tokens 1, 2, 4, 6 and 7; the last token, 8, would be one, but nothing follows it."""
    response = response_of(0.95, 0.5, 0.89, 0.91, 0.1, 0.99, 0.3, 0.2, 0.2)
    assert chain_starts(response, CHAIN) == [0, 4, 7]
    assert chain_starts(response, SegmentsConfig(kind="chain", interval=5)) == [0]
    assert chain_starts(response, SegmentsConfig(kind="chain", interval=1, threshold=0.25)) == [0, 7]
    assert chain_starts(response_of(0.1), CHAIN) == [0]


def test_a_segment_of_a_chain_earns_the_difference_of_the_values_at_its_ends() -> None:
    """Values ¼, ¾ and ½ of the beginnings; the last segment ends in the reward, −1 less a length term of ½."""
    sample = make_sample(False, length=9, penalty=-0.5)
    segments = chain_segments(sample, [0, 4, 7], [0.25, 0.75, 0.5])
    assert [segment.length for segment in segments] == [4, 3, 2]
    assert [segment.advantage for segment in segments] == [0.5, -0.25, -2.0]
    assert [(segment.before, segment.after) for segment in segments] == [(0.25, 0.75), (0.75, 0.5), (0.5, -1.5)]


def test_only_cut_points_train_and_only_they_are_counted() -> None:
    sample = replace(make_sample(True), completion=response_of(0.95, 0.5, 0.89, 0.91, 0.1))
    sample = replace(sample, segments=chain_segments(sample, [0, 2], [0.0, 0.5]))
    group = Group(make_prompt(n_tokens=2), (sample,))
    (sequence,) = sequences_of(group, CHAIN)
    assert sequence.mask.tolist() == [False, False, False, True, True, False, True]
    assert sequence.advantages.tolist() == [0, 0, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert count_training_tokens([sequence]) == 3  # Z of the paper
    (unmasked,) = sequences_of(group, SegmentsConfig(kind="chain", mask=False))
    assert unmasked.mask.tolist() == [False, False, True, True, True, True, True]
    (filtered,) = sequences_of(Group(group.prompt, (replace(sample, trains=False),)), CHAIN)
    assert not filtered.mask.any()


def test_a_tree_from_its_leaves_up() -> None:
    """Rewards 1 and −1 under the first child, 1 of the second, which ended itself: values 0, 1 and of the root ½."""
    group = tree_of(leaf(True, (0, 3), (0, 2)), leaf(False, (0, 3), (1, 4)), leaf(True, (1, 2)))
    first, second, third = (sample.segments for sample in tree_segments(group).samples)
    assert [segment.advantage for segment in first] == [-0.5, 1.0]
    assert [segment.advantage for segment in second] == [-0.5, -1.0]
    assert [segment.advantage for segment in third] == [0.5]
    assert [(segment.before, segment.after) for segment in second] == [(0.5, 0.0), (0.0, -1.0)]
    assert [segment.length for segment in second] == [3, 4]


def test_a_segment_that_responses_share_trains_once() -> None:
    group = tree_of(leaf(True, (0, 3), (0, 2)), leaf(False, (0, 3), (1, 4)), leaf(True, (1, 2)))
    sequences = sequences_of(tree_segments(group), TREE)
    trains = [sequence.mask[3:].tolist() for sequence in sequences]
    assert trains == [[True] * 5, [False] * 3 + [True] * 4, [True] * 2]
    assert count_training_tokens(sequences) == group.n_generated == 3 + 2 + 4 + 2


def test_where_the_first_response_is_left_out_the_next_trains_what_they_share() -> None:
    group = tree_of(leaf(False, (0, 3), (0, 2), trains=False), leaf(True, (0, 3), (1, 4)), leaf(True, (1, 2)))
    sequences = sequences_of(tree_segments(group), TREE)
    assert [int(sequence.mask.sum()) for sequence in sequences] == [0, 7, 2]


def test_a_segment_that_responses_share_is_counted_once() -> None:
    """Sizes ½, 1, 1 and ½ under the two children; of the second group none, of its three segments."""
    group = tree_of(leaf(True, (0, 3), (0, 2)), leaf(False, (0, 3), (1, 4)), leaf(True, (1, 2)))
    solved = tree_of(leaf(True, (0, 3), (0, 2)), leaf(True, (0, 3), (1, 4)))
    figures = segment_metrics([tree_segments(tree) for tree in (group, solved)])
    assert figures == {"per_response": 9 / 5, "advantage": 3 / 7, "zero": 3 / 7}
    sample = make_sample(True, length=9)
    chains = tuple(replace(sample, segments=chain_segments(sample, [0, 4], values)) for values in ([0, 0.5], [0, 0]))
    assert segment_metrics([tree_of(*chains)]) == {"per_response": 2, "advantage": 0.5, "zero": 0.25}
    assert segment_metrics([]) == {}


def test_segments_without_an_advantage_do_not_train() -> None:
    """Both children are half right: their own segments say nothing, those of their children do."""
    group = tree_of(*(leaf(child == 1, (node, 3), (child, 2)) for node in (0, 1) for child in (0, 1)))
    sequences = sequences_of(tree_segments(group), TREE)
    assert [sequence.mask[3:].tolist() for sequence in sequences] == [[False] * 3 + [True] * 2] * 4


@pytest.mark.parametrize("penalty", [0.0, -0.3, -1 / 3])
def test_equal_rewards_give_nothing_to_train_on(penalty: float) -> None:
    config = SegmentsConfig(kind="tree", branching=[3, 7], tokens=3, mask=False)
    leaves = (leaf(False, (node, 3), (child, 2), penalty=penalty) for node in range(3) for child in range(7))
    sequences = sequences_of(tree_segments(tree_of(*leaves)), config)
    assert count_training_tokens(sequences) == 0


Rewards = list[float | list[float]]


@given(st.lists(st.floats(-2, 2) | st.lists(st.floats(-2, 2), min_size=1, max_size=4), min_size=1, max_size=5))
def test_siblings_are_each_others_baseline(tree: Rewards) -> None:
    """Whatever the rewards, and wherever leaves are: a node is the mean of its children, whose advantages cancel."""
    leaves: Mapping[tuple[int, ...], float] = {
        path: reward
        for i, node in enumerate(tree)
        for path, reward in ([((i, j), r) for j, r in enumerate(node)] if isinstance(node, list) else [((i,), node)])
    }
    values = node_values(leaves)
    families = {parent: [v for n, v in values.items() if n and n[:-1] == parent] for parent in values}
    for parent, children in families.items():
        if children:
            assert values[parent] == pytest.approx(fmean(children))
            assert math.fsum(child - values[parent] for child in children) == pytest.approx(0, abs=1e-9)
