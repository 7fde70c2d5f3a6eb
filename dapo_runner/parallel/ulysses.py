"""Sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509): ranks share the positions of a packed batch, and in
attention the heads.

Legend: W ranks, T packed positions, a multiple of W, H heads, D head size.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


class _Exchange(torch.autograd.Function):
    """All-to-all: split dimension ``scatter`` over the ranks and concatenate dimension ``gather``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, scatter: int, gather: int) -> Tensor:
        ctx.group, ctx.dims = group, (gather, scatter)
        return _exchanged(x, group, scatter, gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, ctx.group, *ctx.dims), None, None, None


def _exchanged(x: Tensor, group: dist.ProcessGroup, scatter: int, gather: int) -> Tensor:
    sent = torch.stack(x.chunk(group.size(), scatter))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(0), gather)


def heads_from_positions(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """query [T/W, Hq, D], key and value [T/W, Hk, D] of this rank's positions → [T, Hq/W, D] and [T, H'k/W, D] of all.

    Key heads that do not divide by W are repeated until they do.
    """
    n_query, n_key, width = query.shape[1], key.shape[1], group.size()
    if n_key % width:
        times = width // n_key if width % n_key == 0 else n_query // n_key
        key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    exchanged = [cast(Tensor, _Exchange.apply(x, group, 1, 0)) for x in (query, key, value)]
    return exchanged[0], exchanged[1], exchanged[2]


def positions_from_heads(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, Hq/W, D] → [T/W, Hq, D]."""
    return cast(Tensor, _Exchange.apply(out, group, 0, 1))


class _Gather(torch.autograd.Function):
    """All-gather whose backward keeps the gradient of this rank's share, as every rank computes the whole loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.own = slice(group.rank() * len(x), (group.rank() + 1) * len(x))
        whole = x.new_empty(group.size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.own], None


def gather_positions(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[T/W, …] of each rank → [T, …] on all."""
    return x if group is None else cast(Tensor, _Gather.apply(x, group))


def own_positions(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[T, …] → this rank's [T/W, …]."""
    if group is None:
        return x
    share = len(x) // group.size()
    return x[group.rank() * share : (group.rank() + 1) * share]
