"""The Triton kernel of the divergence between rows of logits and a reference's; formulas in ``backends/divergence.py``.

    reads 2·V logits three times (from L2 after the first, if it holds both rows), writes V over the policy's

All exponents are in base 2, as in ``sweeps.py``: log p = (x − top)·c − log2(sum).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dapo_kernels.backends.triton.kernels import _PER_CALL, LN2, _row, _temperature
from dapo_kernels.backends.triton.sweeps import LOG2E, capped, sweep_stats, sweep_zeros

FORWARD, REVERSE, MIXTURE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_LOG_OF_NOTHING = tl.constexpr(-1.0e38)
_IMPOSSIBLE = tl.constexpr(1.0e20)


def kind_of(beta: float) -> int:
    """Return FORWARD for β = 0, REVERSE for β = 1, MIXTURE between them."""
    return {0.0: 0, 1.0: 1}.get(beta, 2)


@triton.jit
def _load_log(X, offs_v, end, c, softcap, top, log_total, EVICT: tl.constexpr):  # Triton 3.6 knows no default strings
    """Return log-probabilities, with −1e38 for log 0 and from ``end`` on, and ∂logit/∂x."""
    x = tl.load(X + offs_v, mask=offs_v < end, other=float("-inf"), eviction_policy=EVICT).to(tl.float32)
    x, slope = capped(x, softcap)
    log_p = (x - top) * c - log_total
    log_p = tl.maximum(log_p, _LOG_OF_NOTHING, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(offs_v < end, log_p, _LOG_OF_NOTHING), slope


@triton.jit
def _log_mixture(p, q, beta):
    return tl.log2(tl.maximum((1.0 - beta) * p + beta * q, 1.1754944e-38, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _terms(log_p, log_q, beta, KIND: tl.constexpr):
    """Return per token the terms of the divergence and of KL(p‖m), and the log-ratio that must not be infinite."""
    if KIND == FORWARD:
        ratio = log_q - log_p
        term = tl.exp2(log_q) * ratio
        of_p = term
    elif KIND == REVERSE:
        ratio = log_p - log_q
        term = tl.exp2(log_p) * ratio
        of_p = term
    else:
        p, q = tl.exp2(log_p), tl.exp2(log_q)
        log_m = _log_mixture(p, q, beta)
        of_p = p * (log_p - log_m)
        term = beta * (q * (log_q - log_m)) + (1.0 - beta) * of_p
        ratio = tl.zeros_like(term)
    return term, of_p, ratio


@triton.jit
def _slopes(log_p, log_q, beta, of_p, KIND: tl.constexpr):
    """Return ∂D/∂(x/τ) of each token. ``of_p``: KL(p‖m) of the row in base 2, or D without a mixture."""
    p = tl.exp2(log_p)
    if KIND == FORWARD:
        slope = p - tl.exp2(log_q)
    elif KIND == REVERSE:
        slope = p * (log_p - log_q - of_p) * LN2
    else:
        slope = (1.0 - beta) * p * (log_p - _log_mixture(p, tl.exp2(log_q), beta) - of_p) * LN2
    return slope


@triton.jit
def _sweep_terms(
    X, Y, V, c, softcap, ref_softcap, top, log_total, ref_top, ref_log_total, beta,
    KIND: tl.constexpr, BLOCK_V: tl.constexpr, VEC: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    """Return D, KL(p‖m) and the largest log-ratio of one row. The sweep starts with what was read last."""
    end = V // VEC * VEC if HAS_REST else V
    total = tl.zeros((BLOCK_V // VEC,), tl.float32)
    total_of_p = tl.zeros((BLOCK_V // VEC,), tl.float32)
    largest = tl.zeros((BLOCK_V // VEC,), tl.float32)
    if HAS_REST:
        rest = end + tl.arange(0, BLOCK_V // VEC)
        log_p_rest, _slope_p = _load_log(X, rest, V, c, softcap, top, log_total, "")
        log_q_rest, _slope_q = _load_log(Y, rest, V, c, ref_softcap, ref_top, ref_log_total, "")
        total, total_of_p, largest = _terms(log_p_rest, log_q_rest, beta, KIND)
    steps = tl.cdiv(end, BLOCK_V)
    for step in range(steps):
        offs_v = (steps - 1 - step) * BLOCK_V + tl.arange(0, BLOCK_V // VEC) * VEC
        tile = offs_v[:, None] + tl.arange(0, VEC)[None, :]
        log_p, _ = _load_log(X, tile, end, c, softcap, top, log_total, "")
        log_q, _ = _load_log(Y, tile, end, c, ref_softcap, ref_top, ref_log_total, "")
        term, of_p, ratio = _terms(log_p, log_q, beta, KIND)
        total += tl.sum(term, 1)
        if KIND == MIXTURE:
            total_of_p += tl.sum(of_p, 1)
        else:
            largest = tl.maximum(largest, tl.max(ratio, 1))
    divergence = tl.sum(total, 0)
    of_p = tl.sum(total_of_p, 0) if KIND == MIXTURE else divergence
    return divergence, of_p, tl.max(largest, 0)


@triton.jit
def _write_slopes(
    X, Y, offs_v, end, c, softcap, ref_softcap, top, log_total, ref_top, ref_log_total, beta, of_p, scale,
    KIND: tl.constexpr,
):  # fmt: skip
    log_p, slope = _load_log(X, offs_v, end, c, softcap, top, log_total, "evict_first")
    log_q, _ = _load_log(Y, offs_v, end, c, ref_softcap, ref_top, ref_log_total, "evict_first")
    grad = _slopes(log_p, log_q, beta, of_p, KIND) * scale
    if softcap is not None:
        grad *= slope
    tl.store(X + offs_v, grad.to(X.dtype.element_ty), mask=offs_v < end, eviction_policy="evict_first")


@triton.jit
def _sweep_slopes(
    X, Y, V, c, softcap, ref_softcap, top, log_total, ref_top, ref_log_total, beta, of_p, scale,
    KIND: tl.constexpr, BLOCK_V: tl.constexpr, VEC: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    """Write the gradient over the policy's logits. The sweep before it ended with the beginning of the row."""
    end = V // VEC * VEC if HAS_REST else V
    if HAS_REST:
        rest = end + tl.arange(0, VEC)
        _write_slopes(
            X, Y, rest, V, c, softcap, ref_softcap, top, log_total, ref_top, ref_log_total, beta, of_p, scale, KIND
        )
    for start in range(0, end, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V // VEC) * VEC
        tile = offs_v[:, None] + tl.arange(0, VEC)[None, :]
        _write_slopes(
            X, Y, tile, end, c, softcap, ref_softcap, top, log_total, ref_top, ref_log_total, beta, of_p, scale, KIND
        )


@triton.jit(**_PER_CALL)
def row_divergence_kernel(
    Logits, stride: tl.int64, RefLogits, ref_stride: tl.int64, V,
    Live, Temperatures, temperature, softcap, ref_softcap, Weights, Divergence, beta, N, Next, KIND: tl.constexpr,
    BLOCK_V: tl.constexpr, VEC: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    """Process rows until none is left. As many programs run as ``rows_in_flight`` says. Each starts with the row of its
    own number and continues with rows that no program has: ``Next`` counts these from the number of programs on. So a
    program that starts late finds only its own row. The next row is taken before the gradient is written, because an
    atomic addition takes about as long as a read.
    """
    row = tl.program_id(0).to(tl.int64)
    while tl.condition(row < N, disable_licm=True):
        X = _row(Logits, row, 1, stride, 0, VEC)
        if tl.load(Live + row) == 0:
            tl.store(Divergence + row, 0.0)
            next_row = tl.atomic_add(Next, 1, sem="relaxed")
            sweep_zeros(X, V, BLOCK_V, VEC, HAS_REST)
        else:
            Y = _row(RefLogits, row, 1, ref_stride, 0, VEC)
            tau = _temperature(Temperatures, temperature, row)
            c = LOG2E / tau
            # Blocks of a sweep over one row are twice as long: as many bytes in flight as over two rows.
            top, total, _ = sweep_stats(X, V, c, softcap, 2 * BLOCK_V, VEC, HAS_REST, False)
            ref_top, ref_total, _ = sweep_stats(Y, V, c, ref_softcap, 2 * BLOCK_V, VEC, HAS_REST, False)
            log_total, ref_log_total = tl.log2(total), tl.log2(ref_total)
            divergence, of_p, largest = _sweep_terms(
                X, Y, V, c, softcap, ref_softcap, top, log_total, ref_top, ref_log_total, beta,
                KIND, BLOCK_V, VEC, HAS_REST,
            )  # fmt: skip
            divergence = tl.where(largest > _IMPOSSIBLE, float("inf"), divergence)
            of_p = divergence if KIND == REVERSE else of_p
            tl.store(Divergence + row, divergence * LN2)
            scale = tl.load(Weights + row) / tau
            tl.debug_barrier()  # no warp may write its gradient before all have read the logits it overwrites
            next_row = tl.atomic_add(Next, 1, sem="relaxed")
            _sweep_slopes(
                X, Y, V, c, softcap, ref_softcap, top, log_total, ref_top, ref_log_total, beta, of_p, scale,
                KIND, BLOCK_V, VEC, HAS_REST,
            )  # fmt: skip
        row = next_row.to(tl.int64)
