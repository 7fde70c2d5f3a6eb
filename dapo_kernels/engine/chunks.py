"""Decide which tokens the path from hidden states computes, in which order, and in which chunks.

N tokens, V vocabulary, C tokens of a chunk. On the CPU the host knows which tokens are live: masked ones are left out,
and idle ones (gradient zero) are removed from every chunk. On a GPU, reading that takes a wait for the device. So there
are two ways, with the same results up to the rounding of GEMMs with other shapes:

    waiting once      the tokens are sorted on the device (those that may have a gradient, live ones without, dead ones)
                      and the first two counts are read back in one copy: the first GEMM runs on live tokens, the other
                      two on those that may have a gradient. The cost is proportional to the work.
    without waiting   all shapes follow from N: every token goes through the GEMMs at its place, dead and idle rows as
                      zeros. Can be captured in a CUDA graph.

Waiting once costs the time in which the device is idle, some tens of microseconds. Else every masked token costs six
H·V floating point operations, 3.7 G at H=4096, V=151936. A token whose clipping depends on its logits keeps its place
in the gradient GEMMs on a GPU: leaving it out would take a wait per chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dapo_kernels.memory import workspace
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import Tokens, on_host

# Bytes of the logits buffer on the CPU. The gradient GEMMs access all of dW once per chunk: fewer chunks are faster.
DEFAULT_CHUNK_BYTES = 192 * 2**20
# On a GPU this access is 8 bytes per entry of dW against 6·C flops of GEMM: at 170 flops per byte of bandwidth (Hopper
# in bfloat16), 220/C of the GEMMs' time without overlap. A GiB is 3500 tokens at V=151936: 6 %.
DEFAULT_DEVICE_CHUNK_BYTES = 2**30
# GEMM tiles are 128 or 256 rows high: a chunk between two multiples costs as much as the larger one.
ROW_MULTIPLE = 128
# Every row of the buffer starts at a multiple of this many logits: 32 bytes, for 128-bit accesses and GEMMs.
_STRIDE_MULTIPLE = 16
# Rows moved at once when idle rows are removed from a chunk: limits the temporary.
_MOVED_ROWS = 64


def may_wait(host_sync: bool | None) -> bool:
    """Return whether a call on a GPU may wait for the device. With ``None``: not during graph capture, and not if
    ``torch.cuda.set_sync_debug_mode`` forbids or reports it.
    """
    if host_sync is not None or not torch.cuda.is_available():
        return host_sync is not False
    return not torch.cuda.is_current_stream_capturing() and torch.cuda.get_sync_debug_mode() == 0


# --- which rows -------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """The tokens to compute, in this order."""

    at: Tensor | None  # int64 [n]; None: all, in place
    n: int
    n_active: int  # the first ones, which may have a gradient

    def part(self, start: int, size: int) -> Tensor | slice:
        size = min(size, self.n - start)
        return slice(start, start + size) if self.at is None else self.at[start : start + size]


def live_work(live: Tensor, idle: Tensor | None, host_sync: bool | None) -> Work:
    """Return the live tokens. ``idle`` [N]: tokens known to have no gradient (only used on a GPU)."""
    if on_host(live):
        at = live.nonzero().squeeze(1)
        return Work(at, at.shape[0], at.shape[0])
    n = live.shape[0]
    if n == 0 or not may_wait(host_sync):
        return Work(None, n, n)
    active = live if idle is None else live & ~idle
    order = (live.to(torch.int8) + active.to(torch.int8)).argsort(descending=True, stable=True)
    n_active, n_live = torch.stack([active.sum(), live.sum()]).tolist()
    return Work(None if n_active == n else order[:n_live], n_live, n_active)


def idle_beforehand(tokens: Tokens, scalars: ObjectiveScalars) -> Tensor:
    """Return bool [N]: tokens whose gradient is zero for any logits."""
    idle = tokens.weights == 0
    if scalars.kl_coef == 0 and scalars.entropy_coef == 0:
        idle = idle | (tokens.advantages == 0)
        if tokens.importance_weights is not None:
            idle = idle | (tokens.importance_weights == 0)
    return idle


# --- how many at a time -----------------------------------------------------------------------------------


def chunk_rows(n_rows: int, vocab: int, bytes_per_logit: int, chunk_bytes: int | None) -> int:
    """Return the rows of a chunk: as many as the bytes allow, at least one, evened out over the chunks."""
    most = max(1, (chunk_bytes or DEFAULT_CHUNK_BYTES) // max(vocab * bytes_per_logit, 1))
    n_chunks = max(1, -(-n_rows // most))
    return max(1, -(-n_rows // n_chunks))


def device_chunk_rows(n_rows: int, vocab: int, bytes_per_logit: int, chunk_bytes: int | None, sum_bytes: int) -> int:
    """Return the rows of a chunk on a GPU: evened out and whole GEMM tiles, unless ``chunk_bytes`` is less than a tile.

    ``sum_bytes`` is the size of the running sum of dW, which only several chunks need. By default all rows are one
    chunk if their logits take no more memory than one chunk and the sum would.
    """
    row_bytes = max(row_stride(vocab) * bytes_per_logit, 1)
    if chunk_bytes is None and n_rows * row_bytes <= DEFAULT_DEVICE_CHUNK_BYTES + sum_bytes:
        return max(1, n_rows)
    most = (chunk_bytes or DEFAULT_DEVICE_CHUNK_BYTES) // row_bytes
    if most < ROW_MULTIPLE:
        return chunk_rows(n_rows, row_stride(vocab), bytes_per_logit, chunk_bytes or DEFAULT_DEVICE_CHUNK_BYTES)
    n_chunks = max(1, -(-n_rows // (most // ROW_MULTIPLE * ROW_MULTIPLE)))
    even = -(-n_rows // n_chunks)
    return max(1, min(n_rows, -(-even // ROW_MULTIPLE) * ROW_MULTIPLE))


def row_stride(vocab: int) -> int:
    """Return the number of logits from one row to the next in a GPU's chunk buffer."""
    return -(-vocab // _STRIDE_MULTIPLE) * _STRIDE_MULTIPLE


class Chunk(NamedTuple):
    rows: Tensor | slice
    logits: Tensor  # [C, V] of the buffer that all chunks use
    n_active: int  # number of its first rows, which may have a gradient


class Chunks:
    """The rows to compute, in chunks."""

    def __init__(
        self,
        work: Work,
        like: Tensor,
        vocab: int,
        logits_dtype: torch.dtype,
        bytes_per_logit: int,
        chunk_bytes: int | None,
        sum_bytes: int = 0,
        widest: int | None = None,  # largest V of the ranks that share the vocabulary: they must make the same chunks
    ) -> None:
        widest = vocab if widest is None else widest
        self.work, self.like, self.vocab, self.dtype = work, like, vocab, logits_dtype
        if on_host(like):
            self.size = chunk_rows(work.n, widest, bytes_per_logit, chunk_bytes)
        else:
            self.size = device_chunk_rows(work.n, widest, bytes_per_logit, chunk_bytes, sum_bytes)

    def __len__(self) -> int:
        return -(-self.work.n // self.size)

    @property
    def n_with_gradient(self) -> int:
        return -(-self.work.n_active // self.size)

    def buffer(self, dtype: torch.dtype) -> Tensor:
        """Allocate the logits of a chunk."""
        stride = self.vocab if on_host(self.like) else row_stride(self.vocab)
        # On a GPU torch's allocator handles streams and graphs. Allocated on every call, reused by its chunks.
        return workspace((min(self.size, self.work.n), stride), dtype, self.like.device)[:, : self.vocab]

    def __iter__(self) -> Iterator[Chunk]:
        buffer = self.buffer(self.dtype)
        for start in range(0, self.work.n, self.size):
            size = min(self.size, self.work.n - start)
            n_active = max(0, min(size, self.work.n_active - start))
            yield Chunk(self.work.part(start, size), buffer[:size], n_active)


# --- idle rows of a chunk ---------------------------------------------------------------------------------


def squeeze_idle(dlogits: Tensor, idle: Tensor) -> tuple[Tensor, Tensor]:
    """Move the rows that are not idle to the front, in place. Return them and their original indices."""
    n_active = int((~idle).sum())
    origin = torch.arange(idle.shape[0], device=idle.device)
    if n_active < idle.shape[0]:
        holes = idle[:n_active].nonzero().squeeze(1)
        movers = (~idle[n_active:]).nonzero().squeeze(1) + n_active
        for to, source in zip(holes.split(_MOVED_ROWS), movers.split(_MOVED_ROWS), strict=True):
            dlogits.index_copy_(0, to, dlogits.index_select(0, source))
        origin[holes] = movers
    return dlogits[:n_active], origin[:n_active]


def gradient_rows(dlogits: Tensor, hidden: Tensor, idle: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor | slice]:
    """Return the inputs of a chunk's gradient GEMMs: ∂loss/∂logits [A, V], hidden [A, H], and the rows' indices."""
    if on_host(dlogits):
        assert isinstance(chunk.rows, Tensor)
        dlogits, origin = squeeze_idle(dlogits, idle)
        return dlogits, hidden[origin], chunk.rows[origin]
    n, rows = chunk.n_active, chunk.rows
    if isinstance(rows, Tensor):
        rows = rows[:n]
    # A zero row of dlogits adds nothing to dW, unless the hidden state is NaN, as it may be for a masked token.
    return dlogits[:n], hidden[:n].masked_fill(idle[:n, None], 0.0), rows
