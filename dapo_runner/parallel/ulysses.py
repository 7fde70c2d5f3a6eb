"""Sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509): ranks share the positions of a packed batch, and the
heads in attention.

Legend: W ranks, T packed positions (a multiple of W), H heads, D head size.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13


class _Exchange(torch.autograd.Function):
    """Split dimension ``split`` over the ranks, exchange, concatenate in ``concatenate``. Differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, split: int, concatenate: int) -> Tensor:
        ctx.inverse = group, concatenate, split
        sent = torch.stack(x.chunk(group.size(), split))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(0), concatenate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return cast(Tensor, _Exchange.apply(grad, *ctx.inverse)), None, None, None


def heads_from_positions(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange positions for heads: query [T/W, Hq, D] → [T, Hq/W, D], key and value [T/W, Hk, D] → [T, H'k/W, D].

    If W does not divide the number of key heads, they are repeated. Collective.
    """
    if group is None:
        return query, key, value
    n_query, n_key, width = query.shape[1], key.shape[1], group.size()
    if n_key % width:
        times = width // n_key if width % n_key == 0 else n_query // n_key
        key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    return cast(tuple[Tensor, Tensor, Tensor], tuple(_Exchange.apply(x, group, 1, 0) for x in (query, key, value)))


def positions_from_heads(out: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Exchange heads for positions: [T, Hq/W, D] → [T/W, Hq, D]. Collective."""
    return out if group is None else cast(Tensor, _Exchange.apply(out, group, 0, 1))


def gather_positions(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather [T/W, …] of all ranks into [T, …]. Only this rank's share has a gradient, because every rank computes the
    whole loss. Collective.
    """
    if group is None:
        return x
    whole = x.new_empty(group.size() * len(x), *x.shape[1:])
    all_gather_single(whole, x.detach().contiguous(), group=group)
    shares = list(whole.chunk(group.size()))
    shares[group.rank()] = x
    return torch.cat(shares)


def shard_positions(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's [T/W, …] of [T, …]."""
    return x if group is None else x.chunk(group.size())[group.rank()]
