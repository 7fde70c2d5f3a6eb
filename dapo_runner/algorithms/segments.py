"""Advantages of segments (SPO, arXiv 2505.23564), from the values at the two ends of each segment.

    chain   A = V(end) − V(start). V is the mean reward of continuations; at the end of the response its reward (Eq. 2)
    tree    A = V(node) − V(parent). V of a leaf is its reward, V of another node the mean of its children's values

A cut point is a token with a probability below the threshold. All segments of a chain have the same number of them. In
a tree, a token that several responses share trains once, and segments with advantage 0 or only masked tokens do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from statistics import fmean

import torch
from torch import Tensor

from dapo_runner.algorithms.returns import EPS
from dapo_runner.config import SegmentsConfig
from dapo_runner.types import Completion, Group, Sample, Segment

Node = tuple[int, ...]
"""A node of a tree: the child on each level, from the root down."""


def chain_starts(sample: Sample, config: SegmentsConfig) -> list[int]:
    """Return where the segments of a response begin, only 0 if it does not train. Its last token is no cut point."""
    cut_points = _is_cut_point(sample.completion, config)[:-1].nonzero().squeeze(1).tolist()
    return [0, *cut_points[config.interval :: config.interval]] if sample.trains else [0]


def chain_segments(sample: Sample, starts: Sequence[int], values: Sequence[float]) -> tuple[Segment, ...]:
    """Return the segments of a response. ``values`` are those before each token of ``starts``."""
    ends, after = [*starts[1:], sample.completion.length], [*values[1:], sample.reward]
    return tuple(
        Segment(end - start, value, next_value, next_value - value)
        for start, end, value, next_value in zip(starts, ends, values, after, strict=True)
    )


def node_values(rewards: Mapping[Node, float]) -> dict[Node, float]:
    """Return the value of every node of a tree, including its root (), from the ``rewards`` of its leaves."""
    values = dict(rewards)
    for depth in range(max(map(len, rewards)), 0, -1):
        level = sorted(node for node in values if len(node) == depth)
        for parent, siblings in groupby(level, key=lambda node: node[:-1]):
            values[parent] = fmean(values[node] for node in siblings)
    return values


def tree_segments(group: Group, config: SegmentsConfig) -> Group:
    """Return the group with the segments of its samples, which are the leaves of a tree."""
    leaves = [_leaf(sample) for sample in group.samples]
    values = node_values({leaf: sample.reward for leaf, sample in zip(leaves, group.samples, strict=True)})
    trained: set[Node] = set()
    samples = []
    for leaf, sample in zip(leaves, group.samples, strict=True):
        segments, path = [], sample.completion.path
        parts = (_is_cut_point(sample.completion, config) | (not config.mask)).split([branch.length for branch in path])
        for depth, (branch, can_train) in enumerate(zip(path, parts, strict=True), start=1):
            node, parent = leaf[:depth], leaf[: depth - 1]
            advantage = values[node] - values[parent]
            if abs(advantage) <= EPS:  # means of equal values can differ by rounding
                advantage = 0.0
            trains = sample.trains and node not in trained and advantage != 0 and bool(can_train.any())
            segments.append(Segment(branch.length, values[parent], values[node], advantage, trains))
            if sample.trains:
                trained.add(node)
        samples.append(replace(sample, segments=tuple(segments)))
    return replace(group, samples=tuple(samples))


def segment_advantages(sample: Sample, config: SegmentsConfig) -> tuple[Tensor, Tensor]:
    """Return the advantages of a response of N tokens, float32 [N], and which tokens train, bool [N]."""
    lengths = torch.tensor([segment.length for segment in sample.segments])
    advantages = torch.tensor([segment.advantage for segment in sample.segments]).repeat_interleave(lengths)
    trains = torch.tensor([segment.trains for segment in sample.segments]).repeat_interleave(lengths) & sample.trains
    return advantages, trains & _is_cut_point(sample.completion, config) if config.mask else trains


def segment_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean number of segments of a response, the mean absolute advantage, and the share of segments with
    advantage zero. Segments that responses of a tree share count once. Empty without a sample.
    """
    samples = [(number, sample) for number, group in enumerate(groups) for sample in group.samples]
    advantages: dict[tuple[object, ...], float] = {}
    for index, (number, sample) in enumerate(samples):
        leaf = _leaf(sample)
        for depth, segment in enumerate(sample.segments, start=1):
            key = (number, leaf[:depth]) if leaf else (index, depth, None)  # a chain shares no segments
            advantages[key] = abs(segment.advantage)
    if not advantages:
        return {}
    return {
        "per_response": fmean(len(sample.segments) for _, sample in samples),
        "advantage": fmean(advantages.values()),
        "zero": fmean(advantage <= EPS for advantage in advantages.values()),
    }


def _leaf(sample: Sample) -> Node:
    return tuple(branch.child for branch in sample.completion.path)


def _is_cut_point(completion: Completion, config: SegmentsConfig) -> Tensor:
    """Return the cut points by the engine's log-probs, bool [N]."""
    return completion.logprobs < math.log(config.threshold)
