"""Triton kernels over rows of logits. One program processes one row at a time; its second sweep reads the L2 cache.

    stats   reads V logits
    grad    reads V, writes V
    loss    reads V twice (once from L2), writes V over them

T tokens (rows), V vocabulary; c, top and sum as in ``sweeps.py``.
Row r starts at (r // inner)·stride_outer + (r % inner)·stride_inner, int64: offsets pass 2³¹ at 14k × 152k.

A kernel is compiled once per dtype, set of options and alignment of the logits. It is not specialized on what changes
from batch to batch (counts, the alignment of per-token tensors: ``_PER_CALL``), and strides are always int64. Nothing
is tuned at run time, because these kernels overwrite their input.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dapo_kernels.backends.triton.elementwise import expm1
from dapo_kernels.backends.triton.objective import token_objective
from dapo_kernels.backends.triton.sweeps import LOG2E, capped, sweep_grad, sweep_stats, sweep_zeros

LN2 = tl.constexpr(0.6931471805599453)
_PER_TOKEN = [
    "Targets", "Live", "Temperatures", "Norm", "Entropy", "DLogprobs", "DEntropy", "Weights", "Advantages",
    "OldLogprobs", "RefLogprobs", "ImportanceWeights", "Losses", "Logprobs", "LogRatio", "ClipHit", "RefKl", "Idle",
    "DLogRatio",
]  # fmt: skip
_PER_CALL = {
    "do_not_specialize": ["inner", "out_inner", "N"],
    "do_not_specialize_on_alignment": _PER_TOKEN,
}


@triton.jit
def _row(Rows, row, inner, stride_outer, stride_inner, VEC: tl.constexpr):
    """Return the start of a row. The hint replaces specializing on strides of 8 bfloat16."""
    X = Rows + (row // inner * stride_outer + row % inner * stride_inner)
    return tl.multiple_of(X, 16) if VEC > 1 else X


@triton.jit
def _temperature(Temperatures, temperature, row):
    return temperature if Temperatures is None else tl.load(Temperatures + row)


@triton.jit
def _target_logit(X, target, softcap):
    """Return the target's logit and its derivative; 0 if the target is negative: in another part of the row."""
    return capped(tl.load(X + target, mask=target >= 0, other=0.0).to(tl.float32), softcap)


@triton.jit
def _logprob(x_target, tau, top, total):
    return (x_target - top) / tau - tl.log2(total) * LN2


@triton.jit
def _row_gradient(x_target, tau, top, total, w, v, entropy, HAS_ENTROPY: tl.constexpr):
    """Return a, b and the target's entry of a gradient row; the other entries are 2^d·(a + b·d), d = (x − top)·c. The
    derivation is at ``gradient_of`` in ``csrc/row_math.h``.
    """
    log_total = tl.log2(total) * LN2
    log_p = (x_target - top) / tau - log_total
    a = -w
    b = 0.0 * w
    at_target = -w * expm1(log_p)
    if HAS_ENTROPY:
        a = a - v * (entropy - log_total)
        b = -v * LN2
        at_target -= v * tl.exp(log_p) * (tl.maximum(log_p, -200.0) + entropy)
    return a / (total * tau), b / (total * tau), at_target / tau


@triton.jit(**_PER_CALL)
def row_stats_kernel(
    Logits, inner, stride_outer: tl.int64, stride_inner: tl.int64, V,
    Targets, Live, Temperatures, temperature, softcap,
    Logprobs, Norm, Entropy,
    BLOCK_V: tl.constexpr, VEC: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(Live + row) == 0:
        tl.store(Logprobs + row, 0.0)
        tl.store(Norm + 2 * row, 0.0)
        tl.store(Norm + 2 * row + 1, 0.0)
        if Entropy is not None:
            tl.store(Entropy + row, 0.0)
        return
    X = _row(Logits, row, inner, stride_outer, stride_inner, VEC)
    tau = _temperature(Temperatures, temperature, row)
    c = LOG2E / tau
    x_target, _ = _target_logit(X, tl.load(Targets + row), softcap)
    top, total, weighted = sweep_stats(X, V, c, softcap, BLOCK_V, VEC, HAS_REST, Entropy is not None)
    tl.store(Logprobs + row, _logprob(x_target, tau, top, total))
    tl.store(Norm + 2 * row, top)
    tl.store(Norm + 2 * row + 1, total)
    if Entropy is not None:
        tl.store(Entropy + row, (tl.log2(total) - weighted / total) * LN2)


@triton.jit(**_PER_CALL)
def row_grad_kernel(
    Out, out_inner, out_stride_outer: tl.int64, out_stride_inner: tl.int64,
    Logits, inner, stride_outer: tl.int64, stride_inner: tl.int64, V,
    Targets, Live, Temperatures, temperature, softcap,
    Norm, Entropy, DLogprobs, DEntropy,
    BLOCK_V: tl.constexpr, VEC: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    To = _row(Out, row, out_inner, out_stride_outer, out_stride_inner, VEC)
    w = tl.load(DLogprobs + row)
    v = 0.0 * w
    entropy = 0.0 * w
    if DEntropy is not None:
        v = tl.load(DEntropy + row)
        entropy = tl.load(Entropy + row)
    if (tl.load(Live + row) == 0) | ((w == 0.0) & (v == 0.0)):
        sweep_zeros(To, V, BLOCK_V, VEC, HAS_REST)
        return
    X = _row(Logits, row, inner, stride_outer, stride_inner, VEC)
    tau = _temperature(Temperatures, temperature, row)
    c = LOG2E / tau
    target = tl.load(Targets + row)
    top = tl.load(Norm + 2 * row)
    total = tl.load(Norm + 2 * row + 1)
    x_target, slope_target = _target_logit(X, target, softcap)
    tl.debug_barrier()  # in place, no warp may write its gradient before all have read the target's logit
    a, b, at_target = _row_gradient(x_target, tau, top, total, w, v, entropy, DEntropy is not None)
    at_target *= slope_target
    sweep_grad(
        To, X, V, c, softcap, top, a, b, target, at_target,
        BLOCK_V, VEC, HAS_REST, DEntropy is not None,
    )  # fmt: skip


@triton.jit(**_PER_CALL)
def row_loss_kernel(
    Logits, inner, stride_outer: tl.int64, stride_inner: tl.int64, V,
    Targets, Live, Temperatures, temperature, softcap,
    Weights, Advantages, OldLogprobs, RefLogprobs, ImportanceWeights,
    Losses, Logprobs, Entropy, ClipHit, RefKl, Idle,
    SURROGATE: tl.constexpr, clip_low, clip_high, dual_clip, tau_positive, tau_negative,
    kl_coef, KL_ESTIMATOR: tl.constexpr, KL_THROUGH_RATIO: tl.constexpr,
    entropy_coef,
    BLOCK_V: tl.constexpr, VEC: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    X = _row(Logits, row, inner, stride_outer, stride_inner, VEC)
    if tl.load(Live + row) == 0:
        tl.store(Losses + row, 0.0)
        tl.store(Logprobs + row, 0.0)
        tl.store(ClipHit + row, 0)
        tl.store(Idle + row, 1)
        if Entropy is not None:
            tl.store(Entropy + row, 0.0)
        if RefKl is not None:
            tl.store(RefKl + row, 0.0)
        sweep_zeros(X, V, BLOCK_V, VEC, HAS_REST)
        return
    tau = _temperature(Temperatures, temperature, row)
    c = LOG2E / tau
    target = tl.load(Targets + row)
    top, total, weighted = sweep_stats(X, V, c, softcap, BLOCK_V, VEC, HAS_REST, Entropy is not None)
    # After the sweep: held during it, it takes a register.
    x_target, slope_target = capped(tl.load(X + target).to(tl.float32), softcap)
    logprob = _logprob(x_target, tau, top, total)
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
    if entropy_coef is not None:
        value -= entropy_coef * entropy
        v = -entropy_coef * weight
    if RefKl is not None:
        tl.store(RefKl + row, kl)
    idle = (w == 0.0) & (v == 0.0)
    tl.debug_barrier()  # no warp may write its gradient before all have read the target's logit
    tl.store(Losses + row, tl.where(weight == 0.0, 0.0, weight * value))
    tl.store(Logprobs + row, logprob)
    tl.store(ClipHit + row, hit.to(tl.int8))
    tl.store(Idle + row, idle.to(tl.int8))
    if idle:
        sweep_zeros(X, V, BLOCK_V, VEC, HAS_REST)
    else:
        a, b, at_target = _row_gradient(x_target, tau, top, total, w, v, entropy, entropy_coef is not None)
        at_target *= slope_target
        sweep_grad(
            X, X, V, c, softcap, top, a, b, target, at_target,
            BLOCK_V, VEC, HAS_REST, entropy_coef is not None,
        )  # fmt: skip


@triton.jit(**_PER_CALL)
def scale_kernel(
    Logits, inner, stride_outer: tl.int64, stride_inner: tl.int64, V, Factor, N,
    BLOCK_V: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Multiply rows in place by one factor. Nothing is read if it is 1, the usual one in a backward pass."""
    factor = tl.load(Factor).to(tl.float32)
    if factor != 1.0:
        row = tl.program_id(0).to(tl.int64)
        while row < N:
            X = _row(Logits, row, inner, stride_outer, stride_inner, VEC)
            for start in range(0, V, BLOCK_V):
                offs = start + tl.arange(0, BLOCK_V)
                x = tl.load(X + offs, mask=offs < V, other=0.0)
                tl.store(X + offs, (x.to(tl.float32) * factor).to(x.dtype), mask=offs < V)
            row += tl.num_programs(0)


@triton.jit(**_PER_CALL)
def token_loss_kernel(
    N, Logprobs, LogRatio, Live, Weights, Advantages, RefLogprobs, ImportanceWeights,
    Losses, DLogprobs, DLogRatio, ClipHit, RefKl,
    SURROGATE: tl.constexpr, clip_low, clip_high, dual_clip, tau_positive, tau_negative,
    kl_coef, KL_ESTIMATOR: tl.constexpr, KL_THROUGH_RATIO: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute the elementwise objective: everything per token, nothing over the vocabulary."""
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
