"""The O(tokens) part: the loss from differentiable log-probs and entropies, [N].

It serves objectives that need a sequence or the batch before a token's gradient is known, user-defined losses, and
losses from existing log-probs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dapo_kernels.backends import backend
from dapo_kernels.call import PolicyCall, times_policy_term, without_policy_term
from dapo_kernels.engine.operators import operator
from dapo_kernels.engine.shards import from_first
from dapo_kernels.objectives import ratio, select
from dapo_kernels.objectives.own import user_loss
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import TokenLoss, Tokens


@operator
def token_loss(
    logprobs: Tensor, log_ratio: Tensor | None, tokens: Tokens, scalars: ObjectiveScalars, backend_name: str
) -> TokenLoss:
    """Return loss without entropy, ∂/∂logprobs, ∂/∂log_ratio, clip hits, reference KL. On-policy: no ``log_ratio``."""
    return backend(backend_name).token_loss(logprobs, log_ratio, tokens, scalars)


@token_loss.fake
def _(
    logprobs: Tensor, log_ratio: Tensor | None, tokens: Tokens, scalars: ObjectiveScalars, backend_name: str
) -> TokenLoss:
    return TokenLoss.empty(logprobs, scalars.kl_coef != 0)._replace(loss=logprobs.new_empty(()))


@operator
def token_grad(derivative: Tensor, grad_output: Tensor, logprobs: Tensor) -> Tensor:
    """Return grad_output · derivative [N]. The derivative depends on ``logprobs``: its own derivative is refused."""
    return grad_output * derivative


@token_grad.fake
def _(derivative: Tensor, grad_output: Tensor, logprobs: Tensor) -> Tensor:
    return torch.empty_like(derivative)


token_grad.has_no_gradient()


def _keep(out: TokenLoss, logprobs: Tensor, log_ratio: Tensor | None, *_: Any) -> tuple[Any, ...]:
    return out.d_logprobs, out.d_log_ratio, logprobs, log_ratio is not None


@token_loss.gradient(_keep, "loss")
def _(
    ctx: Any, d_logprobs: Tensor, d_log_ratio: Tensor, logprobs: Tensor, off_policy: bool, grads: TokenLoss
) -> dict[str, Tensor]:
    if not off_policy:
        return {"logprobs": token_grad(d_logprobs + d_log_ratio, grads.loss, logprobs)}
    slopes = {"logprobs": d_logprobs, "log_ratio": d_log_ratio}
    return {name: token_grad(slope, grads.loss, logprobs) for name, slope in slopes.items()}


def loss_of_stats(
    call: PolicyCall, logprobs: Tensor, entropy: Tensor | None, backend_name: str
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the loss, and per token clip hits, reference KL and the log-ratio if it is not the token's own."""
    objective, tokens = call.objective, call.tokens
    if objective.top_entropy is not None:
        assert entropy is not None
        chosen = _high_entropy(call, entropy.detach())
        tokens = tokens._replace(weights=torch.where(chosen, tokens.weights, 0.0))
    if objective.own is not None:
        return user_loss(objective.own, logprobs, entropy, tokens), None, None, None
    arguments = (tokens.old_logprobs, tokens.advantages, tokens.live, call.sequence_ids, call.layout.n_sequences or 0)
    log_ratio = ratio.log_ratio(objective, logprobs, *arguments)
    detached = None if log_ratio is None else log_ratio.detach()
    clipped = ratio.clipped_log_ratio(objective, logprobs.detach(), tokens.old_logprobs, detached)
    tokens = times_policy_term(tokens, ratio.sequence_weight(objective, logprobs.detach(), *arguments))
    clip_hit, scalars = None, call.scalars
    if objective.clip_cov is not None or objective.ratio == "sequence_clipped":
        clip_hit = select.clip_hits(objective, logprobs.detach(), clipped, tokens.advantages, tokens.live)
    if objective.clip_cov is not None:
        assert clip_hit is not None
        inputs = (logprobs.detach(), tokens.advantages, tokens.live, clip_hit, objective.clip_cov, call.generator)
        chosen = select.clip_cov(*inputs)
        tokens = without_policy_term(tokens, chosen if call.group is None else from_first(chosen, call.group))
    if objective.ratio == "sequence_clipped":  # its log-ratio is a mean of clipped ones: no second clip
        scalars = scalars._replace(clip_low=1.0, clip_high=math.inf)
    out = token_loss(logprobs, log_ratio, tokens, scalars, backend_name)
    loss = out.loss
    if objective.kl_cov is not None:
        loss = loss + _covariance_penalty(call, objective.kl_cov, logprobs)
    if objective.entropy_coef != 0:
        assert entropy is not None
        bonus = (tokens.weights * torch.where(tokens.live, entropy, 0.0)).sum()
        loss = loss - objective.entropy_coef * bonus
    hits = out.clip_hit if clip_hit is None else clip_hit
    return loss, hits, out.ref_kl, None if objective.ratio == "token" else detached


def _high_entropy(call: PolicyCall, entropy: Tensor) -> Tensor:
    assert call.objective.top_entropy is not None
    if call.selection is not None:  # a threshold: a mask was already applied
        # Not >=: a NaN is chosen, as by ``select.top_entropy``, so that it shows in the loss.
        return ~(entropy < call.selection)
    return select.top_entropy(entropy, call.tokens.live, call.objective.top_entropy)


def _covariance_penalty(call: PolicyCall, kl_cov: tuple[float, float], logprobs: Tensor) -> Tensor:
    """Return the mean of u·coef·|ℓ − ℓ_old| on the selected tokens (the code of Cui et al. 2025). u is the importance
    weight: as in verl, the penalty is part of the policy loss.
    """
    tokens, chosen = call.tokens, call.selection
    if not isinstance(chosen, Tensor):
        chosen = select.kl_cov(logprobs.detach(), tokens.advantages, tokens.live, kl_cov)
    old_logprobs = logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
    weights = tokens.weights if tokens.importance_weights is None else tokens.weights * tokens.importance_weights
    counts = chosen & tokens.live & (weights != 0)
    distance = torch.where(counts, logprobs - old_logprobs, 0.0).abs()
    return kl_cov[1] * torch.where(counts, weights * distance, 0.0).sum()
