"""The "cuda" backend: launchers of the CUDA C++ kernels. Allocate, describe tensors as pointers and strides, call.

Same functions as ``reference.py``, with a softcap. float32, bfloat16 and float16 logits on a CUDA device of compute
capability 8.0 or later, on torch's current stream. Nothing here looks at values or allocates outside torch's allocator:
calls may be captured in a CUDA graph. A row's results are the same bits whatever rows stand around it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dapo_kernels import _cuda  # type: ignore[attr-defined]
from dapo_kernels.reference import check_rows, unit_stride
from dapo_kernels.structs import address, outputs, row_inputs, rows_of, token_inputs
from dapo_kernels.surrogate import ObjectiveScalars
from dapo_kernels.tokens import RowLoss, TokenLoss, Tokens, empty_row_loss, empty_stats

# The row functions take the softcap of a head, and logits from before it.
FUSED_SOFTCAP = True
# How the loss of a row is computed: by the device and the shape ("automatic"), or as a name of _cuda.Path. The results
# are the same bits either way, which the tests check.
PATH = "automatic"


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """CUDA launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _workspace(rows: Any, device: torch.device) -> Tensor:
    return torch.empty(_cuda.workspace_bytes(rows), dtype=torch.uint8, device=device)


def row_stats(
    logits: Tensor,
    target_ids: Tensor,
    live: Tensor,
    temperature: float | Tensor,
    want_entropy: bool,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    check_rows(target_ids, live, temperature, logits.shape[-1])
    logits = unit_stride(logits)
    device = logits.device
    logprobs, norm, entropy = empty_stats(target_ids, want_entropy)
    out = outputs(_cuda, logprobs=logprobs, norm=norm, entropy=entropy)
    rows = rows_of(_cuda, logits)
    work = _workspace(rows, device)
    inputs = row_inputs(_cuda, target_ids, live, temperature)
    with _on(device):
        _cuda.row_stats(rows, inputs, softcap or 0.0, out, work.data_ptr(), _stream(device))
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
    softcap: float | None = None,
) -> None:
    source, to = unit_stride(logits), unit_stride(out)
    device = source.device
    rows = rows_of(_cuda, source)
    work = _workspace(rows, device)
    with _on(device):
        _cuda.row_grad(
            rows,
            row_inputs(_cuda, target_ids, live, temperature),
            softcap or 0.0,
            rows_of(_cuda, to),
            norm.data_ptr(),
            address(entropy),
            dlogprobs.data_ptr(),
            address(dentropy),
            work.data_ptr(),
            _stream(device),
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
    softcap: float | None = None,
) -> RowLoss:
    check_rows(target_ids, tokens.live, temperature, logits.shape[-1])
    work = unit_stride(logits)
    device = work.device
    want_entropy = want_entropy or entropy_coef != 0
    logprobs, entropy, clip_hit, ref_kl, idle = empty_row_loss(target_ids, want_entropy, scalars.kl_coef != 0)
    losses = torch.empty_like(logprobs, dtype=torch.float64)
    out = outputs(_cuda, logprobs=logprobs, entropy=entropy, clip_hit=clip_hit, ref_kl=ref_kl, idle=idle)
    rows = rows_of(_cuda, work)
    scratch = _workspace(rows, device)
    inputs = row_inputs(_cuda, target_ids, tokens.live, temperature, tokens)
    with _on(device):
        _cuda.row_loss(
            rows,
            inputs,
            softcap or 0.0,
            _cuda.Objective(*scalars.pack()),
            float(entropy_coef),
            out,
            losses.data_ptr(),
            scratch.data_ptr(),
            getattr(_cuda.Path, PATH),
            _stream(device),
        )
    if work is not logits:
        logits.copy_(work)
    return RowLoss(losses.sum().to(torch.float32), logprobs, entropy, clip_hit, ref_kl, idle)


def token_loss(logprobs: Tensor, log_ratio: Tensor | None, tokens: Tokens, scalars: ObjectiveScalars) -> TokenLoss:
    device = logprobs.device
    d_logprobs, d_log_ratio = torch.empty_like(logprobs), torch.empty_like(logprobs)
    losses = torch.empty_like(logprobs, dtype=torch.float64)
    clip_hit = torch.empty_like(logprobs, dtype=torch.int8)
    ref_kl = torch.empty_like(logprobs) if scalars.kl_coef != 0 else None
    inputs = token_inputs(_cuda, tokens, log_ratio)
    out = outputs(_cuda, clip_hit=clip_hit, ref_kl=ref_kl, d_logprobs=d_logprobs, d_log_ratio=d_log_ratio)
    objective = _cuda.Objective(*scalars.pack())
    with _on(device):
        _cuda.token_loss(
            logprobs.numel(), logprobs.data_ptr(), inputs, objective, out, losses.data_ptr(), _stream(device)
        )
    return TokenLoss(losses.sum().to(torch.float32), d_logprobs, d_log_ratio, clip_hit, ref_kl)
