"""Triton kernels over rows of logits. One program holds one row; the second sweep over it is served from the L2 cache.

    stats   reads V logits
    grad    reads V, writes V
    loss    reads V twice (once from L2), writes V over them

T tokens (rows), V vocabulary. With c = log2(e)/τ, exponents are in base 2: top = max x, sum = Σ 2^((x − top)·c). The
difference comes first: x·c alone would be rounded at the size of x, 1e-3 at 1e4.
With a softcap, x stands for cap·tanh(x/cap) there and gradients are multiplied by 1 − tanh².
Row r starts at (r // inner)·stride_outer + (r % inner)·stride_inner, int64: offsets pass 2³¹ at 14k × 152k.

The statistics sweep sees a block as [BLOCK_V / VEC, VEC], VEC logits being one 128-bit load of one thread: maximum and
sum stay within the thread until the row ends, so that the loop has no barrier, and rescaling to a new maximum costs one
exponential per VEC logits.

The loops end at V rounded down to a multiple of 16, which the compiler knows to be one: a mask is then the same for
all 16 bytes of an access, and accesses have 128 bits wherever strides are multiples of 16. HAS_REST says that V mod 16
logits are left; they take one thread each.

Compiled once per dtype, set of options and alignment of the logits: what changes from batch to batch (counts, the
alignment of per-token tensors) is named in ``_PER_CALL`` and not specialized on, strides are int64 whatever their
value. Nothing is tuned at run time: these kernels write over their input.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dapo_kernels.triton.elementwise import expm1
from dapo_kernels.triton.objective import token_objective

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
_PER_TOKEN = [
    "Targets", "Live", "Temperatures", "Norm", "Entropy", "DLogprobs", "DEntropy", "Weights", "Advantages",
    "OldLogprobs", "RefLogprobs", "ImportanceWeights", "Losses", "Logprobs", "LogRatio", "ClipHit", "RefKl", "Idle",
    "DLogprob", "DLogRatio",
]  # fmt: skip
_PER_CALL = {
    "do_not_specialize": ["inner", "out_inner", "N"],
    "do_not_specialize_on_alignment": _PER_TOKEN,
}


@triton.jit
def _row_offset(row, inner, stride_outer, stride_inner):
    return row // inner * stride_outer + row % inner * stride_inner


@triton.jit
def _temperature(Temperatures, temperature, row):
    return temperature if Temperatures is None else tl.load(Temperatures + row)


@triton.jit
def _tanh_parts(x, cap):
    """tanh(x/cap) and its derivative 1 − tanh². With q = e^(−2|u|): (1−q)/(1+q) and 4q/(1+q)²; a polynomial (relative
    error 3e-9) where 1 − q would cancel.
    """
    u = x / cap
    squared = u * u
    q = tl.exp2(tl.abs(u) * (-2.0 * LOG2E))
    inverse = 1.0 / (1.0 + q)
    far = (1.0 - q) * inverse
    series = -0.33333298 + squared * (
        0.1333192409 + squared * (-0.05378382721 + squared * (0.02079596153 - squared * 0.005895146425))
    )
    tanh = tl.where(tl.abs(u) < 0.6, u + u * squared * series, tl.where(u < 0, -far, far))
    return tanh, 4.0 * q * inverse * inverse


@triton.jit
def _capped(x, softcap, HAS_SOFTCAP: tl.constexpr):
    """The logit and ∂logit/∂x."""
    slope = 1.0
    if HAS_SOFTCAP:
        tanh, slope = _tanh_parts(x, softcap)
        x = softcap * tanh
    return x, slope


@triton.jit
def _load_logits(X, offs_v, end, softcap, HAS_SOFTCAP: tl.constexpr):
    """−inf from ``end`` on."""
    mask_v = offs_v < end
    x = tl.load(X + offs_v, mask=mask_v, other=float("-inf")).to(tl.float32)
    x, _ = _capped(x, softcap, HAS_SOFTCAP)
    if HAS_SOFTCAP:
        x = tl.where(mask_v, x, float("-inf"))
    return x


@triton.jit
def _sweep_stats(
    X, V, c, softcap,
    BLOCK_V: tl.constexpr, VEC: tl.constexpr, HAS_REST: tl.constexpr,
    WITH_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """(top, sum, Σ 2^d·d) of one row, d = (x − top)·c. The maximum starts finite: −inf − −inf would be NaN."""
    top = tl.full((BLOCK_V // VEC,), -1.0e38, tl.float32)
    total = tl.zeros((BLOCK_V // VEC,), tl.float32)
    weighted = tl.zeros((BLOCK_V // VEC,), tl.float32)
    end = V // 16 * 16 if HAS_REST else V
    if HAS_REST:
        rest = end + tl.arange(0, BLOCK_V // VEC)
        x_rest = _load_logits(X, rest, V, softcap, HAS_SOFTCAP)
        top = tl.maximum(top, x_rest)
        total = tl.exp2((x_rest - top) * c)  # 1, or NaN; 0 at −inf and where there is no logit
    tile = tl.arange(0, BLOCK_V // VEC)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    for start in range(0, end, BLOCK_V):
        x = _load_logits(X, start + tile, end, softcap, HAS_SOFTCAP)
        new_top = tl.maximum(top, tl.max(x, 1))
        d = (x - new_top[:, None]) * c
        if WITH_ENTROPY:
            d = tl.maximum(d, -200.0, propagate_nan=tl.PropagateNan.ALL)
        e = tl.exp2(d)
        d_top = tl.maximum((top - new_top) * c, -200.0, propagate_nan=tl.PropagateNan.ALL)
        lift = tl.exp2(d_top)
        if WITH_ENTROPY:
            weighted = lift * (weighted + d_top * total) + tl.sum(e * d, 1)
        total = total * lift + tl.sum(e, 1)
        top = new_top
    row_top = tl.max(top, 0)
    d_top = tl.maximum((top - row_top) * c, -200.0, propagate_nan=tl.PropagateNan.ALL)
    lift = tl.exp2(d_top)
    weighted = lift * (weighted + d_top * total)
    return row_top, tl.sum(total * lift, 0), tl.sum(weighted, 0)


@triton.jit
def _logprob(x_target, tau, top, total):
    return (x_target - top) / tau - tl.log2(total) * LN2


@triton.jit
def _row_gradient(x_target, tau, top, total, w, v, entropy, HAS_ENTROPY: tl.constexpr):
    """One gradient row is 2^d·(a + b·d), d = (x − top)·c, but for the target's entry; the algebra is in
    ``csrc/cpu/rows.cpp``.
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


@triton.jit
def _store_grad(
    Out, X, offs_v, end, c, softcap, top, a, b, target, at_target,
    HAS_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    mask_v = offs_v < end
    x = tl.load(X + offs_v, mask=mask_v, other=float("-inf")).to(tl.float32)
    x, slope = _capped(x, softcap, HAS_SOFTCAP)
    d = tl.maximum((x - top) * c, -200.0, propagate_nan=tl.PropagateNan.ALL)
    p = tl.exp2(d)
    grad = p * (a + b * d) if HAS_ENTROPY else p * a
    if HAS_SOFTCAP:
        grad *= slope
    grad = tl.where(offs_v == target, at_target, grad)
    tl.store(Out + offs_v, grad.to(Out.dtype.element_ty), mask=mask_v)


@triton.jit
def _sweep_grad(
    Out, X, V, c, softcap, top, a, b, target, at_target,
    BLOCK_V: tl.constexpr, HAS_REST: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Backwards: what the statistics sweep read last is still in the cache, however many rows share it."""
    end = V // 16 * 16 if HAS_REST else V
    if HAS_REST:
        rest = end + tl.arange(0, 16)
        _store_grad(Out, X, rest, V, c, softcap, top, a, b, target, at_target, HAS_ENTROPY, HAS_SOFTCAP)
    steps = tl.cdiv(end, BLOCK_V)
    for step in range(steps):
        offs_v = (steps - 1 - step) * BLOCK_V + tl.arange(0, BLOCK_V)
        _store_grad(Out, X, offs_v, end, c, softcap, top, a, b, target, at_target, HAS_ENTROPY, HAS_SOFTCAP)


@triton.jit
def _sweep_zeros(Out, V, BLOCK_V: tl.constexpr, HAS_REST: tl.constexpr):
    end = V // 16 * 16 if HAS_REST else V
    for start in range(0, end, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        tl.store(Out + offs_v, tl.zeros((BLOCK_V,), Out.dtype.element_ty), mask=offs_v < end)
    if HAS_REST:
        rest = end + tl.arange(0, 16)
        tl.store(Out + rest, tl.zeros((16,), Out.dtype.element_ty), mask=rest < V)


@triton.jit(**_PER_CALL)
def row_stats_kernel(
    Logits, inner, stride_outer: tl.int64, stride_inner: tl.int64, V,
    Targets, Live, Temperatures, temperature, softcap,
    Logprobs, Norm, Entropy,
    HAS_SOFTCAP: tl.constexpr, BLOCK_V: tl.constexpr, VEC: tl.constexpr, HAS_REST: tl.constexpr,
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
    tau = _temperature(Temperatures, temperature, row)
    c = LOG2E / tau
    x_target, _ = _capped(tl.load(X + tl.load(Targets + row)).to(tl.float32), softcap, HAS_SOFTCAP)
    top, total, weighted = _sweep_stats(X, V, c, softcap, BLOCK_V, VEC, HAS_REST, Entropy is not None, HAS_SOFTCAP)
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
    HAS_SOFTCAP: tl.constexpr, BLOCK_V: tl.constexpr, VEC: tl.constexpr, HAS_REST: tl.constexpr,
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
        _sweep_zeros(To, V, BLOCK_V, HAS_REST)
        return
    X = Logits + _row_offset(row, inner, stride_outer, stride_inner)
    tau = _temperature(Temperatures, temperature, row)
    c = LOG2E / tau
    target = tl.load(Targets + row)
    top = tl.load(Norm + 2 * row)
    total = tl.load(Norm + 2 * row + 1)
    x_target, slope_target = _capped(tl.load(X + target).to(tl.float32), softcap, HAS_SOFTCAP)
    tl.debug_barrier()  # in place, no warp may write its gradient before all have read the target's logit
    a, b, at_target = _row_gradient(x_target, tau, top, total, w, v, entropy, DEntropy is not None)
    at_target *= slope_target
    _sweep_grad(
        To, X, V, c, softcap, top, a, b, target, at_target, BLOCK_V, HAS_REST, DEntropy is not None, HAS_SOFTCAP
    )  # fmt: skip


@triton.jit
def _optional(Values, row, default):
    return default if Values is None else tl.load(Values + row)


@triton.jit(**_PER_CALL)
def row_loss_kernel(
    Logits, inner, stride_outer: tl.int64, stride_inner: tl.int64, V,
    Targets, Live, Temperatures, temperature, softcap,
    Weights, Advantages, OldLogprobs, RefLogprobs, ImportanceWeights,
    Losses, Logprobs, Entropy, ClipHit, RefKl, Idle,
    SURROGATE: tl.constexpr, clip_low, clip_high, dual_clip, tau_positive, tau_negative,
    kl_coef, KL_ESTIMATOR: tl.constexpr, KL_THROUGH_RATIO: tl.constexpr,
    entropy_coef, HAS_ENTROPY_COEF: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, BLOCK_V: tl.constexpr, VEC: tl.constexpr, HAS_REST: tl.constexpr,
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
        _sweep_zeros(X, V, BLOCK_V, HAS_REST)
        return
    tau = _temperature(Temperatures, temperature, row)
    c = LOG2E / tau
    target = tl.load(Targets + row)
    x_target, slope_target = _capped(tl.load(X + target).to(tl.float32), softcap, HAS_SOFTCAP)
    top, total, weighted = _sweep_stats(X, V, c, softcap, BLOCK_V, VEC, HAS_REST, Entropy is not None, HAS_SOFTCAP)
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
        _sweep_zeros(X, V, BLOCK_V, HAS_REST)
        return
    a, b, at_target = _row_gradient(x_target, tau, top, total, w, v, entropy, HAS_ENTROPY_COEF)
    at_target *= slope_target
    _sweep_grad(X, X, V, c, softcap, top, a, b, target, at_target, BLOCK_V, HAS_REST, HAS_ENTROPY_COEF, HAS_SOFTCAP)


@triton.jit(**_PER_CALL)
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
