"""Divide work of different sizes over equal workers."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def spread(costs: Mapping[K, float], n: int) -> list[list[K]]:
    """Divide the keys of ``costs`` over ``n`` workers: the largest first, each to the least loaded (at most 4/3 of the
    best). Within a worker they keep the order of ``costs``. Every rank gets the same.
    """
    index = {key: i for i, key in enumerate(costs)}
    loads = [(0.0, worker) for worker in range(n)]
    shares: list[list[K]] = [[] for _ in range(n)]
    for key in sorted(costs, key=lambda key: (-costs[key], index[key])):
        load, worker = heapq.heappop(loads)
        shares[worker].append(key)
        heapq.heappush(loads, (load + costs[key], worker))
    return [sorted(share, key=index.__getitem__) for share in shares]


def sequence_cost(length: int, hidden_size: int) -> float:
    """Return the cost of a forward and backward pass in positions of a short sequence. Causal attention costs as much
    as all matrix products of a layer where length = 12 · hidden_size.
    """
    return length + length**2 / (12 * hidden_size)
