"""Rows of logits whose columns are spread over the ranks of a group: what each says of a row, and the whole row's.

R ranks, N tokens, V vocabulary. Each rank runs the backend's row kernels on its own columns, where a target that lies
elsewhere is −1. Then every rank tells the others four numbers per token, 16 bytes: maximum, sum above it, log-prob of
the target within its columns, entropy within them. With s_r the probability of rank r's columns::

    ℓ = ℓ_r + log s_r   (r has the target)        H = Σ_r s_r (H_r − log s_r)

All ranks hold the same bits from there on, so that the loss and its slopes need no second exchange, and the gradient of
a rank's columns follows from the whole's norm.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dapo_kernels.backends import Backend, backend
from dapo_kernels.backends.reference import check_rows
from dapo_kernels.engine.kept import KeptTokens
from dapo_kernels.engine.operators import operator
from dapo_kernels.engine.wrapped import Wrapped
from dapo_kernels.records import Asked, Plan, RowStats, Server, Slopes, accumulate_dtype, on_host

# What a sum over ranks holds in float32 beside the 16-bit tensor.
_SUM_BYTES = 64 * 2**20


def backend_of(server: Server | Plan, asked: Asked) -> Backend:
    """The backend of a call: over the whole rows, also where this rank has some of their columns only, or over the
    tokens that they keep.
    """
    by = backend(server.backend)
    if asked.listed is not None:
        by = KeptTokens(by, asked)
    if server.group is None:
        return by
    assert server.columns is not None
    return Shards(by, server.columns.tolist(), server.group)


class Widths(NamedTuple):
    """Columns that can be sampled."""

    here: int
    all: int
    widest: int  # of the rank that has most: chunks follow from it, so that all ranks make the same

    @classmethod
    def of(cls, server: Server | Plan, n: int) -> Widths:
        """``n``: columns of the logits here, padding included."""
        if server.columns is None:
            n = n if server.valid is None else server.valid
            return cls(n, n, n)
        columns = server.columns.tolist()
        return cls(columns[_resolved(str(server.group)).rank()], sum(columns), max(columns))


class Shards(Wrapped):
    """A backend whose logits are this rank's columns, and whose statistics are those of the whole rows."""

    def __init__(self, by: Backend, columns: list[int], group: str) -> None:
        super().__init__(by)
        self.group = _resolved(group)
        rank = self.group.rank()
        self.first, self.n, self.vocab = sum(columns[:rank]), columns[rank], sum(columns)

    def _own(self, asked: Asked) -> Asked:
        return asked_of_columns(asked, self.first, self.n)

    def row_stats(self, logits: Tensor, asked: Asked) -> RowStats:
        check_rows(asked, self.vocab)
        own = self._own(asked)
        stats = self.by.row_stats(logits, own) if self.n else _stats_of_nothing(own, logits.dtype)
        return whole_stats(self.by, _gathered(said_of(stats, own), self.group), asked)

    def row_grad(
        self, out: Tensor, logits: Tensor, asked: Asked, stats: RowStats, slopes: Slopes, zeroed: bool = False
    ) -> None:
        if self.n:
            self.by.row_grad(out, logits, self._own(asked), stats, slopes, zeroed)


def _stats_of_nothing(asked: Asked, dtype: torch.dtype) -> RowStats:
    """Of rows without a column: a maximum of −∞ and a sum of 0."""
    stats = RowStats.empty(asked, accumulate_dtype(dtype))
    stats.norm[:, 0], stats.norm[:, 1] = -torch.inf, 0.0
    return RowStats(stats.logprobs.zero_(), stats.norm, None if stats.entropy is None else stats.entropy.zero_())


def asked_of_columns(asked: Asked, first: int, n: int) -> Asked:
    """What is asked of ``n`` columns of every row, from ``first`` on."""
    target = asked.target_ids - first
    kept_ids = None if asked.kept_ids is None else asked.kept_ids - first
    target = torch.where((target >= 0) & (target < n), target, -1)
    return asked._replace(target_ids=target, kept_ids=kept_ids, partial=True)


def said_of(stats: RowStats, asked: Asked) -> Tensor:
    """[N, 4], or [N, 3] without entropy: what the other ranks are told of these columns."""
    # Columns that are all −∞ have no log-probs among themselves, NaN: the whole row's is −∞.
    logprobs = torch.where(stats.norm[:, 0] == -torch.inf, -torch.inf, stats.logprobs)
    # No log-prob is 1: the target is elsewhere.
    logprobs = torch.where(asked.target_ids < 0, 1.0, logprobs)
    return torch.stack([*stats.norm.unbind(-1), logprobs, *([] if stats.entropy is None else [stats.entropy])], -1)


def whole_stats(by: Backend, said: Tensor, asked: Asked) -> RowStats:
    """Statistics of whole rows from what every rank said of its columns, [R, N, 3 or 4]."""
    norm, log_shares = by.merge_norms(said[..., :2], asked)

    def of_live(x: Tensor) -> Tensor:
        return torch.where(asked.live, x, 0.0).to(said.dtype)

    # Rounding must not make a probability greater than 1.
    logprobs = torch.where(said[..., 2] > 0, 0.0, said[..., 2] + log_shares).sum(0).clamp(max=0.0)
    entropy = None
    if asked.want_entropy:
        # Columns that are all −∞ have no entropy, and no share in the whole's.
        terms = torch.where(log_shares == -torch.inf, 0.0, log_shares.exp() * (said[..., 3] - log_shares))
        entropy = of_live(terms.sum(0).clamp(min=0.0))
    return RowStats(of_live(logprobs), torch.where(asked.live[:, None], norm, 0.0), entropy)


# --- what the ranks have to agree on ----------------------------------------------------------------------


@operator
def shard_columns(
    checksum: Tensor,
    columns: int,
    n_tokens: int,
    vocab: int,
    whole: bool,
    valid: int,
    settings: str,
    caller: str,
    group: str,
) -> Tensor:
    """int64 [R] on the host: how many columns each rank has, this one ``columns``; of the first ``valid`` if not 0.

    ``vocab`` not 0: V, cut as ``torch.chunk`` cuts it or ``whole`` everywhere, known without asking; a GPU is then not
    waited for.

    Raises:
        ValueError: the ranks' tokens or ``settings`` differ, a rank has refused its arguments, or V is less than
            ``valid``; on all of them alike.
    """
    ranks = _resolved(group)
    numbers = (columns, n_tokens, zlib.crc32(settings.encode()))
    said = torch.stack([*(torch.full_like(checksum, x) for x in numbers), checksum])
    theirs = _gathered(said, ranks)
    if vocab:
        sizes = [vocab] * ranks.size() if whole else _chunked(vocab, ranks.size())
        if not on_host(theirs):
            torch._assert_async((theirs[:, 1:] == said[1:]).all())
            return torch.tensor(_without_padding(sizes, valid), device="cpu")
    if not on_host(theirs) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{caller}: group= asks the ranks for their columns and waits, which a CUDA graph cannot capture; pass a "
            "DTensor, which knows them"
        )
    counted, tokens_of, said_settings, checksums = theirs.t().tolist()
    if _REFUSED in counted:
        raise ValueError(f"{caller}: rank {counted.index(_REFUSED)} of the group has refused its arguments: see there")
    if len(set(said_settings)) > 1:
        raise ValueError(f"{caller}: all ranks of the group must make the same call; here it is {settings}")
    if len(set(tokens_of)) > 1 or len(set(checksums)) > 1:
        raise ValueError(
            f"{caller}: all ranks of the group must be given the same target_ids and mask, temperatures, advantages, "
            f"old_logprobs and other values of the live tokens, got other ones (tokens by rank: {tokens_of}). A head "
            "that fully_shard (FSDP2) has sharded is whole inside the forward of the module it wrapped: call the loss "
            "there (docs/guide.md, FSDP2)"
        )
    if vocab and counted != sizes:
        raise ValueError(f"{caller}: columns of the vocabulary by rank must be {sizes} of {vocab}, got {counted}")
    if not vocab and valid > sum(counted):
        raise ValueError(f"{caller}: valid_vocab must be at most V={sum(counted)} of all ranks, got {valid}")
    return torch.tensor(_without_padding(counted, valid), device="cpu")


@shard_columns.fake
def _(
    checksum: Tensor,
    columns: int,
    n_tokens: int,
    vocab: int,
    whole: bool,
    valid: int,
    settings: str,
    caller: str,
    group: str,
) -> Tensor:
    return torch.empty(_resolved(group).size(), dtype=torch.int64, device="cpu")


_REFUSED = -1


def tell_of_refusal(device: torch.device, group: str) -> None:
    """This rank's part in the exchange of ``shard_columns``, in which the others are: it will not make the call."""
    _gathered(torch.full((4,), _REFUSED, device=device), _resolved(group))


def _chunked(vocab: int, n_ranks: int) -> list[int]:
    most = -(-vocab // n_ranks)
    return [max(0, min(most, vocab - rank * most)) for rank in range(n_ranks)]


def _without_padding(columns: list[int], valid: int) -> list[int]:
    firsts = [sum(columns[:rank]) for rank in range(len(columns))]
    left = valid or sum(columns)
    return [max(0, min(n, left - first)) for n, first in zip(columns, firsts, strict=True)]


def checksum(live: Tensor, values: Iterable[Tensor | None]) -> Tensor:
    """int64, wrapping: of which bits stand where among the live tokens, and of which values there are at all."""
    at = torch.arange(1, len(live) + 1, device=live.device) * 2654435761 + 1
    total = torch.zeros((), dtype=torch.int64, device=live.device)
    for x in values:
        total = 1000003 * total + 1
        if x is not None:
            total = total + torch.where(live, (2 * _bits(x) + 1) * at, 0).sum()
    return total


def of_lists(asked: Asked) -> Tensor | None:
    """int64 [N], wrapping: of which tokens each row keeps."""
    if asked.kept_ids is None or asked.kept_rows is None:
        return None
    mixed = (asked.kept_ids + 1) * 2654435761
    return torch.zeros_like(asked.target_ids).index_add_(0, asked.kept_rows, (mixed ^ (mixed >> 17)) * 1000003)


def _bits(x: Tensor) -> Tensor:
    if x.is_floating_point():
        x = x.view(torch.int64 if x.element_size() == 8 else torch.int32)
    return x.to(torch.int64)


@operator
def from_first(x: Tensor, group: str) -> Tensor:
    """A bool tensor as the group's first rank has it."""
    ranks = _resolved(group)
    sent = x.to(torch.uint8)
    dist.broadcast(sent, dist.get_global_rank(ranks, 0), group=ranks)
    return sent.to(torch.bool)


@from_first.fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


# --- hidden states and their gradient ---------------------------------------------------------------------


@operator
def gathered_sequence(part: Tensor, dim: int, group: str) -> Tensor:
    """The parts of all ranks one after the other along ``dim``; each gets its own of their gradients' sum."""
    ranks = _resolved(group)
    return torch.cat(_gathered(part.contiguous(), ranks).unbind(0), dim)


@gathered_sequence.fake
def _(part: Tensor, dim: int, group: str) -> Tensor:
    shape = list(part.shape)
    shape[dim] *= _resolved(group).size()
    return part.new_empty(shape)


@operator
def scattered_sum(whole: Tensor, dim: int, group: str) -> Tensor:
    """This rank's part along ``dim`` of the sum over ranks, added up in float32."""
    ranks = _resolved(group)
    parts = [x.contiguous() for x in whole.chunk(ranks.size(), dim)]
    out = torch.empty_like(parts[0])
    pieces = zip(*(_pieces(x) for x in (out, *parts)), strict=True)
    for to, *sources in pieces:
        wide = [_wide(x) for x in sources]
        total = torch.empty_like(wide[0])
        dist.reduce_scatter(total, wide, group=ranks)
        to.copy_(total)
    return out


@scattered_sum.fake
def _(whole: Tensor, dim: int, group: str) -> Tensor:
    shape = list(whole.shape)
    shape[dim] //= _resolved(group).size()
    return whole.new_empty(shape)


scattered_sum.has_no_gradient()


@gathered_sequence.gradient(lambda out, part, dim, group: (dim, group))
def _(ctx: Any, dim: int, group: str, grads: Tensor) -> dict[str, Tensor]:
    return {"part": scattered_sum(grads, dim, group)}


@operator
def traced_sum(x: Tensor, group: str) -> Tensor:
    return _sum_(x.clone(), group)


@traced_sum.fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


traced_sum.has_no_gradient()


def sum_over_ranks(x: Tensor, group: str) -> Tensor:
    """Added up in float32, in the tensor's own storage; under a tracer, or with create_graph=True, a new tensor."""
    return _sum_(x, group) if type(x) is Tensor and not x.requires_grad else traced_sum(x, group)


def _sum_(x: Tensor, group: str) -> Tensor:
    ranks = _resolved(group)
    for piece in _pieces(x):
        wide = _wide(piece)
        dist.all_reduce(wide, group=ranks)
        if wide is not piece:
            piece.copy_(wide)
    return x


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    """Of a contiguous tensor, as large as a float32 copy may be."""
    return x.view(-1).split(_SUM_BYTES // 4)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x


def _gathered(x: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """[R, …]: every rank's ``x``, contiguous and of one shape."""
    out = x.new_empty(ranks.size(), *x.shape)
    dist.all_gather(list(out.unbind(0)), x, group=ranks)
    return out


def _resolved(group: str) -> dist.ProcessGroup:
    c10d: Any = dist.distributed_c10d  # has it, without exporting it
    return c10d._resolve_process_group(group)
