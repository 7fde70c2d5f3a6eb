"""Shared prefixes: as many distinct positions as there are distinct prefixes, and every packed one finds its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dapo_runner.policy import prefixes
from dapo_runner.policy.prefixes import find_shared


def packed(rows: list[list[int]]) -> tuple[torch.Tensor, list[int]]:
    return torch.tensor([token for row in rows for token in row], dtype=torch.int64), [len(row) for row in rows]


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8))
def test_one_position_for_each_distinct_prefix(rows: list[list[int]]) -> None:
    found = find_shared(*packed(rows))
    heads = [tuple(row[: end + 1]) for row in rows for end in range(len(row))]
    if found is None:
        assert len(heads) - len(set(heads)) <= prefixes.LEAST_SHARED * len(heads)
        return
    assert len(found.source) == len(set(heads))
    assert [heads[found.source[index]] for index in found.inverse] == heads


@pytest.mark.parametrize(("n_shared", "worth_it"), [(1, False), (40, True)])
def test_little_is_left_alone(n_shared: int, worth_it: bool) -> None:
    one = list(range(500))
    other = one[:n_shared] + [7000] * 500
    assert (find_shared(*packed([one, other])) is not None) == worth_it
