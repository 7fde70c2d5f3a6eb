"""Divide work of different sizes over equal workers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def spread(costs: Sequence[float], n: int) -> list[list[int]]:
    """Divide the indices of ``costs`` over ``n`` workers: the largest first, each to the least loaded (at most 4/3 of
    the best). Those of a worker are in order.
    """
    loads = [(0.0, worker) for worker in range(n)]
    shares: list[list[int]] = [[] for _ in range(n)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, worker = heapq.heappop(loads)
        shares[worker].append(index)
        heapq.heappush(loads, (load + costs[index], worker))
    return [sorted(share) for share in shares]


def sequence_cost(length: int, hidden_size: int) -> float:
    """Return the cost of a forward and backward pass in positions of a short sequence. Causal attention costs as much
    as all matrix products of a layer where length = 12 · hidden_size.
    """
    return length + length**2 / (12 * hidden_size)
