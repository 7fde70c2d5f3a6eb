"""Who does what: work of unlike sizes over equal workers."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def spread(costs: Mapping[K, float], n: int) -> list[list[K]]:
    """The keys of ``costs`` over ``n`` workers: the dearest first, each to who has least (4/3 of the best at most).

    Within a worker they keep the order of ``costs``. The same on every rank.
    """
    place = {key: index for index, key in enumerate(costs)}
    loads = [(0.0, worker) for worker in range(n)]
    shares: list[list[K]] = [[] for _ in range(n)]
    for key in sorted(costs, key=lambda key: (-costs[key], place[key])):
        load, worker = heapq.heappop(loads)
        shares[worker].append(key)
        heapq.heappush(loads, (load + costs[key], worker))
    return [sorted(share, key=place.__getitem__) for share in shares]


def sequence_cost(length: int, hidden_size: int) -> float:
    """Of a forward and backward pass over ``length`` positions, in positions of a short sequence: causal attention
    takes as much as all matrix products of a layer where length = 12 · hidden_size.
    """
    return length + length**2 / (12 * hidden_size)
