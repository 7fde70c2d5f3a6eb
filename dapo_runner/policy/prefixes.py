"""Find prefixes that sequences of a batch share, such as the prompt of a group.

A causal model has equal hidden states in a shared prefix, so it needs to compute them only once. Legend: T packed
positions, U distinct positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Below this share of shared positions, gathering them costs more than computing them twice.
LEAST_SHARED = 0.03


class Distinct(NamedTuple):
    """The positions to compute, and where to copy the results."""

    source: Tensor  # int64 [U], a packed position of each distinct position
    inverse: Tensor  # int64 [T], the distinct position of each packed position


def find_shared(input_ids: Tensor, lengths: Sequence[int]) -> Distinct | None:
    """Return the distinct positions of packed sequences, or None if few are shared. input_ids int64 [T], CPU.

    Two positions are the same if all tokens up to and including them are equal.
    """
    tokens, bounds = input_ids.tolist(), pairwise(accumulate(lengths, initial=0))
    source: list[int] = []
    inverse = [0] * len(tokens)
    known: dict[tuple[int, int], int] = {}  # (distinct position before, token) → distinct position
    for start, end in sorted(bounds, key=lambda bound: tokens[slice(*bound)]):
        position = -1
        for i in range(start, end):
            position = known.setdefault((position, tokens[i]), len(source))
            if position == len(source):
                source.append(i)
            inverse[i] = position
    if len(tokens) - len(source) <= LEAST_SHARED * len(tokens):
        return None
    return Distinct(torch.tensor(source), torch.tensor(inverse))
