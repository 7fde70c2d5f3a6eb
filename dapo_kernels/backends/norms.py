"""Combine the norms of parts of a row of logits: the norm of the whole row, and the probability of each part.

R parts, N rows. A kernel's norm is (max, sum) with sum = Σ 2^(x·c − top), c = log2(e)/τ. How a kernel rounds ``top``
decides how a part's sum is rescaled to the maximum of the whole row. The arithmetic is in float64, because the
log-probability of a part is added to the log-prob of a token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dapo_kernels.records import RowRequest

_LOG2E = 1 / math.log(2)


def merged(log_sums: Tensor, lifts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log of the whole row's sum [N] and the log-probability of each part [R, N]; natural, float64.

    Args:
        log_sums: [R, N], of the parts' sums, each above its own maximum.
        lifts: [R, N], each part's maximum minus the whole row's: not positive, −∞ for a part without a finite logit.
    """
    lifted = log_sums + lifts
    total = lifted.logsumexp(0)
    return total, lifted - total


def merge_cpp_norms(norms: Tensor, request: RowRequest) -> tuple[Tensor, Tensor]:
    """Combine norms [R, N, 2] of the C++ and CUDA kernels: the whole row's norm [N, 2], and log-probabilities."""
    c = (_LOG2E / _float32(request.tau, norms).double()).float().double()
    highest = norms[..., 0].amax(0)
    top, whole_top = _cpp_top(norms[..., 0], c), _cpp_top(highest, c)
    # As ``shift_of`` in csrc/online_softmax.h: within the range the rounding of top cancels.
    near = (top.abs() < 2.0**30) & (whole_top.abs() < 2.0**30)
    lifts = torch.where(near, top - whole_top, (norms[..., 0].double() - highest.double()) * c)
    return _whole(norms, highest, lifts)


def merge_triton_norms(norms: Tensor, request: RowRequest) -> tuple[Tensor, Tensor]:
    """Combine norms of the Triton kernels, which subtract two logits before they multiply."""
    c = _float32(_LOG2E, norms) / _float32(request.tau, norms)
    highest = norms[..., 0].amax(0)
    return _whole(norms, highest, (norms[..., 0].double() - highest.double()) * c.double())


def _whole(norms: Tensor, highest: Tensor, lifts: Tensor) -> tuple[Tensor, Tensor]:
    total, log_shares = merged(norms[..., 1].double().log(), lifts / _LOG2E)
    return torch.stack([highest, total.exp().to(norms.dtype)], dim=-1), log_shares


def _cpp_top(highest: Tensor, c: Tensor) -> Tensor:
    """Return ``top_of`` of csrc/online_softmax.h: float32 values computed in float64, where the product is exact."""
    product = highest.double() * c
    top = product.float()
    up = torch.nextafter(top, torch.full_like(top, math.inf)).double()
    low = (top.abs() > 2.0**24) & (product - top.double() > 0.5)
    return torch.where(low, up, top.double())


def _float32(x: float | Tensor, like: Tensor) -> Tensor:
    return x.float() if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float32, device=like.device)
