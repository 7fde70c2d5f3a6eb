"""Pack sequences of any length end to end into micro-batches of at most ``token_budget`` positions, and share work.

Best-fit decreasing: sequences are placed from longest to shortest, each where it leaves the least room. This takes at
most 11/9 of the minimal number of micro-batches. Nothing is truncated or padded. A gradient does not depend on the
packing if the loss is divided by the token count of the whole mini-batch (`count_training_tokens`).
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Sequence

import torch

from dapo_runner.types import PackedBatch, TrainingSequence, TruncatedSupport

Unit = list[tuple[int, TrainingSequence]]  # sequences that stay together, with their ids


def pack_shares(
    sequences: Sequence[TrainingSequence],
    token_budget: int,
    *,
    ranks: int = 1,
    multiple: int = 1,
    hidden_size: int = 1,
    together: int = 1,
    first_id: int = 0,
) -> list[list[PackedBatch]]:
    """Return the micro-batches of each of ``ranks``: the same number, of about the same cost.

    Together they hold every training token exactly once. A rank with less work gets micro-batches of padding. A
    sequence without a training token is left out. Stale sequences do not share a micro-batch with sequences of this
    step, because their old log-probs come from elsewhere. Raises ValueError for a unit longer than the budget.

    Args:
        multiple: pad each micro-batch to a multiple of this many positions.
        hidden_size: of the model, for the cost of attention.
        together: this many neighbours, of one age, are a unit that stays in one micro-batch.
        first_id: the first of the ``PackedBatch.sequence_ids``.
    """
    indexed = list(enumerate(sequences, first_id))
    units = [indexed[start : start + together] for start in range(0, len(indexed), together)]
    alive = [unit for unit in units if any(sequence.mask[1:].any() for _, sequence in unit)]
    costs = [sum(sequence_cost(x.length - 1, hidden_size) for _, x in unit) for unit in alive]
    shares = [_fill_bins([alive[i] for i in share], token_budget) for share in spread(costs, ranks)]
    most = max(map(len, shares))
    for share in shares:
        share += [[] for _ in range(most - len(share))]
    return [[lay_out(bin_, first_id + len(sequences), multiple) for bin_ in share] for share in shares]


def spread(costs: Sequence[float], n: int) -> list[list[int]]:
    """Distribute the indices of ``costs`` over ``n`` workers: largest first, each to the least loaded worker. The
    maximum load is at most 4/3 of the optimum. The indices of a worker are sorted.
    """
    loads = [(0.0, worker) for worker in range(n)]
    shares: list[list[int]] = [[] for _ in range(n)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, worker = heapq.heappop(loads)
        shares[worker].append(index)
        heapq.heappush(loads, (load + costs[index], worker))
    return [sorted(share) for share in shares]


def sequence_cost(length: int, hidden_size: int) -> float:
    """Return the cost of a forward and backward pass, in units of one position of a short sequence. With length =
    12 · hidden_size causal attention costs as much as all matrix products of a layer.
    """
    return length + length**2 / (12 * hidden_size)


def _fill_bins(units: Sequence[Unit], token_budget: int) -> list[Unit]:
    bins: list[Unit] = []
    for stale in (False, True):
        chosen = [unit for unit in units if (unit[0][1].age > 0) == stale]
        lengths = {index: sum(sequence.length - 1 for _, sequence in unit) for index, unit in enumerate(chosen)}
        bins += [[pair for index in bin_ for pair in chosen[index]] for bin_ in assign_bins(lengths, token_budget)]
    return bins


def count_training_tokens(sequences: Iterable[TrainingSequence]) -> int:
    """Return the denominator of a token-mean loss. A sequence's first token is no target and does not count."""
    return sum(int(sequence.mask[1:].sum()) for sequence in sequences)


def count_group_tokens(sequences: Sequence[TrainingSequence]) -> torch.Tensor:
    """Return the number of training tokens of each group, float64, by ``group_id``."""
    counts = torch.tensor([count_training_tokens([sequence]) for sequence in sequences], dtype=torch.int64)
    return torch.bincount(torch.tensor([sequence.group_id for sequence in sequences], dtype=torch.int64), counts)


def assign_bins(lengths: dict[int, int], budget: int) -> list[list[int]]:
    """Return the keys of ``lengths`` in bins with at most ``budget`` positions each. Raises ValueError."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # sorted (room left, bin): bisection finds the bin with the least room that fits
    for index, length in sorted(lengths.items(), key=lambda item: (-item[1], item[0])):
        if length > budget:
            raise ValueError(
                f"optimizer.token_budget: expected at least {length} positions, got {budget}. Raise it, or lower "
                "rollout.max_response_tokens"
            )
        slot = bisect.bisect_left(rooms, (length, -1))
        room, bin_index = rooms.pop(slot) if slot < len(rooms) else (budget, len(bins))
        if bin_index == len(bins):
            bins.append([])
        bins[bin_index].append(index)
        bisect.insort(rooms, (room - length, bin_index))
    return bins


def lay_out(unit: Unit, padding_id: int, multiple: int) -> PackedBatch:
    """Return a micro-batch, of padding alone for an empty unit."""
    n_positions = sum(sequence.length - 1 for _, sequence in unit)
    missing = -n_positions % multiple if unit else -(-2 // multiple) * multiple
    if missing:
        zeros = torch.zeros(missing + 1)
        unit = [*unit, (padding_id, TrainingSequence(zeros.long(), zeros, zeros.bool(), zeros, group_id=-1))]
    ids, sequences = zip(*unit, strict=True)
    lengths = torch.tensor([sequence.length - 1 for sequence in sequences])
    rewards = supports = None
    if any(sequence.reward is not None for sequence in sequences):
        rewards = torch.tensor([sequence.reward or 0.0 for sequence in sequences])
    if any(sequence.support is not None for sequence in sequences):
        supports = [sequence.support or TruncatedSupport.full(sequence.length) for sequence in sequences]
    routed = [sequence.experts for sequence in sequences if sequence.experts is not None]
    return PackedBatch(
        input_ids=torch.cat([sequence.token_ids[:-1] for sequence in sequences]),
        position_ids=torch.cat([torch.arange(sequence.length - 1) for sequence in sequences]),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32),
        target_ids=torch.cat([sequence.token_ids[1:] for sequence in sequences]),
        mask=torch.cat([sequence.mask[1:] for sequence in sequences]),
        advantages=torch.cat([sequence.advantages[1:] for sequence in sequences]),
        old_logprobs=torch.cat([sequence.rollout_logprobs[1:] for sequence in sequences]),
        group_ids=torch.tensor([sequence.group_id for sequence in sequences]),
        sequence_ids=torch.tensor(ids),
        ages=torch.tensor([sequence.age for sequence in sequences]),
        rewards=rewards,
        experts=torch.nn.functional.pad(torch.cat(routed), (0, 0, 0, missing)) if routed else None,
        # The first token of a sequence is never a target.
        support_ids=None if supports is None else torch.cat([ids for ids, _ in supports]),
        support_counts=None if supports is None else torch.cat([counts[1:] for _, counts in supports]),
    )
