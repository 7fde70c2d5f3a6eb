"""Distribute work of different sizes over equal workers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


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
