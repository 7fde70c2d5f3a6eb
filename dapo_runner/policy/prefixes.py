"""Find prefixes that sequences of a batch share, as the responses of a group share their prompt.

A causal model has the same hidden states for all of them, so they are computed once.

Legend: T packed positions, U distinct ones.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Below this share of shared positions, gathering them costs more than computing them twice.
LEAST_SHARED = 0.03


class Distinct(NamedTuple):
    """Which positions to compute: ``source`` int64 [U], the packed position of each distinct one, and ``inverse`` int64
    [T], the distinct position of each packed one.
    """

    source: Tensor
    inverse: Tensor


def find_shared(input_ids: Tensor, lengths: SequenceOf[int]) -> Distinct | None:
    """Return the distinct positions of packed sequences, None where too few are shared. input_ids int64 [T], CPU.

    Two positions are one where all tokens up to them are equal.
    """
    tokens = input_ids.tolist()
    bounds = list(pairwise(accumulate(lengths, initial=0)))
    source: list[int] = []
    index = [0] * len(tokens)
    before: list[int] = []
    before_start = 0
    # In the order of their tokens, no earlier sequence shares more of a sequence's beginning than the one before it.
    for start, end in sorted(bounds, key=lambda bound: tokens[slice(*bound)]):
        row = tokens[start:end]
        n_shared = _common(before, row)
        own = start + n_shared
        index[start:own] = index[before_start : before_start + n_shared]
        index[own:end] = range(len(source), len(source) + end - own)
        source += range(own, end)
        before, before_start = row, start
    if len(tokens) - len(source) <= LEAST_SHARED * len(tokens):
        return None
    return Distinct(torch.tensor(source), torch.tensor(index))


def _common(one: SequenceOf[int], other: SequenceOf[int]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
