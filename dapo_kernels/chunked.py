"""From hidden states, a chunk of tokens at a time: the logits of one chunk are all that ever exists.

T tokens, V vocabulary, H hidden. Per chunk of C tokens, in one reused [C, V] buffer: logits = hidden · weightᵀ (vendor
GEMM) → row kernel in place, which leaves ∂loss/∂logits → the two gradient GEMMs at once. Three GEMMs in all, where
recomputing the logits in the backward pass would take four. Cost follows work: dead tokens are left out before the
first GEMM, and tokens whose gradient is zero (clipped, zero advantage) before the other two.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from dapo_kernels.memory import large_empty, workspace
from dapo_kernels.reference import check_rows
from dapo_kernels.surrogate import ObjectiveScalars
from dapo_kernels.tokens import RowLoss, Tokens, accumulate_dtype

# Bytes of the logits buffer. The gradient GEMMs revisit all of dW once per chunk, so fewer chunks are faster.
DEFAULT_CHUNK_BYTES = 192 * 2**20
# Bytes of a tile of the weight or of its gradient: it stays in the L2/L3 cache between GEMM and addition. Below
# _TILE_ROWS rows a GEMM would not run at its rate.
_TILE_BYTES = 4 * 2**20
_TILE_ROWS = 1024
# Rows moved at once when idle rows are squeezed out of a chunk: bounds the temporary.
_MOVED_ROWS = 64


def tile_rows(bytes_per_row: int) -> int:
    return max(_TILE_ROWS, _TILE_BYTES // bytes_per_row)


class Head(NamedTuple):
    """The last layer: logits = softcap(hidden · weightᵀ + bias), softcap(x) = c·tanh(x/c)."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    softcap: float | None
    float32_logits: bool  # keep 16-bit operands' logits in float32 in place of rounding them to the operands' dtype

    @property
    def logits_dtype(self) -> torch.dtype:
        return torch.float32 if self.float32_logits else self.hidden.dtype

    @property
    def bytes_per_logit(self) -> int:
        """In a chunk's buffers: a softcap needs the capped logits beside their gradient, and float32 logits a rounded
        copy of it for the GEMMs.
        """
        itemsize = self.logits_dtype.itemsize * (1 if self.softcap is None else 2)
        return itemsize + (self.hidden.element_size() if self.logits_dtype != self.hidden.dtype else 0)

    def logits(self, rows: Tensor | slice, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states of ``rows``, [C, H], and their logits in the first C rows of ``buffer``."""
        hidden = self.hidden[rows]
        out = buffer[: hidden.shape[0]]
        if out.dtype != hidden.dtype:
            self._float32_product(hidden.float(), out)
        elif self.bias is None:
            torch.mm(hidden, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=out)
        if self.softcap is not None:
            out.div_(self.softcap).tanh_().mul_(self.softcap)
        return hidden, out

    def _float32_product(self, hidden: Tensor, out: Tensor) -> None:
        """A part of the vocabulary at a time: a float32 copy of the whole weight would be gigabytes."""
        part = tile_rows(4 * hidden.shape[1])
        for start in range(0, self.weight.shape[0], part):
            torch.mm(hidden, self.weight[start : start + part].float().t(), out=out[:, start : start + part])
        if self.bias is not None:
            out += self.bias


class Needs(NamedTuple):
    """Which gradients somebody asked for."""

    hidden: bool
    weight: bool
    bias: bool


class PlainSum:
    """A float32 sum of 16-bit tensors, or a sum of tensors in their own dtype."""

    def __init__(self, result: Tensor) -> None:
        self.result = result
        self.sum = torch.zeros_like(result, dtype=accumulate_dtype(result.dtype))

    def add(self, rows: slice, part: Tensor) -> None:
        self.sum[rows] += part

    def rounded(self) -> Tensor:
        return self.result.copy_(self.sum)


class Gradients:
    """∂loss/∂(hidden, weight, bias), added up over chunks; dW and db in float32."""

    def __init__(self, head: Head, needs: Needs, n_chunks: int, backend: ModuleType) -> None:
        self.head = head
        self.n_chunks = n_chunks
        self.n_added = 0
        self.hidden = torch.zeros_like(head.hidden) if needs.hidden else None
        self.bias = None
        self.weight = None
        self.weight_sum = None
        if needs.bias:
            assert head.bias is not None
            self.bias = torch.zeros_like(head.bias, dtype=accumulate_dtype(head.bias.dtype))
        if needs.weight:
            self.weight = large_empty(head.weight.shape, head.weight.dtype, head.weight.device)
            if n_chunks != 1:
                self.weight.zero_()
            # A single chunk needs no running sum, and 32-bit GEMMs add to the result themselves.
            if n_chunks > 1 and self.weight.element_size() < 4:
                split = self.weight.dtype == torch.bfloat16 and hasattr(backend, "SplitSum")
                self.weight_sum = backend.SplitSum(self.weight) if split else PlainSum(self.weight)
                self.tile = self.weight.new_empty(tile_rows(2 * self.weight.shape[1]), self.weight.shape[1])

    def add(self, dlogits: Tensor, hidden: Tensor, rows: Tensor) -> None:
        """``dlogits`` [C, V] of the hidden states [C, H] that stand at ``rows`` [C] of the input."""
        if dlogits.shape[0] == 0:
            return
        self.n_added += 1
        dlogits = dlogits.to(self.head.weight.dtype)
        if self.hidden is not None:
            self.hidden.index_copy_(0, rows, dlogits @ self.head.weight)
        if self.bias is not None:
            self.bias += dlogits.sum(0, dtype=self.bias.dtype)
        if self.weight_sum is not None:
            size = self.tile.shape[0]
            for start in range(0, dlogits.shape[1], size):
                part = slice(start, start + size)
                columns = dlogits[:, part]
                self.weight_sum.add(part, torch.mm(columns.t(), hidden, out=self.tile[: columns.shape[1]]))
        elif self.weight is not None:
            # beta 0 writes the result without reading what was there.
            torch.addmm(self.weight, dlogits.t(), hidden, beta=int(self.n_chunks > 1), out=self.weight)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.weight is not None and self.n_added == 0:
            self.weight.zero_()
        weight = self.weight if self.weight_sum is None else self.weight_sum.rounded()
        bias = None if self.bias is None else self.bias.to(self.head.weight.dtype)
        return self.hidden, weight, bias


def chunk_rows(n_rows: int, vocab: int, bytes_per_logit: int, chunk_bytes: int | None) -> int:
    """Rows of a chunk: as many as the bytes allow, at least one, evened out over the chunks."""
    most = max(1, (chunk_bytes or DEFAULT_CHUNK_BYTES) // max(vocab * bytes_per_logit, 1))
    n_chunks = max(1, -(-n_rows // most))
    return max(1, -(-n_rows // n_chunks))


class Chunks:
    """Slices of the rows that need work, and the buffer their logits go to, the same for all."""

    def __init__(self, head: Head, rows: Tensor, chunk_bytes: int | None) -> None:
        self.head, self.n_rows = head, rows.shape[0]
        self.size = chunk_rows(self.n_rows, head.weight.shape[0], head.bytes_per_logit, chunk_bytes)

    def __len__(self) -> int:
        return -(-self.n_rows // self.size)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        shape = (min(self.size, self.n_rows), self.head.weight.shape[0])
        buffer = workspace(shape, self.head.logits_dtype, self.head.hidden.device)
        for start in range(0, self.n_rows, self.size):
            yield slice(start, start + self.size), buffer


def _tau(temperature: float | Tensor, rows: Tensor) -> float | Tensor:
    return temperature[rows] if isinstance(temperature, Tensor) else temperature


def _undo_softcap(head: Head, dlogits: Tensor, capped: Tensor | None) -> None:
    """∂/∂x from ∂/∂(c·tanh(x/c)): times 1 − (z/c)²."""
    if capped is not None:
        assert head.softcap is not None
        dlogits.mul_(capped.div_(head.softcap).square_().neg_().add_(1.0))


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


def linear_stats(
    head: Head,
    target_ids: Tensor,
    live: Tensor,
    temperature: float | Tensor,
    want_entropy: bool,
    chunk_bytes: int | None,
    backend: ModuleType,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs, normalizer, entropy, each [T]: one GEMM, no gradient."""
    check_rows(target_ids, live, temperature, head.weight.shape[0])
    dtype = accumulate_dtype(head.hidden.dtype)
    logprobs = torch.zeros(live.shape, dtype=dtype, device=live.device)
    norm = logprobs.new_zeros(*live.shape, 2)
    entropy = torch.zeros_like(logprobs) if want_entropy else None
    rows = live.nonzero().squeeze(1)
    for part, buffer in Chunks(head, rows, chunk_bytes):
        at = rows[part]
        _, logits = head.logits(at, buffer)
        stats = backend.row_stats(logits, target_ids[at], live[at], _tau(temperature, at), want_entropy)
        logprobs[at], norm[at] = stats[0], stats[1]
        if entropy is not None:
            entropy[at] = stats[2]
    return logprobs, norm, entropy


def linear_grad(
    head: Head,
    target_ids: Tensor,
    live: Tensor,
    temperature: float | Tensor,
    norm: Tensor,
    entropy: Tensor | None,
    dlogprobs: Tensor,
    dentropy: Tensor | None,
    needs: Needs,
    chunk_bytes: int | None,
    backend: ModuleType,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of (hidden, weight, bias) from ∂loss/∂ℓ and ∂loss/∂H: the logits again, then two GEMMs."""
    asked = dlogprobs != 0 if dentropy is None else (dlogprobs != 0) | (dentropy != 0)
    rows = (live & asked).nonzero().squeeze(1)
    chunks = Chunks(head, rows, chunk_bytes)
    gradients = Gradients(head, needs, len(chunks), backend)
    for part, buffer in chunks:
        at = rows[part]
        hidden, logits = head.logits(at, buffer)
        capped = logits.clone() if head.softcap is not None else None
        backend.row_grad(
            logits,
            logits,
            target_ids[at],
            live[at],
            _tau(temperature, at),
            norm[at],
            None if dentropy is None or entropy is None else entropy[at],
            dlogprobs[at],
            None if dentropy is None else dentropy[at],
        )
        _undo_softcap(head, logits, capped)
        gradients.add(logits, hidden, at)
    return gradients.results()


def linear_loss(
    head: Head,
    target_ids: Tensor,
    temperature: float | Tensor,
    tokens: Tokens,
    scalars: ObjectiveScalars,
    entropy_coef: float,
    want_entropy: bool,
    needs: Needs,
    chunk_bytes: int | None,
    backend: ModuleType,
) -> tuple[RowLoss, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Loss and, formed on the way, the gradients of (hidden, weight, bias) for grad_output = 1."""
    check_rows(target_ids, tokens.live, temperature, head.weight.shape[0])
    dtype = accumulate_dtype(head.hidden.dtype)
    zeros = torch.zeros(tokens.live.shape, dtype=dtype, device=tokens.live.device)
    has_entropy = want_entropy or entropy_coef != 0
    total = RowLoss(
        loss=torch.zeros((), dtype=torch.float64, device=zeros.device),
        logprobs=zeros,
        entropy=zeros.clone() if has_entropy else None,
        clip_hit=torch.zeros_like(zeros, dtype=torch.int8),
        ref_kl=zeros.clone() if scalars.kl_coef != 0 else None,
        idle=torch.ones_like(tokens.live),
    )
    rows = tokens.live.nonzero().squeeze(1)
    chunks = Chunks(head, rows, chunk_bytes)
    gradients = Gradients(head, needs, len(chunks), backend)
    for part, buffer in chunks:
        at = rows[part]
        hidden, logits = head.logits(at, buffer)
        capped = logits.clone() if head.softcap is not None else None
        tau = _tau(temperature, at)
        out = backend.row_loss_(logits, target_ids[at], tau, tokens.rows(at), scalars, entropy_coef, want_entropy)
        total.loss.add_(out.loss)
        for whole, piece in zip(total[1:], out[1:], strict=True):
            if whole is not None:
                whole[at] = piece
        _undo_softcap(head, logits, capped)
        dlogits, origin = squeeze_idle(logits, out.idle)
        gradients.add(dlogits, hidden[origin], at[origin])
    return total._replace(loss=total.loss.to(dtype)), gradients.results()
