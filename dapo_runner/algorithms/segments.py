"""Advantages of segments (SPO, arXiv 2505.23564): what a stretch of a response is worth, from the values at its ends.

    chain   A = V(end) − V(beginning), V the mean reward of continuations from there, the reward itself at the end of
            the response (Eq. 2)
    tree    A = V(node) − V(parent); V of a leaf is its
            reward, of any other node the mean of its children's: siblings are each other's baseline

A chain is cut before a cut point, a token that was less likely than the threshold, so that every segment has as many of
them. A token of a tree that several responses share trains once, and none does whose advantage is zero.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor

from dapo_runner.algorithms.returns import EPS
from dapo_runner.config import SegmentsConfig
from dapo_runner.types import Completion, Group, Sample, Segment

Node = tuple[int, ...]
"""A node of a tree: which child on each level, from the root down."""


def chain_starts(completion: Completion, config: SegmentsConfig) -> list[int]:
    """The tokens that the segments of a response begin with. Its last token is no cut point: nothing follows."""
    cut_points = _unsure(completion, config)[:-1].nonzero().squeeze(1).tolist()
    return [0, *cut_points[config.interval :: config.interval]]


def chain_segments(sample: Sample, starts: Sequence[int], values: Sequence[float]) -> tuple[Segment, ...]:
    """``values`` are those of the states in front of the ``starts``."""
    ends, after = [*starts[1:], sample.completion.length], [*values[1:], sample.reward]
    return tuple(
        Segment(end - start, value, next_value, next_value - value)
        for start, end, value, next_value in zip(starts, ends, values, after, strict=True)
    )


def node_values(rewards: Mapping[Node, float]) -> dict[Node, float]:
    """Of every node of a tree, its root () included, from the ``rewards`` of its leaves."""
    values = dict(rewards)
    for depth in range(max(map(len, rewards)), 0, -1):
        families = _families({node: value for node, value in values.items() if len(node) == depth})
        values |= {parent: fmean(children) for parent, children in families.items()}
    return values


def tree_segments(group: Group) -> Group:
    """The same group, whose samples are the leaves of a tree, with their segments."""
    leaves = [tuple(branch.child for branch in sample.completion.path) for sample in group.samples]
    values = node_values({leaf: sample.reward for leaf, sample in zip(leaves, group.samples, strict=True)})
    trained: set[Node] = set()
    samples = []
    for leaf, sample in zip(leaves, group.samples, strict=True):
        segments = []
        for depth, branch in enumerate(sample.completion.path, start=1):
            node, parent = leaf[:depth], leaf[: depth - 1]
            advantage = values[node] - values[parent]
            if abs(advantage) <= EPS:  # means of equal values differ by their rounding
                advantage = 0.0
            trains = sample.trains and node not in trained and advantage != 0
            segments.append(Segment(branch.length, values[parent], values[node], advantage, trains))
            if sample.trains:
                trained.add(node)
        samples.append(replace(sample, segments=tuple(segments)))
    return replace(group, samples=tuple(samples))


def segment_advantages(sample: Sample, config: SegmentsConfig) -> tuple[Tensor, Tensor]:
    """Return for a response of N tokens the advantages, float32 [N], and which tokens train, bool [N]."""
    lengths = torch.tensor([segment.length for segment in sample.segments])
    advantages = torch.tensor([segment.advantage for segment in sample.segments]).repeat_interleave(lengths)
    trains = torch.tensor([segment.trains for segment in sample.segments]).repeat_interleave(lengths) & sample.trains
    return advantages, trains & _unsure(sample.completion, config) if config.mask else trains


def segment_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Of the groups of a step: segments of a response, and of all of them, with those that responses of a tree share
    counted once, the mean size of an advantage and the share that has none. Empty without a sample.
    """
    samples = [sample for group in groups for sample in group.samples]
    advantages = [abs(segment.advantage) for group in groups for segment in _distinct(group)]
    if not advantages:
        return {}
    return {
        "per_response": fmean(len(sample.segments) for sample in samples),
        "advantage": fmean(advantages),
        "zero": fmean(advantage == 0 for advantage in advantages),
    }


def _distinct(group: Group) -> Iterator[Segment]:
    """The segments of its responses, each once."""
    seen: set[Node] = set()
    for sample in group.samples:
        if not sample.completion.path:  # of a chain
            yield from sample.segments
            continue
        leaf = tuple(branch.child for branch in sample.completion.path)
        for depth, segment in enumerate(sample.segments, start=1):
            if leaf[:depth] not in seen:
                seen.add(leaf[:depth])
                yield segment


def _unsure(completion: Completion, config: SegmentsConfig) -> Tensor:
    """Which tokens are cut points, bool [N]: by the engine's own log-probs."""
    return completion.logprobs < math.log(config.threshold)


def _families(values: Mapping[Node, float]) -> dict[Node, list[float]]:
    """The values of siblings, by their parent."""
    families: dict[Node, list[float]] = defaultdict(list)
    for node, value in values.items():
        families[node[:-1]].append(value)
    return families
