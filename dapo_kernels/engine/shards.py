"""Rows of logits whose columns are distributed over the ranks of a group: combine statistics of the ranks' columns.

R ranks, N tokens, V vocabulary. Each rank runs the backend's row kernels on its own columns; a target on another rank
is −1. Then every rank sends the others four numbers per token, 16 bytes: the maximum, the sum above it, the log-prob of
the target within its columns, and the entropy within them. With s_r the probability of rank r's columns::

    ℓ = ℓ_r + log s_r   (r has the target)        H = Σ_r s_r (H_r − log s_r)

From there on all ranks have bit-identical values, so the loss and its slopes need no second exchange. The gradient of a
rank's columns follows from the norm of the whole row.
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
from dapo_kernels.records import Plan, RowRequest, RowStats, Server, Slopes, accumulate_dtype, on_host

# Limit of the float32 copy in a sum of 16-bit tensors over ranks.
_SUM_BYTES = 64 * 2**20


def backend_of(server: Server | Plan, request: RowRequest) -> Backend:
    """Return the backend of a call: for whole rows, also if this rank has only some of their columns, or for rows with
    lists of kept tokens.
    """
    by = backend(server.backend)
    if request.listed is not None:
        by = KeptTokens(by, request)
    if server.group is None:
        return by
    assert server.columns is not None
    return Shards(by, server.columns.tolist(), server.group)


class Widths(NamedTuple):
    """Numbers of columns that can be sampled."""

    here: int
    all: int
    widest: int  # of the rank that has most; it decides the chunks, which must be the same on all ranks

    @classmethod
    def of(cls, server: Server | Plan, n: int) -> Widths:
        """Return the widths. ``n``: number of columns of the logits on this rank, padding included."""
        if server.columns is None:
            n = n if server.valid is None else server.valid
            return cls(n, n, n)
        columns = server.columns.tolist()
        return cls(columns[_resolved(str(server.group)).rank()], sum(columns), max(columns))


class Shards(Wrapped):
    """A backend whose logits are this rank's columns, and whose statistics are those of whole rows."""

    def __init__(self, by: Backend, columns: list[int], group: str) -> None:
        super().__init__(by)
        self.group = _resolved(group)
        rank = self.group.rank()
        self.first, self.n, self.vocab = sum(columns[:rank]), columns[rank], sum(columns)

    def _on_columns(self, request: RowRequest) -> RowRequest:
        return request_for_columns(request, self.first, self.n)

    def row_stats(self, logits: Tensor, request: RowRequest) -> RowStats:
        check_rows(request, self.vocab)
        here = self._on_columns(request)
        stats = self.by.row_stats(logits, here) if self.n else _stats_of_nothing(here, logits.dtype)
        return whole_stats(self.by, _gathered(stats_to_send(stats, here), self.group), request)

    def row_grad(
        self, out: Tensor, logits: Tensor, request: RowRequest, stats: RowStats, slopes: Slopes, zeroed: bool = False
    ) -> None:
        if self.n:
            self.by.row_grad(out, logits, self._on_columns(request), stats, slopes, zeroed)


def _stats_of_nothing(request: RowRequest, dtype: torch.dtype) -> RowStats:
    """Return statistics of rows without columns: maximum −∞, sum 0."""
    stats = RowStats.empty(request, accumulate_dtype(dtype))
    stats.norm[:, 0], stats.norm[:, 1] = -torch.inf, 0.0
    return RowStats(stats.logprobs.zero_(), stats.norm, None if stats.entropy is None else stats.entropy.zero_())


def request_for_columns(request: RowRequest, first: int, n: int) -> RowRequest:
    """Return the request for ``n`` columns of every row, starting with ``first``."""
    target = request.target_ids - first
    kept_ids = None if request.kept_ids is None else request.kept_ids - first
    target = torch.where((target >= 0) & (target < n), target, -1)
    return request._replace(target_ids=target, kept_ids=kept_ids, partial=True)


def stats_to_send(stats: RowStats, request: RowRequest) -> Tensor:
    """Return the statistics that are sent to the other ranks: [N, 4], or [N, 3] without entropy."""
    # If all these columns are −∞, log-probs within them are NaN; in the whole row they are −∞. Triton's maximum is then
    # the smallest finite number. That of a row with a NaN is NaN.
    nothing = stats.logprobs.isnan() & (stats.norm[:, 0] <= -3.4e38)
    logprobs = torch.where(nothing, -torch.inf, stats.logprobs)
    # 1 is not a valid log-prob: it marks a target on another rank.
    logprobs = torch.where(request.target_ids < 0, 1.0, logprobs)
    return torch.stack([*stats.norm.unbind(-1), logprobs, *([] if stats.entropy is None else [stats.entropy])], -1)


def whole_stats(by: Backend, gathered: Tensor, request: RowRequest) -> RowStats:
    """Return statistics of whole rows from what every rank sent for its columns, [R, N, 3 or 4]."""
    norm, log_shares = by.merge_norms(gathered[..., :2], request)

    def zero_dead(x: Tensor) -> Tensor:
        return torch.where(request.live, x, 0.0).to(gathered.dtype)

    # Rounding must not produce a probability above 1.
    logprobs = torch.where(gathered[..., 2] > 0, 0.0, gathered[..., 2] + log_shares).sum(0).clamp(max=0.0)
    entropy = None
    if request.want_entropy:
        # Columns that are all −∞ have no entropy and do not contribute.
        terms = torch.where(log_shares == -torch.inf, 0.0, log_shares.exp() * (gathered[..., 3] - log_shares))
        entropy = zero_dead(terms.sum(0).clamp(min=0.0))
    return RowStats(zero_dead(logprobs), torch.where(request.live[:, None], norm, 0.0), entropy)


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
    """Return int64 [R] on the host: the number of columns of each rank (this one has ``columns``), among the first
    ``valid`` if that is not 0.

    If ``vocab`` is not 0 it is V, split like ``torch.chunk`` or ``whole`` everywhere. Then the numbers are known, and a
    GPU is not waited for.

    Raises:
        ValueError: the ranks' tokens or ``settings`` differ, a rank has raised an error for its arguments, or V is less
            than ``valid``. All ranks raise it.
    """
    ranks = _resolved(group)
    numbers = (columns, n_tokens, zlib.crc32(settings.encode()))
    facts = torch.stack([*(torch.full_like(checksum, x) for x in numbers), checksum])
    theirs = _gathered(facts, ranks)
    if vocab:
        sizes = [vocab] * ranks.size() if whole else _chunked(vocab, ranks.size())
        if not on_host(theirs):
            torch._assert_async((theirs[:, 1:] == facts[1:]).all())
            return torch.tensor(_without_padding(sizes, valid), device="cpu")
    if not on_host(theirs) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{caller}: group= asks the ranks for their columns and waits, which a CUDA graph cannot capture; pass a "
            "DTensor, which knows them"
        )
    counted, token_counts, settings_of_ranks, checksums = theirs.t().tolist()
    if _REFUSED in counted:
        raise ValueError(f"{caller}: rank {counted.index(_REFUSED)} of the group has invalid arguments: see its error")
    if len(set(settings_of_ranks)) > 1:
        raise ValueError(f"{caller}: all ranks of the group must make the same call; here it is {settings}")
    if len(set(token_counts)) > 1 or len(set(checksums)) > 1:
        raise ValueError(
            f"{caller}: all ranks of the group must be given the same target_ids and mask, temperatures, advantages, "
            f"old_logprobs and other values of the live tokens; they differ (tokens by rank: {token_counts}). A head "
            "sharded by fully_shard (FSDP2) is whole only inside the forward of the module it wrapped: call the loss "
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
    """Take part in the exchange of ``shard_columns`` to tell the other ranks that this rank will not make the call."""
    _gathered(torch.full((4,), _REFUSED, device=device), _resolved(group))


def _chunked(vocab: int, n_ranks: int) -> list[int]:
    most = -(-vocab // n_ranks)
    return [max(0, min(most, vocab - rank * most)) for rank in range(n_ranks)]


def _without_padding(columns: list[int], valid: int) -> list[int]:
    firsts = [sum(columns[:rank]) for rank in range(len(columns))]
    left = valid or sum(columns)
    return [max(0, min(n, left - first)) for n, first in zip(columns, firsts, strict=True)]


def checksum(live: Tensor, values: Iterable[Tensor | None]) -> Tensor:
    """Return int64, wrapping: a checksum of the bits at live tokens and of which values are given."""
    at = torch.arange(1, len(live) + 1, device=live.device) * 2654435761 + 1
    total = torch.zeros((), dtype=torch.int64, device=live.device)
    for x in values:
        total = 1000003 * total + 1
        if x is not None:
            total = total + torch.where(live, (2 * _bits(x) + 1) * at, 0).sum()
    return total


def list_checksums(request: RowRequest) -> Tensor | None:
    """Return int64 [N], wrapping: a checksum of the tokens that each row keeps."""
    if request.kept_ids is None or request.kept_offsets is None:
        return None
    mixed = (request.kept_ids + 1) * 2654435761
    before = torch.nn.functional.pad(((mixed ^ (mixed >> 17)) * 1000003).cumsum(0), (1, 0))
    return before.index_select(0, request.kept_offsets).diff()


def _bits(x: Tensor) -> Tensor:
    if x.is_floating_point():
        x = x.view(torch.int64 if x.element_size() == 8 else torch.int32)
    return x.to(torch.int64)


@operator
def from_first(x: Tensor, group: str) -> Tensor:
    """Return the bool tensor of the group's first rank."""
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
    """Concatenate the parts of all ranks along ``dim``. Each rank gets the gradient of its part, summed over ranks."""
    ranks = _resolved(group)
    return torch.cat(_gathered(part.contiguous(), ranks).unbind(0), dim)


@gathered_sequence.fake
def _(part: Tensor, dim: int, group: str) -> Tensor:
    shape = list(part.shape)
    shape[dim] *= _resolved(group).size()
    return part.new_empty(shape)


@operator
def scattered_sum(whole: Tensor, dim: int, group: str) -> Tensor:
    """Return this rank's part along ``dim`` of the sum over ranks, which is computed in float32."""
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
    """Sum over ranks in float32, in the tensor's own storage; a new tensor under a tracer or with create_graph=True."""
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
    """Split a contiguous tensor into pieces whose float32 copy is not too large."""
    return x.view(-1).split(_SUM_BYTES // 4)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x


def _gathered(x: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """Return [R, …]: every rank's ``x``, which must be contiguous and have the same shape."""
    out = x.new_empty(ranks.size(), *x.shape)
    dist.all_gather(list(out.unbind(0)), x, group=ranks)
    return out


def _resolved(group: str) -> dist.ProcessGroup:
    c10d: Any = dist.distributed_c10d  # it has the function, but does not export it
    return c10d._resolve_process_group(group)
