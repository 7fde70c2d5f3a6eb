"""Prefixes that several sequences of a batch begin with: the responses of a group share their prompt.

A causal model has the same hidden states for them all, so they are computed once and handed to every sequence.

Legend: T packed positions, U distinct ones.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import pairwise
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
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    tokens = input_ids.tolist()
    rows = [tokens[start:end] for start, end in pairwise(starts)]
    order = sorted(range(len(rows)), key=rows.__getitem__)  # equal prefixes are neighbours now
    shared = dict.fromkeys(order[:1], 0)
    shared |= {after: _common(rows[before], rows[after]) for before, after in pairwise(order)}
    if sum(shared.values()) <= LEAST_SHARED * len(tokens):
        return None
    source: list[int] = []
    place = [0] * len(tokens)
    before = 0
    for row in order:
        start, own = starts[row], starts[row] + shared[row]
        place[start:own] = place[before : before + shared[row]]
        place[own : starts[row + 1]] = range(len(source), len(source) + starts[row + 1] - own)
        source += range(own, starts[row + 1])
        before = start
    return Distinct(torch.tensor(source), torch.tensor(place))


def _common(one: SequenceOf[int], other: SequenceOf[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
