"""Triton kernels over rows of logits. One program holds one row; the second sweep over it is served from the L2 cache.

    stats   reads V logits
    grad    reads V, writes V
    loss    reads V twice (once from L2), writes V over them

T tokens (rows), V vocabulary. With c = log2(e)/τ, exponents are in base 2: z = x·c, top = max z, sum = Σ 2^(z − top).
Row r starts at (r // inner)·stride_outer + (r % inner)·stride_inner, int64: offsets pass 2³¹ at 14k × 152k.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dapo_kernels.triton.elementwise import expm1
from dapo_kernels.triton.objective import token_objective

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _row_offset(row, inner, stride_outer, stride_inner):
    return row // inner * stride_outer + row % inner * stride_inner


@triton.jit
def _temperature(Temperatures, temperature, row):
    return temperature if Temperatures is None else tl.load(Temperatures + row)


@triton.jit
def _sweep_stats(X, V, c, BLOCK_V: tl.constexpr, WITH_ENTROPY: tl.constexpr):
    """(top, sum, Σ 2^(z−top)·(z−top)) of one row. The maximum starts finite: −inf − −inf would be NaN."""
    top = tl.full((), -1.0e38, tl.float32)
    total = tl.zeros((BLOCK_V,), tl.float32)
    weighted = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, V, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        x = tl.load(X + offs_v, mask=offs_v < V, other=float("-inf")).to(tl.float32)
        z = x * c
        new_top = tl.maximum(top, tl.max(z, 0))
        lift = tl.exp2(top - new_top)
        d = tl.maximum(z - new_top, -200.0, propagate_nan=tl.PropagateNan.ALL)
        e = tl.exp2(d)
        if WITH_ENTROPY:
            weighted = lift * (weighted + (top - new_top) * total) + e * d
        total = total * lift + e
        top = new_top
    return top, tl.sum(total, 0), tl.sum(weighted, 0)


@triton.jit
def _row_gradient(x_target, c, tau, top, total, w, v, entropy, HAS_ENTROPY: tl.constexpr):
    """One gradient row is p·(a + b·(z − top)), but for the target's entry; the algebra is in ``csrc/cpu/rows.cpp``."""
    log_total = tl.log2(total) * LN2
    log_p = (x_target * c - top) * LN2 - log_total
    a = -w
    b = 0.0 * w
    at_target = -w * expm1(log_p)
    if HAS_ENTROPY:
        a = a - v * (entropy - log_total)
        b = -v * LN2
        at_target -= v * tl.exp(log_p) * (tl.maximum(log_p, -200.0) + entropy)
    return a / (total * tau), b / (total * tau), at_target / tau


@triton.jit
def _sweep_grad(Out, X, V, c, top, a, b, target, at_target, BLOCK_V: tl.constexpr, HAS_ENTROPY: tl.constexpr):
    for start in range(0, V, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        mask_v = offs_v < V
        x = tl.load(X + offs_v, mask=mask_v, other=float("-inf")).to(tl.float32)
        d = tl.maximum(x * c - top, -200.0, propagate_nan=tl.PropagateNan.ALL)
        p = tl.exp2(d)
        grad = p * (a + b * d) if HAS_ENTROPY else p * a
        grad = tl.where(offs_v == target, at_target, grad)
        tl.store(Out + offs_v, grad.to(Out.dtype.element_ty), mask=mask_v)


@triton.jit
def _sweep_zeros(Out, V, BLOCK_V: tl.constexpr):
    for start in range(0, V, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        tl.store(Out + offs_v, tl.zeros((BLOCK_V,), Out.dtype.element_ty), mask=offs_v < V)


@triton.jit
def row_stats_kernel(
    Logits, inner, stride_outer, stride_inner, V,
    Targets, Live, Temperatures, temperature,
    Logprobs, Norm, Entropy,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(Live + row) == 0:
        tl.store(Logprobs + row, 0.0)
        tl.store(Norm + 2 * row, 0.0)
        tl.store(Norm + 2 * row + 1, 0.0)
        if Entropy is not None:
            tl.store(Entropy + row, 0.0)
        return
    X = Logits + _row_offset(row, inner, stride_outer, stride_inner)
    c = 1.0 / _temperature(Temperatures, temperature, row) * LOG2E
    x_target = tl.load(X + tl.load(Targets + row)).to(tl.float32)
    top, total, weighted = _sweep_stats(X, V, c, BLOCK_V, Entropy is not None)
    tl.store(Logprobs + row, (x_target * c - top - tl.log2(total)) * LN2)
    tl.store(Norm + 2 * row, top)
    tl.store(Norm + 2 * row + 1, total)
    if Entropy is not None:
        tl.store(Entropy + row, (tl.log2(total) - weighted / total) * LN2)


@triton.jit
def row_grad_kernel(
    Out, out_inner, out_stride_outer, out_stride_inner,
    Logits, inner, stride_outer, stride_inner, V,
    Targets, Live, Temperatures, temperature,
    Norm, Entropy, DLogprobs, DEntropy,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    To = Out + _row_offset(row, out_inner, out_stride_outer, out_stride_inner)
    w = tl.load(DLogprobs + row)
    v = 0.0 * w
    entropy = 0.0 * w
    if DEntropy is not None:
        v = tl.load(DEntropy + row)
        entropy = tl.load(Entropy + row)
    if (tl.load(Live + row) == 0) | ((w == 0.0) & (v == 0.0)):
        _sweep_zeros(To, V, BLOCK_V)
        return
    X = Logits + _row_offset(row, inner, stride_outer, stride_inner)
    tau = _temperature(Temperatures, temperature, row)
    c = 1.0 / tau * LOG2E
    target = tl.load(Targets + row)
    top = tl.load(Norm + 2 * row)
    total = tl.load(Norm + 2 * row + 1)
    x_target = tl.load(X + target).to(tl.float32)
    a, b, at_target = _row_gradient(x_target, c, tau, top, total, w, v, entropy, DEntropy is not None)
    _sweep_grad(To, X, V, c, top, a, b, target, at_target, BLOCK_V, DEntropy is not None)


@triton.jit
def _optional(Values, row, default):
    return default if Values is None else tl.load(Values + row)


@triton.jit
def row_loss_kernel(
    Logits, inner, stride_outer, stride_inner, V,
    Targets, Live, Temperatures, temperature,
    Weights, Advantages, OldLogprobs, RefLogprobs, ImportanceWeights,
    Losses, Logprobs, Entropy, ClipHit, RefKl, Idle,
    SURROGATE: tl.constexpr, clip_low, clip_high, dual_clip, tau_positive, tau_negative,
    kl_coef, KL_ESTIMATOR: tl.constexpr, KL_THROUGH_RATIO: tl.constexpr,
    entropy_coef, HAS_ENTROPY_COEF: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    X = Logits + _row_offset(row, inner, stride_outer, stride_inner)
    if tl.load(Live + row) == 0:
        tl.store(Losses + row, 0.0)
        tl.store(Logprobs + row, 0.0)
        tl.store(ClipHit + row, 0)
        tl.store(Idle + row, 1)
        if Entropy is not None:
            tl.store(Entropy + row, 0.0)
        if RefKl is not None:
            tl.store(RefKl + row, 0.0)
        _sweep_zeros(X, V, BLOCK_V)
        return
    tau = _temperature(Temperatures, temperature, row)
    c = 1.0 / tau * LOG2E
    target = tl.load(Targets + row)
    x_target = tl.load(X + target).to(tl.float32)
    top, total, weighted = _sweep_stats(X, V, c, BLOCK_V, Entropy is not None)
    logprob = (x_target * c - top - tl.log2(total)) * LN2
    weight = tl.load(Weights + row)
    log_ratio = logprob - tl.load(OldLogprobs + row) if OldLogprobs is not None else 0.0 * weight
    ref_logprob = None if RefLogprobs is None else tl.load(RefLogprobs + row)
    importance_weight = None if ImportanceWeights is None else tl.load(ImportanceWeights + row)
    value, d_logprob, d_ratio, hit, kl = token_objective(
        logprob, log_ratio, tl.load(Advantages + row), ref_logprob, importance_weight,
        SURROGATE, clip_low, clip_high, dual_clip, tau_positive, tau_negative,
        kl_coef, KL_ESTIMATOR, KL_THROUGH_RATIO,
    )  # fmt: skip
    w = tl.where(weight == 0.0, 0.0, weight * (d_logprob + d_ratio))
    v = 0.0 * weight
    entropy = 0.0 * weight
    if Entropy is not None:
        entropy = (tl.log2(total) - weighted / total) * LN2
        tl.store(Entropy + row, entropy)
    if HAS_ENTROPY_COEF:
        value -= entropy_coef * entropy
        v = -entropy_coef * weight
    if RefKl is not None:
        tl.store(RefKl + row, kl)
    idle = (w == 0.0) & (v == 0.0)
    tl.store(Losses + row, tl.where(weight == 0.0, 0.0, weight * value))
    tl.store(Logprobs + row, logprob)
    tl.store(ClipHit + row, hit.to(tl.int8))
    tl.store(Idle + row, idle.to(tl.int8))
    if idle:
        _sweep_zeros(X, V, BLOCK_V)
        return
    a, b, at_target = _row_gradient(x_target, c, tau, top, total, w, v, entropy, HAS_ENTROPY_COEF)
    _sweep_grad(X, X, V, c, top, a, b, target, at_target, BLOCK_V, HAS_ENTROPY_COEF)


@triton.jit
def token_loss_kernel(
    N, Logprobs, LogRatio, Live, Weights, Advantages, RefLogprobs, ImportanceWeights,
    Losses, DLogprobs, DLogRatio, ClipHit, RefKl,
    SURROGATE: tl.constexpr, clip_low, clip_high, dual_clip, tau_positive, tau_negative,
    kl_coef, KL_ESTIMATOR: tl.constexpr, KL_THROUGH_RATIO: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The elementwise objective: everything per token, nothing over the vocabulary."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = offs < N
    live = inside & (tl.load(Live + offs, mask=inside, other=0) != 0)
    logprob = tl.load(Logprobs + offs, mask=live, other=0.0)
    log_ratio = tl.zeros_like(logprob) if LogRatio is None else tl.load(LogRatio + offs, mask=live, other=0.0)
    ref_logprob = None if RefLogprobs is None else tl.load(RefLogprobs + offs, mask=live, other=0.0)
    importance = None if ImportanceWeights is None else tl.load(ImportanceWeights + offs, mask=live, other=0.0)
    value, d_logprob, d_ratio, hit, kl = token_objective(
        logprob, log_ratio, tl.load(Advantages + offs, mask=live, other=0.0), ref_logprob, importance,
        SURROGATE, clip_low, clip_high, dual_clip, tau_positive, tau_negative,
        kl_coef, KL_ESTIMATOR, KL_THROUGH_RATIO,
    )  # fmt: skip
    weight = tl.load(Weights + offs, mask=live, other=0.0)
    counts = live & (weight != 0.0)
    tl.store(Losses + offs, tl.where(counts, weight * value, 0.0), mask=inside)
    tl.store(DLogprobs + offs, tl.where(counts, weight * d_logprob, 0.0), mask=inside)
    tl.store(DLogRatio + offs, tl.where(counts, weight * d_ratio, 0.0), mask=inside)
    tl.store(ClipHit + offs, tl.where(live, hit.to(tl.int8), 0), mask=inside)
    if RefKl is not None:
        tl.store(RefKl + offs, tl.where(live, kl, 0.0), mask=inside)
