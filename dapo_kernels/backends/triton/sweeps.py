"""Sweeps of one program over one row of logits: its statistics, its gradient, zeros in its place.

V vocabulary. With c = log2(e)/τ, exponents are in base 2: top = max x, sum = Σ 2^((x − top)·c). The difference comes
first: x·c alone would be rounded at the size of x, 1e-3 at 1e4.
With a softcap, x stands for cap·tanh(x/cap) there and gradients are multiplied by 1 − tanh².

The sweeps see a block as [BLOCK_V / VEC, VEC], VEC logits being 16 bytes, one access of one thread: maximum and sum
stay within the thread until the row ends, so that the loop has no barrier, and rescaling to a new maximum costs one
exponential per VEC logits.

The loops end at a multiple of VEC, which the compiler knows to be one: a mask is then the same for all 16 bytes of an
access. HAS_REST says that V may be none; the logits that are left take one thread each.

ALIGNED says that all rows start on 16 bytes. Where they do not, as with an odd V and no padding, the statistics sweep
shifts VEC logits out of two aligned words: sums run over the same logits, and a row has the same bits, wherever it
starts. In the gradient sweep no logit depends on another: its blocks begin at the row's first 16-byte boundary, and the
logits before it go with the rest.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


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
def capped(x, softcap, HAS_SOFTCAP: tl.constexpr):
    """The logit and ∂logit/∂x."""
    slope = 1.0
    if HAS_SOFTCAP:
        tanh, slope = _tanh_parts(x, softcap)
        x = softcap * tanh
    return x, slope


@triton.jit
def _from_bit(low, high, bit):
    """64 of the 128 bits of (low, high), ``bit`` = 0 … 63 the first."""
    return (low >> bit) | ((high << 1) << (63 - bit))


@triton.jit
def _load_anywhere(X, offs_v, end, VEC: tl.constexpr):
    """[N, VEC] logits offs_v + (0 … VEC − 1) of a row that starts anywhere, zeros from ``end`` on.

    VEC of them lie in two 16-byte words, of two 64-bit halves each: (a, b) and (c, d). All four go to one thread, which
    shifts the logits together; splitting and joining move nothing between threads. The first word may begin before the
    row, the last end after it; none is read that holds no logit of the row.
    """
    address = X.to(tl.int64)
    skew = address & 15
    Words = tl.multiple_of((address - skew).to(tl.pointer_type(tl.uint64)), 16)
    halves = (offs_v // VEC * 2)[:, None] + tl.arange(0, 2)[None, :]
    a, b = tl.split(tl.load(Words + halves, mask=(offs_v < end)[:, None], other=0))
    c, d = tl.split(tl.load(Words + halves + 2, mask=(offs_v < tl.where(skew == 0, 0, end))[:, None], other=0))
    upper, bit = skew >= 8, ((skew & 7) * 8).to(tl.uint64)
    middle = tl.where(upper, c, b)
    x = tl.join(_from_bit(tl.where(upper, b, a), middle, bit), _from_bit(middle, tl.where(upper, d, c), bit))
    x = tl.join(x.to(tl.uint32), (x >> 32).to(tl.uint32))
    if VEC == 8:
        x = tl.join(x.to(tl.uint16), (x >> 16).to(tl.uint16))
    return tl.reshape(x, (offs_v.shape[0], VEC)).to(X.dtype.element_ty, bitcast=True)


@triton.jit
def _load_tile(X, offs_v, end, VEC: tl.constexpr, ALIGNED: tl.constexpr):
    """[N, VEC] logits offs_v + (0 … VEC − 1), −inf from ``end`` on; offs_v and ``end`` are multiples of VEC."""
    if ALIGNED:
        tile = offs_v[:, None] + tl.arange(0, VEC)[None, :]
        x = tl.load(X + tile, mask=tile < end, other=float("-inf")).to(tl.float32)
    else:
        x = _load_anywhere(X, offs_v, end, VEC).to(tl.float32)
        x = tl.where((offs_v < end)[:, None], x, float("-inf"))
    return x


@triton.jit
def _capped_inside(x, mask_v, softcap, HAS_SOFTCAP: tl.constexpr):
    """As the statistics take them: still −inf outside."""
    x, _ = capped(x, softcap, HAS_SOFTCAP)
    return tl.where(mask_v, x, float("-inf")) if HAS_SOFTCAP else x


@triton.jit
def sweep_stats(
    X, V, c, softcap,
    BLOCK_V: tl.constexpr, VEC: tl.constexpr, HAS_REST: tl.constexpr, ALIGNED: tl.constexpr,
    WITH_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """(top, sum, Σ 2^d·d) of one row, d = (x − top)·c. The maximum starts finite: −inf − −inf would be NaN."""
    top = tl.full((BLOCK_V // VEC,), -1.0e38, tl.float32)
    total = tl.zeros((BLOCK_V // VEC,), tl.float32)
    weighted = tl.zeros((BLOCK_V // VEC,), tl.float32)
    end = V // VEC * VEC if HAS_REST else V
    if HAS_REST:
        rest = end + tl.arange(0, BLOCK_V // VEC)
        x_rest = tl.load(X + rest, mask=rest < V, other=float("-inf")).to(tl.float32)
        x_rest = _capped_inside(x_rest, rest < V, softcap, HAS_SOFTCAP)
        top = tl.maximum(top, x_rest)
        total = tl.exp2((x_rest - top) * c)  # 1, or NaN; 0 at −inf and where there is no logit
    for start in range(0, end, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V // VEC) * VEC
        x = _load_tile(X, offs_v, end, VEC, ALIGNED)
        x = _capped_inside(x, (offs_v < end)[:, None], softcap, HAS_SOFTCAP)
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
def _edges(Out, V, VEC: tl.constexpr, ALIGNED: tl.constexpr):
    """(first, end, edge): ``end`` logits, from ``first`` on, fill 16-byte words of Out; ``edge`` lists the others,
    fewer than 2·VEC, and then numbers from V on.
    """
    first = 0
    if not ALIGNED:
        itemsize: tl.constexpr = 16 // VEC
        first = tl.minimum((-Out.to(tl.int64) & 15).to(tl.int32) // itemsize, V)
    end = (V - first) // VEC * VEC
    edge = tl.arange(0, 2 * VEC)
    return first, end, tl.where(edge < first, edge, edge + end)


@triton.jit
def _gradient(
    x, offs_v, c, softcap, top, a, b, target, at_target, HAS_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    x, slope = capped(x, softcap, HAS_SOFTCAP)
    d = tl.maximum((x - top) * c, -200.0, propagate_nan=tl.PropagateNan.ALL)
    p = tl.exp2(d)
    grad = p * (a + b * d) if HAS_ENTROPY else p * a
    if HAS_SOFTCAP:
        grad *= slope
    return tl.where(offs_v == target, at_target, grad)


@triton.jit
def sweep_grad(
    Out, X, V, c, softcap, top, a, b, target, at_target,
    BLOCK_V: tl.constexpr, VEC: tl.constexpr, HAS_REST: tl.constexpr, ALIGNED: tl.constexpr, IN_STEP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Backwards: what the statistics sweep read last is still in the cache, however many rows share it. IN_STEP: X and
    Out begin equally far from a 16-byte boundary.
    """
    end = V
    if HAS_REST or not ALIGNED:
        first, end, edge = _edges(Out, V, VEC, ALIGNED)
        x_edge = tl.load(X + edge, mask=edge < V, other=float("-inf")).to(tl.float32)
        at_edge = _gradient(x_edge, edge, c, softcap, top, a, b, target, at_target, HAS_ENTROPY, HAS_SOFTCAP)
        tl.store(Out + edge, at_edge.to(Out.dtype.element_ty), mask=edge < V)
        if not ALIGNED:
            Out = tl.multiple_of(Out + first, 16)
            X = tl.multiple_of(X + first, 16) if IN_STEP else X + first
            target -= first
    steps = tl.cdiv(end, BLOCK_V)
    for step in range(steps):
        offs_v = (steps - 1 - step) * BLOCK_V + tl.arange(0, BLOCK_V // VEC) * VEC
        x = _load_tile(X, offs_v, end, VEC, IN_STEP)
        tile = offs_v[:, None] + tl.arange(0, VEC)[None, :]
        grad = _gradient(x, tile, c, softcap, top, a, b, target, at_target, HAS_ENTROPY, HAS_SOFTCAP)
        tl.store(Out + tile, grad.to(Out.dtype.element_ty), mask=tile < end)


@triton.jit
def sweep_zeros(Out, V, BLOCK_V: tl.constexpr, VEC: tl.constexpr, HAS_REST: tl.constexpr, ALIGNED: tl.constexpr):
    end = V
    if HAS_REST or not ALIGNED:
        first, end, edge = _edges(Out, V, VEC, ALIGNED)
        tl.store(Out + edge, tl.zeros((2 * VEC,), Out.dtype.element_ty), mask=edge < V)
        if not ALIGNED:
            Out = tl.multiple_of(Out + first, 16)
    for start in range(0, end, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        tl.store(Out + offs_v, tl.zeros((BLOCK_V,), Out.dtype.element_ty), mask=offs_v < end)
