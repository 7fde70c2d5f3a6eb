"""The divergence between rows of logits and a reference's rows, in eager torch on any device; value and gradient.

N tokens (rows), V vocabulary. With p = softmax(x/τ) of the policy, q that of the reference and β in [0, 1], the
generalized Jensen-Shannon divergence (Agarwal et al. 2023, arXiv 2306.13649, eq. 1), as TRL's GKD and Liger count β::

    m = (1 − β)·p + β·q
    D = β·KL(q‖m) + (1 − β)·KL(p‖m)              dD/dx_j = (1 − β)·p_j·(log(p_j/m_j) − KL(p‖m)) / τ
    β = 0: D = KL(q‖p), forward                  dD/dx_j = (p_j − q_j) / τ
    β = 1: D = KL(p‖q), reverse                  dD/dx_j = p_j·(log(p_j/q_j) − D) / τ

β = 0 and β = 1 are not the limits of the general formula, which goes to 0 there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dapo_kernels.records import RowRequest, accumulate_dtype, on_host

# Bytes of a block of rows in the dtype of the arithmetic. About fifteen passes go over each block, on a CPU within a
# core's cache: blocks of 1 MiB took 1.4 to 2 times as long at V=49152. A GPU needs larger launches: six tensors fit.
_BLOCK_BYTES = 2**18
_DEVICE_BLOCK_BYTES = 2**27
# Replaces log 0, so that 0 · log 0 is 0. A log-ratio above _IMPOSSIBLE can only come from it: the token is possible in
# one distribution and impossible in the other.
_LOG_OF_NOTHING = -1e38
_IMPOSSIBLE = 1e20


class Distance(NamedTuple):
    """The divergence (``beta``), and the softcaps of the two models' logits."""

    beta: float
    softcap: float | None
    ref_softcap: float | None


def row_divergence_(
    logits: Tensor, ref_logits: Tensor, request: RowRequest, weights: Tensor, distance: Distance
) -> Tensor:
    """Return the divergence of every row, [N]. Replace the logits [N, V] by ∂(Σ weights · divergence)/∂logits."""
    dtype = accumulate_dtype(logits.dtype)
    divergence = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
    block_bytes = _BLOCK_BYTES if on_host(logits) else _DEVICE_BLOCK_BYTES
    size = max(1, block_bytes // (dtype.itemsize * max(logits.shape[1], 1)))
    for start in range(0, logits.shape[0], size):
        rows = slice(start, start + size)
        tau = request.temperature if request.temperatures is None else request.temperatures[rows, None]
        x = _capped(logits[rows].to(dtype), distance.softcap)
        ref = _capped(ref_logits[rows].to(dtype), distance.ref_softcap)
        found, grad = _divergence(_log_softmax(x, tau), _log_softmax(ref, tau), distance.beta)
        grad *= weights[rows, None] / tau
        if distance.softcap is not None:
            grad *= 1.0 - (x / distance.softcap).square()
        if not on_host(logits):  # there, rows may be dead and hold anything
            found = torch.where(request.live[rows], found, 0.0)
            grad = torch.where(request.live[rows, None], grad, 0.0)
        divergence[rows], logits[rows] = found, grad
    return divergence


def _capped(x: Tensor, softcap: float | None) -> Tensor:
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def _log_softmax(x: Tensor, tau: float | Tensor) -> Tensor:
    scaled = x if isinstance(tau, float) and tau == 1.0 else x / tau
    return torch.log_softmax(scaled, -1).clamp_(min=_LOG_OF_NOTHING)


def _divergence(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return D [n] and dD/d(x/τ) [n, V] of rows. Overwrites both arguments. If D is infinite, the gradient with β = 1
    is not finite.
    """
    p = log_p.exp()
    if beta == 0:
        q = log_q.exp()
        divergence = _mean_log_ratio(q, log_q.sub_(log_p))
        gradient = p.sub_(q)
    elif beta == 1:
        excess = log_p.sub_(log_q)
        divergence = _mean_log_ratio(p, excess)
        gradient = excess.sub_(divergence[:, None]).mul_(p)
    else:
        q = log_q.exp()
        log_m = torch.lerp(p, q, beta).clamp_(min=torch.finfo(p.dtype).tiny).log_()
        excess = log_p.sub_(log_m)
        kl_p, kl_q = (p * excess).sum(-1), (q * log_q.sub_(log_m)).sum(-1)
        divergence = beta * kl_q + (1 - beta) * kl_p
        gradient = excess.sub_(kl_p[:, None]).mul_(p).mul_(1 - beta)
    return divergence, gradient


def _mean_log_ratio(p: Tensor, log_ratio: Tensor) -> Tensor:
    """Return Σ p · log_ratio of every row [n]; +∞ if a ratio is infinite, even if its p was rounded to 0."""
    divergence = (p * log_ratio).sum(-1)
    return torch.where(log_ratio.amax(-1) > _IMPOSSIBLE, torch.inf, divergence)
