"""Row operations in eager torch, in any float dtype: the readable reference, and the "torch" backend.

N tokens (rows), V vocabulary. With z = x/τ (x a row of logits, τ its temperature), p = softmax(z), target y::

    ℓ = z_y − lse(z)         dℓ/dx_j = (1[j = y] − p_j) / τ
    H = lse(z) − Σ p_j z_j    dH/dx_j = −p_j (log p_j + H) / τ

Softmax arithmetic is in float32 (float64 for float64 logits). A dead row may hold anything: it is replaced before any
arithmetic. Its log-prob and entropy are 0 and its gradient is exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dapo_kernels.backends.divergence import row_divergence_ as row_divergence_
from dapo_kernels.backends.norms import merged
from dapo_kernels.objectives.surrogate import ObjectiveScalars, token_objective
from dapo_kernels.records import (
    RowRequest,
    RowsLoss,
    RowsSlopes,
    RowStats,
    Slopes,
    TokenLoss,
    Tokens,
    accumulate_dtype,
    on_host,
)

SOFTCAP_COPIES = True
gather_kept = None


def check_rows(request: RowRequest, vocab: int) -> None:
    """Raise an error for a live token whose target is outside [0, V) or not in its list, or whose temperature is 0,
    subnormal, negative or not finite: IndexError or ValueError on the CPU. On a GPU it is an asynchronous assert, which
    does not wait.
    """
    if request.partial:
        return
    bad_target = request.live & ((request.target_ids < 0) | (request.target_ids >= vocab))
    cold = torch.zeros_like(request.live)
    if (tau := request.temperatures) is not None:
        cold = request.live & ~((tau >= torch.finfo(tau.dtype).tiny) & (tau <= torch.finfo(tau.dtype).max))
    if not on_host(request.live):
        torch._assert_async(~(bad_target | cold).any())
    elif bool(bad_target.any()):
        raise_bad_target(request, int(bad_target.nonzero()[0]), vocab)
    elif bool(cold.any()):
        raise_bad_temperature(request, int(cold.nonzero()[0]))
    if request.listed is not None and request.kept_ids is not None and request.kept_rows is not None:
        _check_lists(request, vocab, request.listed, request.kept_ids, request.kept_rows)


def _check_lists(request: RowRequest, vocab: int, listed: Tensor, ids: Tensor, rows: Tensor) -> None:
    if not on_host(ids):
        offsets = request.kept_offsets
        assert offsets is not None
        torch._assert_async((offsets.diff() >= 0).all() & (offsets[0] == 0) & (offsets[-1] == len(ids)))
    of, here = request.kept_places()
    here = here & request.live.index_select(0, of)
    outside = here & ((ids < 0) | (ids >= vocab))
    hits = here & (ids == request.target_ids.index_select(0, of))
    missing = request.live & listed & (request.over_lists("max", hits.float()) < 1)
    if not on_host(ids):
        torch._assert_async(~(outside.any() | missing.any()))
    elif bool(outside.any()):
        at = int(outside.nonzero()[0])
        row, token = int(rows[at]), int(ids[at])
        raise IndexError(f"sampling_mask: token {row} is live and keeps the id {token}, outside [0, V) = [0, {vocab})")
    elif bool(missing.any()):
        row = int(missing.nonzero()[0])
        n, target = int((rows == row).sum()), int(request.target_ids[row])
        raise ValueError(f"sampling_mask: the ids of token {row} must include its target {target}, got {n} others")


def find_repeated(ids: Tensor, offsets: Tensor, live: Tensor) -> int | None:
    """Return the index of the first id that occurs twice in the list of a live row; None if there is none. Lists are
    ids[offsets[r] : offsets[r + 1]], int64.
    """
    rows = torch.repeat_interleave(offsets.diff())
    # Ids that need more than 31 bits are outside any vocabulary; another check reports them.
    at = (live.index_select(0, rows) & (ids >> 31 == 0)).nonzero().squeeze(1)
    keys, order = ((rows[at] << 32) + ids[at]).sort(stable=True)
    twice = (keys.diff() == 0).nonzero()
    return int(at[order[twice[0] + 1]]) if len(twice) else None


def unit_stride(logits: Tensor) -> Tensor:
    """Return ``logits`` with a last stride of 1, which row kernels require: a copy if necessary."""
    return logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()


def raise_bad_target(request: RowRequest, row: int, vocab: int) -> None:
    target = int(request.target_ids[row])
    hint = f": exclude padding with mask=target_ids != {target}, or give it a valid id" if target < 0 else ""
    raise IndexError(f"target_ids: token {row} is live and its id {target} is outside [0, V) = [0, {vocab}){hint}")


def raise_bad_temperature(request: RowRequest, row: int) -> None:
    assert request.temperatures is not None
    tau, limits = float(request.temperatures[row]), torch.finfo(request.temperatures.dtype)
    raise ValueError(
        f"temperature: token {row} is live and its temperature {tau:g} is not in [{limits.tiny:.3g}, {limits.max:.3g}]"
    )


def _capped(logits: Tensor, request: RowRequest) -> Tensor:
    """Return [N, V] in the dtype of the arithmetic, zeros in dead rows, after the softcap, before the temperature."""
    rows = logits.reshape(-1, logits.shape[-1])
    rows = torch.where(request.live[:, None], rows.to(accumulate_dtype(logits.dtype)), 0.0)
    return rows if request.softcap is None else request.softcap * torch.tanh(rows / request.softcap)


def _scaled(rows: Tensor, request: RowRequest) -> Tensor:
    if request.temperatures is None:
        return rows / request.temperature
    return rows / torch.where(request.live, request.temperatures, 1.0)[:, None]


def row_stats(logits: Tensor, request: RowRequest) -> RowStats:
    """Return log-probs of the targets [N], (max, log-sum-exp above it) [N, 2], entropy [N]. ``logits`` [..., V]."""
    check_rows(request, logits.shape[-1])
    live = request.live
    z = _scaled(_capped(logits, request), request)
    target_ids = torch.where(live, request.target_ids, 0).clamp(min=0)
    # Separate: at logits of 1e4, one rounded log-sum-exp would lose three digits of every probability.
    top = z.amax(dim=-1)
    # A part of a row may be all −∞. Its log-sum-exp is then −∞, not NaN.
    above = (z - torch.where(top == -torch.inf, 0.0, top)[:, None]).exp().sum(-1).log()
    logprobs = z.gather(-1, target_ids[:, None]).squeeze(-1) - top - above
    norm = torch.stack([top, above], dim=-1)
    logprobs, norm = torch.where(live, logprobs, 0.0), torch.where(live[:, None], norm, 0.0)
    if not request.want_entropy:
        return RowStats(logprobs, norm, None)
    log_p, p = _softmax(z, norm)
    entropy = -torch.where(p == 0, 0.0, p * log_p).sum(-1)
    return RowStats(logprobs, norm, torch.where(live, entropy, 0.0))


def _softmax(z: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    log_p = z - norm[:, :1] - norm[:, 1:]
    return log_p, log_p.exp()


def row_grad(
    out: Tensor, logits: Tensor, request: RowRequest, stats: RowStats, slopes: Slopes, zeroed: bool = False
) -> None:
    """Write ∂loss/∂logits into ``out`` ([..., V], may be ``logits`` itself) from ∂loss/∂ℓ and ∂loss/∂H, each [N]."""
    capped = _capped(logits, request)
    target_ids = torch.where(request.live, request.target_ids, 0).clamp(min=0)
    log_p, p = _softmax(_scaled(capped, request), stats.norm)
    grad = -p * slopes.logprobs[:, None]
    grad.scatter_add_(-1, target_ids[:, None], torch.where(request.target_ids < 0, 0.0, slopes.logprobs)[:, None])
    if slopes.entropy is not None:
        assert stats.entropy is not None
        grad -= slopes.entropy[:, None] * torch.where(p == 0, 0.0, p * (log_p + stats.entropy[:, None]))
    grad /= request.temperature if request.temperatures is None else request.temperatures[:, None]
    if request.softcap is not None:
        grad *= 1.0 - (capped / request.softcap).square()
    grad = torch.where((request.live & ~slopes.idle)[:, None], grad, 0.0)
    out.copy_(grad.view(out.shape))


def merge_norms(norms: Tensor, request: RowRequest) -> tuple[Tensor, Tensor]:
    """Return, for rows split into R parts, their norm [N, 2] and the log-probability of each part, float64 [R, N]."""
    tops, log_sums = norms.double().unbind(-1)
    top = tops.amax(0)
    above, log_shares = merged(log_sums, tops - top)
    return torch.stack([top, above], dim=-1).to(norms.dtype), log_shares


def token_loss(logprobs: Tensor, log_ratio: Tensor | None, tokens: Tokens, scalars: ObjectiveScalars) -> TokenLoss:
    """Return the policy and KL loss over all tokens. ``log_ratio`` [N], or ``None`` on-policy."""
    live = tokens.live

    def alive(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.where(live, x, 0.0)

    logprobs = torch.where(live, logprobs, 0.0)
    value, d_logprobs, d_log_ratio, hit, ref_kl = token_objective(
        logprobs,
        torch.zeros_like(logprobs) if log_ratio is None else alive(log_ratio),
        alive(tokens.advantages),
        alive(tokens.ref_logprobs),
        alive(tokens.importance_weights),
        **scalars.per_token,
    )

    def weigh(x: Tensor) -> Tensor:
        return torch.where(live & (tokens.weights != 0), tokens.weights * x, 0.0).to(logprobs.dtype)

    return TokenLoss(
        loss=weigh(value).sum(dtype=torch.float64).to(logprobs.dtype),
        d_logprobs=weigh(d_logprobs),
        d_log_ratio=weigh(d_log_ratio),
        clip_hit=torch.where(live, hit, 0).to(torch.int8),
        ref_kl=torch.where(live, ref_kl, 0.0) if scalars.kl_coef != 0 else None,
    )


def row_slopes(logits: Tensor, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars) -> RowsSlopes:
    """Return the whole loss of token-level objectives, with its slopes. Does not change the logits."""
    return slopes_of_stats(row_stats(logits, request), tokens, scalars, token_loss)


def slopes_of_stats(
    stats: RowStats, tokens: Tokens, scalars: ObjectiveScalars, token_loss: Callable[..., TokenLoss]
) -> RowsSlopes:
    log_ratio = None if tokens.old_logprobs is None else stats.logprobs - tokens.old_logprobs
    policy = token_loss(stats.logprobs, log_ratio, tokens, scalars)
    return RowsSlopes.of(stats, policy, tokens.weights, scalars.entropy_coef)


def row_loss_(logits: Tensor, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars) -> RowsLoss:
    """Return the whole loss of token-level objectives, and overwrite ``logits`` [..., V] with ∂loss/∂logits."""
    out = slopes_of_stats(row_stats(logits, request), tokens, scalars, token_loss)
    row_grad(logits, logits, request, out.stats, out.slopes)
    return RowsLoss(out.loss, out.logprobs, out.entropy, out.clip_hit, out.ref_kl, out.slopes.idle)


def weight_sum(result: Tensor) -> None:
    return None
