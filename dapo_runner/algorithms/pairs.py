"""Preference pairs of iterated DPO, made from the groups of a step by reward.

The best sample of a group is chosen over the worst, the second best over the second worst, and so on (Dong et al. 2024,
RLHF Workflow, arXiv 2405.07863, best of n against worst of n). Two samples with the same reward are no pair but a tie,
which is counted. Of equal samples the earlier one counts as better: they come in the order of their seeds.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from dapo_runner.algorithms.advantage import make_sequence
from dapo_runner.config import PreferenceConfig
from dapo_runner.types import Group, Sequence

CHOSEN, REJECTED = 1.0, -1.0  # where other algorithms have an advantage


def make_pairs(group: Group, most: int) -> tuple[list[tuple[int, int]], int]:
    """Return at most ``most`` pairs (chosen, rejected) of samples that train, by their indices, and how many tied."""
    samples = group.samples
    best = sorted((i for i, sample in enumerate(samples) if sample.trains), key=lambda i: -samples[i].reward)
    facing = list(zip(best, reversed(best), strict=True))[: min(most, len(best) // 2)]
    pairs = [(chosen, rejected) for chosen, rejected in facing if samples[chosen].reward > samples[rejected].reward]
    return pairs, len(facing) - len(pairs)


def pair_sequences(groups: SequenceOf[Group], config: PreferenceConfig, step: int = 0) -> list[Sequence]:
    """Return the training sequences of a step, group by group in order. Those in no pair do not train. ``step`` counts
    as the steps of the groups do.
    """
    sequences: list[Sequence] = []
    n_pairs = 0
    for group_id, group in enumerate(groups):
        labels, pair_ids = [0.0] * len(group.samples), [-1] * len(group.samples)
        for chosen, rejected in make_pairs(group, config.pairs_per_group)[0]:
            labels[chosen], labels[rejected] = CHOSEN, REJECTED
            pair_ids[chosen] = pair_ids[rejected] = n_pairs
            n_pairs += 1
        for sample, label, pair in zip(group.samples, labels, pair_ids, strict=True):
            sequence = make_sequence(group, sample, label, group_id, step - group.step)
            sequences.append(replace(sequence, pair=pair, mask=sequence.mask & (pair >= 0)))
    return sequences


def order_by_pair(sequences: SequenceOf[Sequence]) -> list[Sequence]:
    """Return the sequences that are in a pair: chosen and rejected of the first pair, of the second, …"""
    paired = [sequence for sequence in sequences if sequence.pair >= 0]
    return sorted(paired, key=lambda sequence: (sequence.pair, -float(sequence.advantages[-1])))


def pair_metrics(groups: SequenceOf[Group], config: PreferenceConfig | None) -> dict[str, float]:
    """Return the number of ties, which are no pairs; nothing without preference training."""
    return {} if config is None else {"ties": sum(make_pairs(group, config.pairs_per_group)[1] for group in groups)}
