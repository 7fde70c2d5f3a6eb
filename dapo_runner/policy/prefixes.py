"""Prefixes that several sequences of a batch begin with: the responses of a group share their prompt.

A causal model has the same hidden states for them all, so they are computed once and handed to every sequence.

Legend: T packed positions, U distinct ones.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Taking positions apart and together again is not worth it for less than this share of them.
LEAST_SHARED = 0.03


class Distinct(NamedTuple):
    """source int64 [U]: the packed position that each distinct one is read from. place int64 [T]: the distinct
    position that stands for each packed one.
    """

    source: Tensor
    place: Tensor


def find_shared(input_ids: Tensor, lengths: SequenceOf[int]) -> Distinct | None:
    """The distinct positions of packed sequences, None where too few are shared. input_ids int64 [T] on the CPU.

    Two positions are one when everything up to them is equal, token for token.
    """
    tokens = input_ids.tolist()
    bounds = list(pairwise(accumulate(lengths, initial=0)))
    source: list[int] = []
    place = [0] * len(tokens)
    before: list[int] = []
    before_start = 0
    # In the order of their tokens, no earlier sequence shares more of a sequence's beginning than the one before it.
    for start, end in sorted(bounds, key=lambda bound: tokens[slice(*bound)]):
        row = tokens[start:end]
        n_shared = _common(before, row)
        own = start + n_shared
        place[start:own] = place[before_start : before_start + n_shared]
        place[own:end] = range(len(source), len(source) + end - own)
        source += range(own, end)
        before, before_start = row, start
    if len(tokens) - len(source) <= LEAST_SHARED * len(tokens):
        return None
    return Distinct(torch.tensor(source), torch.tensor(place))


def _common(one: SequenceOf[int], other: SequenceOf[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
