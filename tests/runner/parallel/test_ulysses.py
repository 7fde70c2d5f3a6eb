"""Sequence parallelism alone: which key and value heads a rank gets beside its query heads."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import on_ranks

from dapo_runner.parallel.ulysses import heads_from_positions, positions_from_heads

HEADS = [(12, 3), (8, 2), (8, 4), (8, 8), (12, 6), (12, 12)]  # of queries, of keys: divisors of 4, multiples, neither


def exchange(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    for n_query, n_key in HEADS:
        positions = torch.arange(2 * rank, 2 * rank + 2)[:, None]
        query = (100 * positions + torch.arange(n_query))[:, :, None].float()  # which position and head it is
        key = (100 * positions + torch.arange(n_key))[:, :, None].float()
        own_query, own_key, own_value = heads_from_positions(query, key, -key, group)
        n_own = n_query // 4
        heads = torch.arange(rank * n_own, (rank + 1) * n_own)
        everywhere = 100 * torch.arange(8)[:, None]
        torch.testing.assert_close(own_query[:, :, 0], (everywhere + heads).float())
        beside = own_key[:, :, 0].repeat_interleave(n_own // own_key.shape[1], dim=1)  # as attention does
        torch.testing.assert_close(beside, (everywhere + heads // (n_query // n_key)).float())
        torch.testing.assert_close(own_value, -own_key)
        torch.testing.assert_close(positions_from_heads(own_query, group), query)


def test_each_query_head_is_beside_its_key_head() -> None:
    on_ranks(4, exchange)
