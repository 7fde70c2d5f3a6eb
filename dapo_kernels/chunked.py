"""From hidden states, a chunk of tokens at a time: the logits of one chunk are all that ever exists.

T tokens, V vocabulary, H hidden. Per chunk of C tokens, in one reused [C, V] buffer: logits = hidden · weightᵀ (vendor
GEMM) → row kernel in place, which leaves ∂loss/∂logits → the two gradient GEMMs at once. Three GEMMs in all, where
recomputing the logits in the backward pass would take four. Cost follows work: dead tokens are left out before the
first GEMM, and tokens whose gradient is zero (clipped, zero advantage) before the other two; what of that needs the
host to look, and what a GPU does instead, is in ``chunk_plan.py``.

Gradients are returned as their running sums: rounding dW to its dtype takes memory, and by then the buffer is free.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from dapo_kernels.chunk_plan import Chunks, gradient_rows, idle_beforehand, live_rows, on_host
from dapo_kernels.reference import check_rows
from dapo_kernels.surrogate import ObjectiveScalars
from dapo_kernels.tokens import RowLoss, Tokens, accumulate_dtype
from dapo_kernels.weight_grad import Gradients, Needs, float32_product, tile_rows

__all__ = ["Head", "Needs", "Options", "linear_grad", "linear_loss", "linear_stats"]


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

    def bytes_per_logit(self, backend: ModuleType) -> int:
        """In a chunk's buffers: a softcap that the row kernels leave to torch needs the capped logits beside their
        gradient, and float32 logits a rounded copy of it for the GEMMs.
        """
        itemsize = self.logits_dtype.itemsize * (1 if self.torch_softcap(backend) is None else 2)
        return itemsize + (self.hidden.element_size() if self.logits_dtype != self.hidden.dtype else 0)

    def torch_softcap(self, backend: ModuleType) -> float | None:
        """The softcap, unless the backend's row kernels see to it."""
        return None if getattr(backend, "FUSED_SOFTCAP", False) else self.softcap

    def row_options(self, backend: ModuleType) -> dict[str, float | None]:
        """What the row kernels are told of the head."""
        return {"softcap": self.softcap} if getattr(backend, "FUSED_SOFTCAP", False) else {}

    def logits(self, rows: Tensor | slice, out: Tensor) -> Tensor:
        """The hidden states of ``rows``, [C, H]; their logits before the softcap, [C, V], in ``out``."""
        hidden = self.hidden[rows]
        if out.dtype != hidden.dtype:
            self._float32_product(hidden, out)
        elif self.bias is None:
            torch.mm(hidden, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=out)
        return hidden

    def _float32_product(self, hidden: Tensor, out: Tensor) -> None:
        """A part of the vocabulary at a time: a float32 copy of the whole weight would be gigabytes."""
        if float32_product(hidden):
            torch.mm(hidden, self.weight.t(), out_dtype=out.dtype, out=out)
        else:
            hidden = hidden.float()
            part = tile_rows(4 * hidden.shape[1])
            for start in range(0, self.weight.shape[0], part):
                torch.mm(hidden, self.weight[start : start + part].float().t(), out=out[:, start : start + part])
        if self.bias is not None:
            out += self.bias

    def cap_(self, logits: Tensor, backend: ModuleType) -> Tensor:
        """The softcap in place, where the row kernels leave it to torch."""
        cap = self.torch_softcap(backend)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def uncap_(self, dlogits: Tensor, capped: Tensor | None, idle: Tensor | None) -> None:
        """∂/∂x from ∂/∂(c·tanh(x/c)): times 1 − (z/c)². Rows of ``idle`` stay zero whatever their logits."""
        if capped is not None:
            assert self.softcap is not None
            dlogits.mul_(capped.div_(self.softcap).square_().neg_().add_(1.0))
            if idle is not None and not on_host(dlogits):  # on the host such rows go no further
                dlogits.masked_fill_(idle[:, None], 0.0)


class Options(NamedTuple):
    """How a call is to run."""

    chunk_bytes: int | None  # None: as the device likes it
    host_sync: bool | None  # whether a GPU may be waited for; see ``chunk_plan.may_wait``
    backend: ModuleType


def _chunks(head: Head, live: Tensor, idle: Tensor | None, needs: Needs, options: Options) -> Chunks:
    return Chunks(
        live_rows(live, idle, options.host_sync),
        head.hidden,
        head.weight.shape[0],
        head.logits_dtype,
        head.bytes_per_logit(options.backend),
        options.chunk_bytes,
        needs.sum_bytes(head.weight),
    )


def _tau(temperature: float | Tensor, rows: Tensor | slice) -> float | Tensor:
    return temperature[rows] if isinstance(temperature, Tensor) else temperature


def linear_stats(
    head: Head,
    target_ids: Tensor,
    live: Tensor,
    temperature: float | Tensor,
    want_entropy: bool,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs, normalizer, entropy, each [T]: one GEMM, no gradient."""
    check_rows(target_ids, live, temperature, head.weight.shape[0])
    backend = options.backend
    dtype = accumulate_dtype(head.hidden.dtype)
    logprobs = torch.zeros(live.shape, dtype=dtype, device=live.device)
    norm = logprobs.new_zeros(*live.shape, 2)
    entropy = torch.zeros_like(logprobs) if want_entropy else None
    for chunk in _chunks(head, live, None, Needs(False, False, False), options):
        at, logits = chunk.rows, chunk.logits
        head.logits(at, logits)
        head.cap_(logits, backend)
        tau = _tau(temperature, at)
        stats = backend.row_stats(logits, target_ids[at], live[at], tau, want_entropy, **head.row_options(backend))
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
    options: Options,
) -> Gradients:
    """Gradients of (hidden, weight, bias) from ∂loss/∂ℓ and ∂loss/∂H: the logits again, then two GEMMs."""
    asked = dlogprobs != 0 if dentropy is None else (dlogprobs != 0) | (dentropy != 0)
    asked = live & asked
    backend = options.backend
    chunks = _chunks(head, asked, None, needs, options)
    gradients = Gradients(*head[:3], needs, chunks.n_with_gradient, backend)
    for chunk in chunks:
        at, logits = chunk.rows, chunk.logits
        hidden = head.logits(at, logits)
        head.cap_(logits, backend)
        capped = logits.clone() if head.torch_softcap(backend) is not None else None
        backend.row_grad(
            logits,
            logits,
            target_ids[at],
            asked[at],
            _tau(temperature, at),
            norm[at],
            None if dentropy is None or entropy is None else entropy[at],
            dlogprobs[at],
            None if dentropy is None else dentropy[at],
            **head.row_options(backend),
        )
        idle = None if on_host(logits) else ~asked[at]
        head.uncap_(logits, capped, idle)
        if idle is None:
            gradients.add(logits, hidden, at)
        else:
            gradients.add(*gradient_rows(logits, hidden, idle, chunk))
    return gradients


def linear_loss(
    head: Head,
    target_ids: Tensor,
    temperature: float | Tensor,
    tokens: Tokens,
    scalars: ObjectiveScalars,
    entropy_coef: float,
    want_entropy: bool,
    needs: Needs,
    options: Options,
) -> tuple[RowLoss, Gradients]:
    """Loss and, formed on the way, the gradients of (hidden, weight, bias) for grad_output = 1."""
    check_rows(target_ids, tokens.live, temperature, head.weight.shape[0])
    backend = options.backend
    total = _no_loss(tokens.live, accumulate_dtype(head.hidden.dtype), scalars, want_entropy or entropy_coef != 0)
    idle = None if on_host(tokens.live) else idle_beforehand(tokens, scalars, entropy_coef)
    chunks = _chunks(head, tokens.live, idle, needs, options)
    gradients = Gradients(*head[:3], needs, chunks.n_with_gradient, backend)
    for chunk in chunks:
        at, logits = chunk.rows, chunk.logits
        hidden = head.logits(at, logits)
        head.cap_(logits, backend)
        capped = logits.clone() if head.torch_softcap(backend) is not None else None
        rows = (logits, target_ids[at], _tau(temperature, at), tokens.rows(at))
        out = backend.row_loss_(*rows, scalars, entropy_coef, want_entropy, **head.row_options(backend))
        total.loss.add_(out.loss)
        for whole, piece in zip(total[1:], out[1:], strict=True):
            if whole is not None:
                whole[at] = piece
        head.uncap_(logits, capped, out.idle)
        gradients.add(*gradient_rows(logits, hidden, out.idle, chunk))
    return total._replace(loss=total.loss.to(total.logprobs.dtype)), gradients


def _no_loss(live: Tensor, dtype: torch.dtype, scalars: ObjectiveScalars, has_entropy: bool) -> RowLoss:
    """What dead tokens have to show."""
    zeros = torch.zeros(live.shape, dtype=dtype, device=live.device)
    return RowLoss(
        loss=torch.zeros((), dtype=torch.float64, device=zeros.device),
        logprobs=zeros,
        entropy=zeros.clone() if has_entropy else None,
        clip_hit=torch.zeros_like(zeros, dtype=torch.int8),
        ref_kl=zeros.clone() if scalars.kl_coef != 0 else None,
        idle=torch.ones_like(live),
    )
