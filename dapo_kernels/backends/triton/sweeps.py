"""Sweeps of one program over one row of logits: compute its statistics, write its gradient, write zeros.

V vocabulary. With c = log2(e)/τ, exponents are in base 2: top = max x, sum = Σ 2^((x − top)·c). The subtraction comes
first, because x·c alone would have a rounding error of 1e-3 at x = 1e4.
With a softcap, x stands for cap·tanh(x/cap), and gradients are multiplied by 1 − tanh².

A block is [BLOCK_V / VEC, VEC]; VEC logits are 16 bytes, one access of one thread. Maximum and sum stay within the
thread until the row ends. So the loop has no barrier, and rescaling to a new maximum costs one exponential per VEC
logits.

Loops end at a multiple of VEC, which the compiler knows: a mask is then equal for all 16 bytes of an access. HAS_REST:
V may not be a multiple; each remaining logit takes one thread. If rows do not start at 16-byte boundaries, VEC is 1 and
the same loops access one logit at a time. Sums then run in another order, and their last bits may differ.

Nothing reads a row again after its gradient is written, so these loads and stores are ``evict_first``: the L2 cache
keeps the rows whose gradient is still to come.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tanh_parts(x, cap):
    """Return tanh(x/cap) and its derivative 1 − tanh². With q = e^(−2|u|) they are (1−q)/(1+q) and 4q/(1+q)². A
    polynomial (relative error 3e-9) replaces tanh if 1 − q would cancel.
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
def capped(x, softcap):
    """Return the logit after the softcap, and ∂logit/∂x."""
    slope = 1.0
    if softcap is not None:
        tanh, slope = _tanh_parts(x, softcap)
        x = softcap * tanh
    return x, slope


@triton.jit
def _load_capped(X, offs_v, end, softcap):
    """Return logits for the statistics, −inf from ``end`` on."""
    x = tl.load(X + offs_v, mask=offs_v < end, other=float("-inf")).to(tl.float32)
    if softcap is not None:
        x, _ = capped(x, softcap)
        x = tl.where(offs_v < end, x, float("-inf"))
    return x


@triton.jit
def sweep_stats(
    X, V, c, softcap, BLOCK_V: tl.constexpr, VEC: tl.constexpr, HAS_REST: tl.constexpr, WITH_ENTROPY: tl.constexpr,
):  # fmt: skip
    """Return top, sum and Σ 2^d·d of one row, d = (x − top)·c. The maximum starts at the smallest finite number: −inf −
    −inf would be NaN.
    """
    top = tl.full((BLOCK_V // VEC,), -3.4028234663852886e38, tl.float32)
    total = tl.zeros((BLOCK_V // VEC,), tl.float32)
    weighted = tl.zeros((BLOCK_V // VEC,), tl.float32)
    end = V // VEC * VEC if HAS_REST else V
    if HAS_REST:
        x_rest = _load_capped(X, end + tl.arange(0, BLOCK_V // VEC), V, softcap)
        top = tl.maximum(top, x_rest)
        total = tl.exp2((x_rest - top) * c)  # 1, or NaN; 0 at −inf and beyond the row
    for start in range(0, end, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V // VEC) * VEC
        x = _load_capped(X, offs_v[:, None] + tl.arange(0, VEC)[None, :], end, softcap)
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
def _write_gradient(Out, X, offs_v, end, c, softcap, top, a, b, HAS_ENTROPY: tl.constexpr):
    x = tl.load(X + offs_v, mask=offs_v < end, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
    x, slope = capped(x, softcap)
    d = (x - top) * c
    if HAS_ENTROPY:
        d = tl.maximum(d, -200.0, propagate_nan=tl.PropagateNan.ALL)
        grad = tl.exp2(d) * (a + b * d)
    else:
        grad = tl.exp2(d) * a
    if softcap is not None:
        grad *= slope
    tl.store(Out + offs_v, grad.to(Out.dtype.element_ty), mask=offs_v < end, eviction_policy="evict_first")


@triton.jit
def sweep_grad(
    Out, X, V, c, softcap, top, a, b, target, at_target,
    BLOCK_V: tl.constexpr, VEC: tl.constexpr, HAS_REST: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """Write the gradient backwards: what the statistics sweep read last is still in the cache. The target's entry comes
    last. A comparison of every column with the target would be a third of the loop's instructions.
    """
    end = V // VEC * VEC if HAS_REST else V
    if HAS_REST:
        _write_gradient(Out, X, end + tl.arange(0, VEC), V, c, softcap, top, a, b, HAS_ENTROPY)
    steps = tl.cdiv(end, BLOCK_V)
    for step in range(steps):
        offs_v = (steps - 1 - step) * BLOCK_V + tl.arange(0, BLOCK_V // VEC) * VEC
        tile = offs_v[:, None] + tl.arange(0, VEC)[None, :]
        _write_gradient(Out, X, tile, end, c, softcap, top, a, b, HAS_ENTROPY)
    tl.debug_barrier()
    tl.store(Out + target, at_target.to(Out.dtype.element_ty), mask=target >= 0)


@triton.jit
def sweep_zeros(Out, V, BLOCK_V: tl.constexpr, VEC: tl.constexpr, HAS_REST: tl.constexpr):
    end = V // VEC * VEC if HAS_REST else V
    if HAS_REST:
        rest = end + tl.arange(0, VEC)
        tl.store(Out + rest, tl.zeros((VEC,), Out.dtype.element_ty), mask=rest < V, eviction_policy="evict_first")
    for start in range(0, end, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        zeros = tl.zeros((BLOCK_V,), Out.dtype.element_ty)
        tl.store(Out + offs_v, zeros, mask=offs_v < end, eviction_policy="evict_first")
