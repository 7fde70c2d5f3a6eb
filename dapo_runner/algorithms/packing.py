"""Packing: sequences of any length laid end to end into micro-batches of at most ``token_budget`` positions.

Best-fit decreasing: from the longest down, each sequence goes where the least room is left over. That has
first-fit's bound, 11/9 of the fewest possible micro-batches, and finds its place by bisection. Nothing is
cut, padded or shown to its neighbour. A gradient does not depend on the packing as long as the loss is
divided by the token count of the whole mini-batch, which is `count_training_tokens`.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch

from dapo_runner.parallel.balance import sequence_cost, spread
from dapo_runner.types import PackedBatch, Sequence, TruncatedSupport


class Share(NamedTuple):
    """What one of ``ranks`` computes: sequences that cost it about as much as the others theirs, in micro-batches of a
    ``multiple`` of positions.
    """

    rank: int = 0
    ranks: int = 1
    multiple: int = 1
    hidden_size: int = 1


ALL = Share()


def pack(
    sequences: SequenceOf[Sequence], token_budget: int, share: Share = ALL, together: int = 1
) -> list[PackedBatch]:
    """Micro-batches that hold every training token exactly once; of several ranks, those of one, as many as on every
    other, if need be of nothing but padding. A padding sequence follows the others, to the next multiple.

    Sequences without a training token are left out: they cost a forward pass and add nothing. What an earlier step
    sampled lies apart from what this one did: their ratios are taken against different log-probs. ``together`` so many
    neighbours, of one age, lie beside each other in one micro-batch. Raises ValueError for what is longer than the
    budget, which has to be settled by the configuration, not by cutting it here.
    """
    units = [sequences[start : start + together] for start in range(0, len(sequences), together)]
    alive = [index for index, unit in enumerate(units) if any(sequence.mask[1:].any() for sequence in unit)]
    costs = {
        index: sum(sequence_cost(sequence.length - 1, share.hidden_size) for sequence in units[index])
        for index in alive
    }
    bins = [_bins(units, indices, token_budget) for indices in spread(costs, share.ranks)]
    empty: list[list[int]] = [[]] * (max(map(len, bins)) - len(bins[share.rank]))
    padding_id = len(sequences)
    return [
        _lay_out(
            [(index * together + place, sequence) for index in bin_ for place, sequence in enumerate(units[index])],
            padding_id,
            share.multiple,
        )
        for bin_ in bins[share.rank] + empty
    ]


def padding_batch(multiple: int = 1) -> PackedBatch:
    """Nothing to train on, for a rank that is to make as many passes as another."""
    return _lay_out([], 0, multiple)


def _bins(units: SequenceOf[SequenceOf[Sequence]], indices: SequenceOf[int], token_budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for stale in (False, True):
        chosen = [index for index in indices if (units[index][0].age > 0) == stale]
        lengths = {index: sum(sequence.length - 1 for sequence in units[index]) for index in chosen}
        bins += assign_bins(lengths, token_budget)
    return bins


def count_training_tokens(sequences: Iterable[Sequence]) -> int:
    """The denominator of a token-mean loss. A sequence's first token is never predicted, so never counted."""
    return sum(int(sequence.mask[1:].sum()) for sequence in sequences)


def assign_bins(lengths: dict[int, int], budget: int) -> list[list[int]]:
    """Best-fit decreasing: the keys of ``lengths`` in bins whose lengths add up to at most ``budget``."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), sorted: the tightest bin that fits is one bisection away
    for index, length in sorted(lengths.items(), key=lambda item: (-item[1], item[0])):
        if length > budget:
            raise ValueError(
                f"packing: expected every sequence to fit optimizer.token_budget={budget} positions, got one "
                f"of {length}; raise the budget or lower rollout.max_response_tokens"
            )
        place = bisect.bisect_left(rooms, (length, -1))
        room, bin_index = rooms.pop(place) if place < len(rooms) else (budget, len(bins))
        if bin_index == len(bins):
            bins.append([])
        bins[bin_index].append(index)
        bisect.insort(rooms, (room - length, bin_index))
    return bins


def _lay_out(indexed: list[tuple[int, Sequence]], padding_id: int, multiple: int) -> PackedBatch:
    n_positions = sum(sequence.length - 1 for _, sequence in indexed)
    missing = -n_positions % multiple if indexed else -(-2 // multiple) * multiple
    if missing:
        indexed = [*indexed, (padding_id, _padding(missing))]
    sequences = [sequence for _, sequence in indexed]
    lengths = torch.tensor([sequence.length - 1 for sequence in sequences])
    rewards = None
    if any(sequence.reward is not None for sequence in sequences):
        rewards = torch.tensor([sequence.reward or 0.0 for sequence in sequences])
    kept = None
    if any(sequence.support is not None for sequence in sequences):
        kept = [
            TruncatedSupport.full(sequence.length) if sequence.support is None else sequence.support
            for sequence in sequences
        ]
    return PackedBatch(
        input_ids=torch.cat([sequence.token_ids[:-1] for sequence in sequences]),
        position_ids=torch.cat([torch.arange(sequence.length - 1) for sequence in sequences]),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32),
        target_ids=torch.cat([sequence.token_ids[1:] for sequence in sequences]),
        mask=torch.cat([sequence.mask[1:] for sequence in sequences]),
        advantages=torch.cat([sequence.advantages[1:] for sequence in sequences]),
        old_logprobs=torch.cat([sequence.rollout_logprobs[1:] for sequence in sequences]),
        group_ids=torch.tensor([sequence.group_id for sequence in sequences]),
        sequence_ids=torch.tensor([index for index, _ in indexed]),
        ages=torch.tensor([sequence.age for sequence in sequences]),
        rewards=rewards,
        # A first token, of a prompt, has no list.
        support_ids=None if kept is None else torch.cat([ids for ids, _ in kept]),
        support_counts=None if kept is None else torch.cat([counts[1:] for _, counts in kept]),
    )


def _padding(n_positions: int) -> Sequence:
    """Nothing that trains."""
    length = n_positions + 1
    zeros = torch.zeros(length)
    return Sequence(torch.zeros(length, dtype=torch.int64), zeros, torch.zeros(length, dtype=torch.bool), zeros, -1)
