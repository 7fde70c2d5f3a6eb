"""Which tokens the path from hidden states works on, in what order, and how many at a time.

N tokens, V vocabulary, C tokens of a chunk. On the CPU the host knows which tokens are live: dead ones are left out and
idle ones (gradient zero) squeezed out of every chunk. On a GPU looking costs a wait for the device, so there are two
ways, both with the same results up to the rounding of GEMMs of other shapes:

    waiting once      the tokens are sorted on the device (those that may have a gradient, live ones that have none,
                      dead ones) and the first two counts read back in one copy: the first GEMM runs on live tokens,
                      the other two on those with a gradient. Cost follows work.
    without waiting   all shapes follow from N: every token goes through the GEMMs where it stands, dead and idle rows
                      as zeros. May be captured in a CUDA graph.

Waiting once costs the time in which the device runs dry, some tens of microseconds; every dead token costs six H·V
floating point operations otherwise, 3.7 G at H=4096, V=151936. A token found to be clipped only from its logits keeps
its place in the gradient GEMMs on a GPU: leaving it out would take a wait per chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dapo_kernels.memory import workspace
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import Tokens, on_host

# Bytes of the logits buffer on the CPU. The gradient GEMMs revisit all of dW once per chunk: fewer chunks are faster.
DEFAULT_CHUNK_BYTES = 192 * 2**20
# On a GPU the same revisit is 8 bytes per entry of dW against 6·C flops of GEMM: at 170 flops per byte of bandwidth
# (Hopper in bfloat16) 220/C of the GEMMs' time where nothing overlaps. A GiB is 3500 tokens at V=151936: 6 %.
DEFAULT_DEVICE_CHUNK_BYTES = 2**30
# GEMM tiles are 128 or 256 rows high: a chunk between two multiples pays for the larger one.
ROW_MULTIPLE = 128
# Logits of a row, in the buffer: whatever V is, every row starts on 32 bytes, as 128-bit accesses and GEMMs want it.
_STRIDE_MULTIPLE = 16
# Rows moved at once when idle rows are squeezed out of a chunk: bounds the temporary.
_MOVED_ROWS = 64


def may_wait(host_sync: bool | None) -> bool:
    """Whether a call on a GPU may wait for the device. Undecided (``None``): not while a graph is captured, nor where
    ``torch.cuda.set_sync_debug_mode`` forbids or reports it.
    """
    if host_sync is not None or not torch.cuda.is_available():
        return host_sync is not False
    return not torch.cuda.is_current_stream_capturing() and torch.cuda.get_sync_debug_mode() == 0


# --- which rows -------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """The tokens that are worked on, in this order."""

    at: Tensor | None  # int64 [n]; None: all, where they stand
    n: int
    n_active: int  # the others, behind them, have no gradient

    def part(self, start: int, size: int) -> Tensor | slice:
        size = min(size, self.n - start)
        return slice(start, start + size) if self.at is None else self.at[start : start + size]


def live_work(live: Tensor, idle: Tensor | None, host_sync: bool | None) -> Work:
    """The live tokens. ``idle`` [N]: those of them known to have no gradient (used on a GPU only)."""
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
    """bool [N]: tokens whose gradient is zero whatever their logits."""
    idle = tokens.weights == 0
    if scalars.kl_coef == 0 and scalars.entropy_coef == 0:
        idle = idle | (tokens.advantages == 0)
        if tokens.importance_weights is not None:
            idle = idle | (tokens.importance_weights == 0)
    return idle


# --- how many at a time -----------------------------------------------------------------------------------


def chunk_rows(n_rows: int, vocab: int, bytes_per_logit: int, chunk_bytes: int | None) -> int:
    """Rows of a chunk: as many as the bytes allow, at least one, evened out over the chunks."""
    most = max(1, (chunk_bytes or DEFAULT_CHUNK_BYTES) // max(vocab * bytes_per_logit, 1))
    n_chunks = max(1, -(-n_rows // most))
    return max(1, -(-n_rows // n_chunks))


def device_chunk_rows(n_rows: int, vocab: int, bytes_per_logit: int, chunk_bytes: int | None, sum_bytes: int) -> int:
    """Rows of a chunk on a GPU: evened out and whole GEMM tiles, unless ``chunk_bytes`` asks for less than one tile.

    ``sum_bytes`` is the size of the running sum of dW that several chunks need and a single one does not: by default
    all rows are one chunk as long as their logits take no more memory than chunk and sum would.
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
    """Logits from one row to the next in a GPU's chunk buffer."""
    return -(-vocab // _STRIDE_MULTIPLE) * _STRIDE_MULTIPLE


class Chunk(NamedTuple):
    rows: Tensor | slice
    logits: Tensor  # [C, V] of the buffer that all chunks share
    n_active: int  # of its rows, the first that may have a gradient


class Chunks:
    """The rows that need work, a chunk at a time."""

    def __init__(
        self,
        work: Work,
        like: Tensor,
        vocab: int,
        logits_dtype: torch.dtype,
        bytes_per_logit: int,
        chunk_bytes: int | None,
        sum_bytes: int = 0,
        widest: int | None = None,  # of the ranks that share the vocabulary: they all make the same chunks
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
        """Room for the logits of a chunk."""
        stride = self.vocab if on_host(self.like) else row_stride(self.vocab)
        # On a GPU the allocator's: it knows of streams and graphs. Fresh on every call, reused by its chunks.
        return workspace((min(self.size, self.work.n), stride), dtype, self.like.device)[:, : self.vocab]

    def __iter__(self) -> Iterator[Chunk]:
        buffer = self.buffer(self.dtype)
        for start in range(0, self.work.n, self.size):
            size = min(self.size, self.work.n - start)
            n_active = max(0, min(size, self.work.n_active - start))
            yield Chunk(self.work.part(start, size), buffer[:size], n_active)


# --- idle rows of a chunk ---------------------------------------------------------------------------------


def squeeze_idle(dlogits: Tensor, idle: Tensor) -> tuple[Tensor, Tensor]:
    """Move the rows that are not idle to the front, in place; returns them and where they came from."""
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
    """What the gradient GEMMs of a chunk run on: ∂loss/∂logits [A, V], hidden [A, H] and where those rows stand."""
    if on_host(dlogits):
        assert isinstance(chunk.rows, Tensor)
        dlogits, origin = squeeze_idle(dlogits, idle)
        return dlogits, hidden[origin], chunk.rows[origin]
    n, rows = chunk.n_active, chunk.rows
    if isinstance(rows, Tensor):
        rows = rows[:n]
    # A zero row of dlogits adds nothing to dW unless it meets a NaN, which a dead token's hidden state may be.
    return dlogits[:n], hidden[:n].masked_fill(idle[:n, None], 0.0), rows
