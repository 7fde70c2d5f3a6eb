"""The "triton" backend: launchers of the Triton kernels. Same functions as ``reference.py``.

CUDA tensors; CPU tensors under ``TRITON_INTERPRET=1``, for the tests.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from dapo_kernels.reference import check_rows
from dapo_kernels.surrogate import ObjectiveScalars
from dapo_kernels.tokens import RowLoss, TokenLoss, Tokens
from dapo_kernels.triton import kernels

# Logits of one load. One program per row; a block of 4096 with 8 warps is 16 logits per thread: two 128-bit loads in
# bfloat16, four in float32, without spills (tests/kernels/test_triton_compile.py reads the compiler's report).
_BLOCKS = ((1024, 4), (4096, 8))
_BLOCK_T = 256


def _launch(vocab: int) -> dict[str, int]:
    """Block and warps for a vocabulary: the largest block that is not mostly overhang."""
    block, warps = _BLOCKS[0] if vocab <= _BLOCKS[0][0] else _BLOCKS[1]
    return {"BLOCK_V": min(block, max(16, triton.next_power_of_2(vocab))), "num_warps": warps}


def _rows(logits: Tensor) -> tuple[Any, int, int, int]:
    """Pointer and (inner, stride_outer, stride_inner) of [N, V] or [B, L, V] with unit last stride."""
    outer = logits.stride(0) if logits.dim() == 3 else 0
    return logits, max(logits.shape[-2], 1), outer, logits.stride(-2)


def _unit_stride(logits: Tensor) -> Tensor:
    return logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()


def _tau(temperature: float | Tensor) -> tuple[Tensor | None, float]:
    return (temperature, 1.0) if isinstance(temperature, Tensor) else (None, float(temperature))


def row_stats(
    logits: Tensor, target_ids: Tensor, live: Tensor, temperature: float | Tensor, want_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    check_rows(target_ids, live, temperature, logits.shape[-1])
    logits = _unit_stride(logits)
    logprobs = torch.empty(target_ids.shape, dtype=torch.float32, device=logits.device)
    norm = logprobs.new_empty(*target_ids.shape, 2)
    entropy = torch.empty_like(logprobs) if want_entropy else None
    n, vocab = target_ids.numel(), logits.shape[-1]
    if n:
        kernels.row_stats_kernel[(n,)](
            *_rows(logits),
            vocab,
            target_ids,
            live.view(torch.int8),
            *_tau(temperature),
            logprobs,
            norm,
            entropy,
            **_launch(vocab),
        )
    return logprobs, norm, entropy


def row_grad(
    out: Tensor,
    logits: Tensor,
    target_ids: Tensor,
    live: Tensor,
    temperature: float | Tensor,
    norm: Tensor,
    entropy: Tensor | None,
    dlogprobs: Tensor,
    dentropy: Tensor | None,
) -> None:
    source, to = _unit_stride(logits), _unit_stride(out)
    n, vocab = target_ids.numel(), logits.shape[-1]
    if n:
        kernels.row_grad_kernel[(n,)](
            *_rows(to),
            *_rows(source),
            vocab,
            target_ids,
            live.view(torch.int8),
            *_tau(temperature),
            norm,
            entropy,
            dlogprobs,
            dentropy,
            **_launch(vocab),
        )
    if to is not out:
        out.copy_(to)


def row_loss_(
    logits: Tensor,
    target_ids: Tensor,
    temperature: float | Tensor,
    tokens: Tokens,
    scalars: ObjectiveScalars,
    entropy_coef: float,
    want_entropy: bool,
) -> RowLoss:
    check_rows(target_ids, tokens.live, temperature, logits.shape[-1])
    work = _unit_stride(logits)
    logprobs = torch.empty(target_ids.shape, dtype=torch.float32, device=logits.device)
    losses = torch.zeros_like(logprobs)
    entropy = torch.empty_like(logprobs) if want_entropy or entropy_coef != 0 else None
    clip_hit = torch.empty_like(logprobs, dtype=torch.int8)
    ref_kl = torch.empty_like(logprobs) if scalars.kl_coef != 0 else None
    idle = torch.empty_like(clip_hit)
    n, vocab = target_ids.numel(), logits.shape[-1]
    if n:
        kernels.row_loss_kernel[(n,)](
            *_rows(work),
            vocab,
            target_ids,
            tokens.live.view(torch.int8),
            *_tau(temperature),
            *tokens[1:],
            losses,
            logprobs,
            entropy,
            clip_hit,
            ref_kl,
            idle,
            *scalars,
            entropy_coef,
            entropy_coef != 0,
            **_launch(vocab),
        )
    if work is not logits:
        logits.copy_(work)
    loss = losses.sum(dtype=torch.float64).to(torch.float32)
    return RowLoss(loss, logprobs, entropy, clip_hit, ref_kl, idle.bool())


def token_loss(logprobs: Tensor, log_ratio: Tensor | None, tokens: Tokens, scalars: ObjectiveScalars) -> TokenLoss:
    losses, d_logprobs, d_log_ratio = (torch.zeros_like(logprobs) for _ in range(3))
    clip_hit = torch.zeros_like(logprobs, dtype=torch.int8)
    ref_kl = torch.zeros_like(logprobs) if scalars.kl_coef != 0 else None
    n = logprobs.numel()
    if n:
        kernels.token_loss_kernel[(triton.cdiv(n, _BLOCK_T),)](
            n,
            logprobs,
            log_ratio,
            tokens.live.view(torch.int8),
            tokens.weights,
            tokens.advantages,
            tokens.ref_logprobs,
            tokens.importance_weights,
            losses,
            d_logprobs,
            d_log_ratio,
            clip_hit,
            ref_kl,
            *scalars,
            BLOCK_T=_BLOCK_T,
        )
    loss = losses.sum(dtype=torch.float64).to(torch.float32)
    return TokenLoss(loss, d_logprobs, d_log_ratio, clip_hit, ref_kl)
