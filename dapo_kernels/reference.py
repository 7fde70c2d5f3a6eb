"""Row operations in eager torch, in any floating dtype, float64 included: the readable truth, and the "torch" backend.

T tokens (rows), V vocabulary. With z = x/τ (x a row of logits, τ its temperature), p = softmax(z), target y::

    ℓ = z_y − lse(z)         dℓ/dx_j = (1[j = y] − p_j) / τ
    H = lse(z) − Σ p_j z_j    dH/dx_j = −p_j (log p_j + H) / τ

Softmax arithmetic is float32 (float64 for float64 logits). A dead row may hold anything: it is replaced before any
arithmetic, its log-prob and entropy come out as 0 and its gradient as exact zeros.

A backend is a module with the four functions of this one: ``row_stats``, ``row_grad``, ``row_loss_``, ``token_loss``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dapo_kernels.surrogate import ObjectiveScalars, token_objective
from dapo_kernels.tokens import RowLoss, TokenLoss, Tokens, accumulate_dtype


def check_rows(target_ids: Tensor, live: Tensor, temperature: float | Tensor, vocab: int) -> None:
    """Refuse live tokens whose target is outside [0, V) or whose temperature is not positive.

    On the CPU an IndexError or ValueError, elsewhere an asynchronous assert: looking would wait for the device.
    """
    bad_target = live & ((target_ids < 0) | (target_ids >= vocab))
    cold = live & ~(temperature > 0) if isinstance(temperature, Tensor) else torch.zeros_like(live)
    if live.device.type != "cpu":
        torch._assert_async(~(bad_target | cold).any())
    elif bool(bad_target.any()):
        row = int(bad_target.nonzero()[0])
        raise_bad_target(row, int(target_ids[row]), vocab)
    elif bool(cold.any()):
        assert isinstance(temperature, Tensor)
        row = int(cold.nonzero()[0])
        raise_bad_temperature(row, float(temperature[row]))


def unit_stride(logits: Tensor) -> Tensor:
    """``logits`` with neighbours side by side in memory, as row kernels take them: a copy where they are not."""
    return logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()


def raise_bad_target(row: int, target: int, vocab: int) -> None:
    raise IndexError(f"target_ids: token {row} is live and its id {target} is outside [0, V) = [0, {vocab})")


def raise_bad_temperature(row: int, temperature: float) -> None:
    raise ValueError(f"temperature: token {row} is live and its temperature {temperature:g} is not positive")


def _scaled(logits: Tensor, live: Tensor, temperature: float | Tensor) -> Tensor:
    rows = logits.reshape(-1, logits.shape[-1])
    rows = torch.where(live[:, None], rows.to(accumulate_dtype(logits.dtype)), 0.0)
    if isinstance(temperature, Tensor):
        return rows / torch.where(live, temperature, 1.0)[:, None]
    return rows / temperature


def row_stats(
    logits: Tensor, target_ids: Tensor, live: Tensor, temperature: float | Tensor, want_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs of the targets [T], (max, log-sum-exp above it) [T, 2], entropy [T]. ``logits`` [..., V]."""
    check_rows(target_ids, live, temperature, logits.shape[-1])
    z = _scaled(logits, live, temperature)
    target_ids = torch.where(live, target_ids, 0)
    # Kept apart: one rounded log-sum-exp of a row at 1e4 would cost three digits of every probability.
    top = z.amax(dim=-1)
    above = (z - top[:, None]).exp().sum(-1).log()
    logprobs = z.gather(-1, target_ids[:, None]).squeeze(-1) - top - above
    norm = torch.stack([top, above], dim=-1)
    logprobs, norm = torch.where(live, logprobs, 0.0), torch.where(live[:, None], norm, 0.0)
    if not want_entropy:
        return logprobs, norm, None
    log_p, p = _softmax(z, norm)
    entropy = -torch.where(p == 0, 0.0, p * log_p).sum(-1)
    return logprobs, norm, torch.where(live, entropy, 0.0)


def _softmax(z: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    log_p = z - norm[:, :1] - norm[:, 1:]
    return log_p, log_p.exp()


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
) -> None:
    """Write ∂loss/∂logits into ``out`` ([..., V], may be ``logits`` itself) from ∂loss/∂ℓ and ∂loss/∂H, each [T]."""
    z = _scaled(logits, live, temperature)
    target_ids = torch.where(live, target_ids, 0)
    log_p, p = _softmax(z, norm)
    grad = -p * dlogprobs[:, None]
    grad.scatter_add_(-1, target_ids[:, None], dlogprobs[:, None])
    if dentropy is not None:
        assert entropy is not None
        grad -= dentropy[:, None] * torch.where(p == 0, 0.0, p * (log_p + entropy[:, None]))
    grad /= temperature[:, None] if isinstance(temperature, Tensor) else temperature
    idle = dlogprobs == 0 if dentropy is None else (dlogprobs == 0) & (dentropy == 0)
    grad = torch.where((live & ~idle)[:, None], grad, 0.0)
    out.copy_(grad.view(out.shape))


def token_loss(logprobs: Tensor, log_ratio: Tensor | None, tokens: Tokens, scalars: ObjectiveScalars) -> TokenLoss:
    """The surrogate and the KL term over all tokens. ``log_ratio`` [T], or ``None`` on-policy."""
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
        **scalars._asdict(),
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


def row_loss_(
    logits: Tensor,
    target_ids: Tensor,
    temperature: float | Tensor,
    tokens: Tokens,
    scalars: ObjectiveScalars,
    entropy_coef: float,
    want_entropy: bool,
) -> RowLoss:
    """The whole loss of token-level objectives; ∂loss/∂logits overwrites ``logits`` [..., V]."""
    needs_entropy = want_entropy or entropy_coef != 0
    logprobs, norm, entropy = row_stats(logits, target_ids, tokens.live, temperature, needs_entropy)
    log_ratio = None if tokens.old_logprobs is None else logprobs - tokens.old_logprobs
    policy = token_loss(logprobs, log_ratio, tokens, scalars)
    dlogprobs = policy.d_logprobs + policy.d_log_ratio
    loss, dentropy = policy.loss, None
    if entropy_coef != 0:
        assert entropy is not None
        dentropy = -entropy_coef * tokens.weights.to(logprobs.dtype)
        loss = loss + (dentropy * entropy).sum(dtype=torch.float64).to(logprobs.dtype)
    row_grad(logits, logits, target_ids, tokens.live, temperature, norm, entropy, dlogprobs, dentropy)
    idle = dlogprobs == 0 if dentropy is None else (dlogprobs == 0) & (dentropy == 0)
    return RowLoss(loss, logprobs, entropy, policy.clip_hit, policy.ref_kl, idle)
