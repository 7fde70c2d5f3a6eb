"""Segment advantages against chains and trees worked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import make_prompt, make_sample

from dapo_runner.algorithms.advantage import make_sequences
from dapo_runner.algorithms.packing import count_training_tokens
from dapo_runner.algorithms.segments import chain_segments, chain_starts, segment_metrics, tree_segments
from dapo_runner.config import AdvantageConfig, SegmentsConfig
from dapo_runner.types import Branch, Completion, Group, Sample, Sequence


def response_of(*probabilities: float) -> Completion:
    return Completion(torch.arange(len(probabilities)), torch.tensor(probabilities).log(), "stop", "")


def leaf(reward: float, *path: tuple[int, int], trains: bool = True) -> Sample:
    """A response through the nodes (child, tokens) of a tree."""
    sample = make_sample(reward > 0, length=sum(length for _, length in path), trains=trains)
    completion = replace(sample.completion, path=tuple(Branch(*node) for node in path))
    return replace(sample, base_reward=reward, completion=completion)


def sequences_of(*samples: Sample, **config: Any) -> list[Sequence]:
    segments = SegmentsConfig(**{"kind": "tree", "tokens": 3, "mask": False} | config)
    group = Group(make_prompt(n_tokens=2), samples)
    return make_sequences([group if samples[0].segments else tree_segments(group)], AdvantageConfig(segments=segments))


@pytest.mark.parametrize(
    ("interval", "threshold", "starts"), [(2, 0.9, [0, 4, 7]), (5, 0.9, [0]), (1, 0.25, [0, 7]), (1, 0.05, [0])]
)
def test_a_chain_is_cut_before_every_nth_cut_point(interval: int, threshold: float, starts: list[int]) -> None:
    """Below 0.9 are the tokens 1, 2, 4, 6, 7 and 8; the last token, 8, is no cut point, as nothing follows it."""
    response = response_of(0.95, 0.5, 0.89, 0.91, 0.1, 0.99, 0.3, 0.2, 0.2)
    config = SegmentsConfig(kind="chain", interval=interval, threshold=threshold)
    assert chain_starts(response, config) == starts
    assert chain_starts(response_of(0.01), config) == [0]


def test_a_segment_of_a_chain_earns_the_difference_of_the_values_at_its_ends() -> None:
    """Values ¼, ¾ and ½ at the starts; the last segment ends in the reward, −1 and a length penalty of −½."""
    segments = chain_segments(make_sample(False, length=9, penalty=-0.5), [0, 4, 7], [0.25, 0.75, 0.5])
    assert [(x.length, x.before, x.after, x.advantage) for x in segments] == [
        (4, 0.25, 0.75, 0.5),
        (3, 0.75, 0.5, -0.25),
        (2, 0.5, -1.5, -2.0),
    ]


def test_only_cut_points_train_and_count() -> None:
    sample = replace(make_sample(True), completion=response_of(0.95, 0.5, 0.89, 0.91, 0.1))
    sample = replace(sample, segments=chain_segments(sample, [0, 2], [0.0, 0.5]))
    (sequence,) = sequences_of(sample, kind="chain", mask=True, tokens=None)
    assert sequence.mask.tolist() == [False, False, False, True, True, False, True]
    assert sequence.advantages.tolist() == [0, 0, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert count_training_tokens([sequence]) == 3  # Z of the paper
    (unmasked,) = sequences_of(sample, kind="chain", tokens=None)
    assert unmasked.mask.tolist() == [False] * 2 + [True] * 5
    (filtered,) = sequences_of(replace(sample, trains=False), kind="chain", tokens=None)
    assert not filtered.mask.any()


def test_a_tree_from_its_leaves_up() -> None:
    """Rewards 1 and −1 under the first child, 1 of the second, which ended itself: values 0, 1 and of the root ½."""
    tree = [leaf(1, (0, 3), (0, 2)), leaf(-1, (0, 3), (1, 4)), leaf(1, (1, 2))]
    group = tree_segments(Group(make_prompt(), tuple(tree)))
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


def test_figures_count_a_shared_segment_once() -> None:
    """Sizes ½, 1, 1 and ½ in the first tree, three times 0 in the second."""
    tree = (leaf(1, (0, 3), (0, 2)), leaf(-1, (0, 3), (1, 4)), leaf(1, (1, 2)))
    solved = (leaf(1, (0, 3), (0, 2)), leaf(1, (0, 3), (1, 4)))
    figures = segment_metrics([tree_segments(Group(make_prompt(), leaves)) for leaves in (tree, solved)])
    assert figures == {"per_response": 9 / 5, "advantage": 3 / 7, "zero": 3 / 7}
    sample = make_sample(True, length=9)
    chains = tuple(replace(sample, segments=chain_segments(sample, [0, 4], values)) for values in ([0, 0.5], [0, 0]))
    assert segment_metrics([Group(make_prompt(), chains)]) == {"per_response": 2, "advantage": 0.5, "zero": 0.25}
    assert segment_metrics([]) == {}
