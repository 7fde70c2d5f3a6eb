"""The public functions that start from logits or from log-probs; those from hidden states are in ``linear.py``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dapo_kernels import inplace, ops, ratio, select
from dapo_kernels.backends import backend_for, backend_module
from dapo_kernels.batch import (
    Layout,
    LossCall,
    check_flag,
    check_rows_apart,
    layout_of,
    live_tokens,
    loss_call,
    target_tokens,
    token_layout,
    without_policy_term,
)
from dapo_kernels.metrics import loss_metrics
from dapo_kernels.objectives import Objective, resolve_objective
from dapo_kernels.surrogate import ObjectiveScalars
from dapo_kernels.tokens import Tokens


class LossOutput(NamedTuple):
    """``loss`` 0-d, carrying the gradient; ``logprobs`` and ``entropy`` detached, in the layout of ``target_ids``,
    0 on dead tokens (entropy ``None`` unless it was needed); ``metrics`` sums over live tokens, see ``summarize``."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    metrics: dict[str, Tensor]


class TokenStats(NamedTuple):
    """``logprobs`` of the targets and, when asked for, ``entropy`` of the distribution; both differentiable."""

    logprobs: Tensor
    entropy: Tensor | None


def dapo_loss(
    logits: Tensor,
    target_ids: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    objective: str | Objective = "dapo",
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    importance_weights: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    denominator: float | Tensor | None = None,
    inplace_backward: bool = False,
    entropy: bool = False,
    selection: Tensor | float | None = None,
    generator: torch.Generator | None = None,
    **overrides: Any,
) -> LossOutput:
    """The DAPO loss (or a relative) of a batch of responses, from their logits.

    With ℓ = log softmax(logits/τ)[target], ρ = exp(ℓ − ℓ_old), A the advantage and N the live tokens (DAPO, eq. 8)::

        loss = −1/N Σ_t min(ρ_t A_t, clip(ρ_t, 1 − clip_low, 1 + clip_high) A_t)

    Args:
        logits: [T, V] packed or [B, L, V] padded; float32, bfloat16 or float16 (float64 on the torch backend), any
            strides. ``logits[t]`` predicts ``target_ids[t]``: shift before the call.
        target_ids: [T] or [B, L], integers in [0, V).
        old_logprobs: same shape, log-probs under the policy that sampled; ``None`` means on-policy: ratio 1.
        advantages: per token, or per sequence [S] / [B].
        objective: a name in ``OBJECTIVES`` or an ``Objective``.
        mask: same shape as ``target_ids``, which tokens train. A masked token may hold anything, NaN included.
        cu_seqlens: int32 [S+1], where packed sequences begin and end.
        ref_logprobs: per token, under the reference policy; needed when ``kl_coef`` is not 0.
        importance_weights: per token or sequence; multiply the policy term only (rollout correction).
        temperature: positive number, or one per token.
        denominator: replaces the local count of tokens (or of sequences) in the mean; a number or a 0-d tensor,
            the count over all micro-batches and ranks.
        inplace_backward: let the gradient overwrite the logits' storage (already in this call, where the objective
            allows one pass). The logits must not be used afterwards.
        entropy: also return the entropy of every live token.
        selection: with ``top_entropy``, ``clip_cov`` or ``kl_cov``, which tokens were selected (bool, per token), made
            beforehand over the whole batch (``dapo_kernels.select``) so that micro-batches agree with it;
            ``top_entropy`` also takes the entropy threshold as a number.
        generator: for the random choice of ``clip_cov``.
        **overrides: fields of ``Objective`` for this call, e.g. ``clip_high=0.3``.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, what was expected and what came.
        IndexError: a live token's target is outside [0, V) (on CUDA: an asynchronous device assert).
    """
    chosen = resolve_objective("dapo_loss", objective, overrides)
    layout = layout_of("dapo_loss", "logits", logits, cu_seqlens)
    check_flag(layout, "entropy", entropy)
    check_flag(layout, "inplace_backward", inplace_backward)
    targets = target_tokens(layout, target_ids)
    call = loss_call(
        layout,
        chosen,
        old_logprobs=old_logprobs,
        advantages=advantages,
        mask=mask,
        ref_logprobs=ref_logprobs,
        importance_weights=importance_weights,
        denominator=denominator,
        selection=selection,
        generator=generator,
    )
    tau = layout.temperature(temperature)
    backend = backend_for("dapo_loss", logits.device, logits.dtype, logits.shape[-1])
    wants_grad = torch.is_grad_enabled() and logits.requires_grad
    # A compiled graph has no use for the in-place form: the compiler plans buffers itself.
    in_place = inplace_backward and wants_grad and not torch.compiler.is_compiling()
    if in_place:
        check_rows_apart(layout, logits)
    if in_place and call.objective.one_pass:
        tokens, unit = gradient_unit(logits.dtype, call.tokens)
        scalars = ObjectiveScalars.of(chosen)
        rest = (tokens, scalars, chosen.entropy_coef, entropy, backend_module(backend))
        loss, logprobs, entropies, clip_hit, ref_kl = inplace.LogitsLoss.apply(logits, targets, ops.tau_of(*tau), *rest)
        return loss_output(call, loss / unit, logprobs, entropies, clip_hit, ref_kl)
    stats = _logits_stats(logits, targets, call.tokens.live, tau, entropy or call.needs_entropy, in_place, backend)
    return loss_of_stats(call, *stats, backend)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    entropy: Tensor | None = None,
    objective: str | Objective = "dapo",
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    importance_weights: Tensor | None = None,
    denominator: float | Tensor | None = None,
    selection: Tensor | float | None = None,
    generator: torch.Generator | None = None,
    **overrides: Any,
) -> LossOutput:
    """``dapo_loss`` from log-probs that are already there: O(tokens).

    Args:
        logprobs: [T] packed or [B, L] padded, of the tokens under the policy being trained; differentiable.
        entropy: same shape, differentiable; needed when ``entropy_coef`` is not 0.

    The other arguments and the errors are those of ``dapo_loss``.
    """
    chosen = resolve_objective("policy_loss", objective, overrides)
    layout = token_layout("policy_loss", "logprobs", logprobs, cu_seqlens)
    call = loss_call(
        layout,
        chosen,
        old_logprobs=old_logprobs,
        advantages=advantages,
        mask=mask,
        ref_logprobs=ref_logprobs,
        importance_weights=importance_weights,
        denominator=denominator,
        selection=selection,
        generator=generator,
    )
    if call.needs_entropy and entropy is None:
        field = "entropy_coef" if chosen.entropy_coef != 0 else "top_entropy"
        raise ValueError(f"policy_loss: {field}={getattr(chosen, field):g} needs entropy, {layout.describe()}")
    entropies = None if entropy is None else layout.per_token("entropy", entropy)
    backend = backend_for("policy_loss", logprobs.device, layout.dtype)
    return loss_of_stats(call, layout.per_token("logprobs", logprobs), entropies, backend)


def token_logprobs(
    logits: Tensor,
    target_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    inplace_backward: bool = False,
) -> TokenStats:
    """Log-probs of the targets, log softmax(logits/τ)[target], and entropies of softmax(logits/τ).

    Args:
        logits: [T, V] or [B, L, V]; dtypes and strides as in ``dapo_loss``.
        target_ids: [T] or [B, L].
        temperature: positive number, or one per token.
        entropy: also return −Σ p log p over the vocabulary.
        inplace_backward: let the backward pass overwrite the logits with their gradient.

    Returns:
        float32 tensors in the layout of ``target_ids``, differentiable with respect to the logits.

    Raises:
        ValueError, TypeError, IndexError: as in ``dapo_loss``.
    """
    layout = layout_of("token_logprobs", "logits", logits)
    check_flag(layout, "entropy", entropy)
    check_flag(layout, "inplace_backward", inplace_backward)
    targets = target_tokens(layout, target_ids)
    backend = backend_for("token_logprobs", logits.device, logits.dtype, logits.shape[-1])
    in_place = inplace_backward and not torch.compiler.is_compiling()
    if in_place:
        check_rows_apart(layout, logits)
    tau, live = layout.temperature(temperature), live_tokens(layout, None)
    return token_stats(layout, *_logits_stats(logits, targets, live, tau, entropy, in_place, backend))


def _logits_stats(
    logits: Tensor,
    targets: Tensor,
    live: Tensor,
    tau: tuple[float, Tensor | None],
    want_entropy: bool,
    in_place: bool,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """Differentiable log-probs and entropies, flat [N]."""
    if in_place:
        rest = (want_entropy, backend_module(backend))
        return inplace.LogitsStats.apply(logits, targets, live, ops.tau_of(*tau), *rest)
    logprobs, _, entropies = ops.logits_stats(logits, targets, live, *tau, want_entropy, backend)
    return logprobs, entropies if want_entropy else None


def gradient_unit(dtype: torch.dtype, tokens: Tokens) -> tuple[Tokens, Tensor | float]:
    """Tokens at the scale at which a gradient formed together with its loss is held, and that scale.

    In float16 the entries of a token mean's gradient, p/N, would vanish below 6e-8, before a loss scaler's factor (the
    ``grad_output``) is known. A power of two that brings the heaviest token's weight up to 2⁻⁶ leaves room at both
    ends; dividing the loss by it again divides what reaches the backward pass. Other dtypes need none.
    """
    if dtype != torch.float16 or tokens.weights.numel() == 0:
        return tokens, 1.0
    heaviest = tokens.weights.amax()
    unit = torch.exp2(-6.0 - torch.floor(torch.log2(heaviest))).clamp(min=1.0)
    unit = torch.where(heaviest > 0, unit, 1.0)
    return tokens._replace(weights=tokens.weights * unit), unit


def token_stats(layout: Layout, logprobs: Tensor, entropy: Tensor | None) -> TokenStats:
    return TokenStats(logprobs.view(layout.shape), None if entropy is None else entropy.view(layout.shape))


def loss_of_stats(call: LossCall, logprobs: Tensor, entropy: Tensor | None, backend: str) -> LossOutput:
    """The O(tokens) half: from differentiable per-token statistics [N] to the loss."""
    objective, tokens = call.objective, call.tokens
    log_ratio = ratio.log_ratio(
        objective.ratio,
        logprobs,
        tokens.old_logprobs,
        tokens.live,
        call.sequence_ids,
        call.layout.n_sequences or 0,
    )
    if objective.top_entropy is not None:
        assert entropy is not None
        chosen = _high_entropy(call, entropy.detach())
        tokens = tokens._replace(weights=torch.where(chosen, tokens.weights, 0.0))
    if objective.clip_cov is not None:
        *_, clip_hit, _ = _token_loss(call, tokens, logprobs.detach(), _detached(log_ratio), backend)
        lots = (
            logprobs.detach(),
            tokens.advantages,
            tokens.live,
            clip_hit,
            objective.clip_cov,
            call.generator,
        )
        tokens = without_policy_term(tokens, select.clip_cov(*lots))
    loss, _, _, clip_hit, ref_kl = _token_loss(call, tokens, logprobs, log_ratio, backend)
    if objective.kl_cov is not None:
        loss = loss + _covariance_penalty(call, objective.kl_cov, logprobs)
    if objective.entropy_coef != 0:
        assert entropy is not None
        bonus = (tokens.weights * torch.where(tokens.live, entropy, 0.0)).sum()
        loss = loss - objective.entropy_coef * bonus
    seen = None if objective.ratio == "token" else _detached(log_ratio)
    return loss_output(call, loss, logprobs, entropy, clip_hit, ops.or_none(ref_kl), seen)


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def _token_loss(
    call: LossCall, tokens: Tokens, logprobs: Tensor, log_ratio: Tensor | None, backend: str
) -> tuple[Tensor, ...]:
    return ops.token_loss(
        logprobs,
        log_ratio,
        tokens.live,
        tokens.weights,
        tokens.advantages,
        tokens.ref_logprobs,
        tokens.importance_weights,
        ObjectiveScalars.of(call.objective).pack(),
        backend,
    )


def _high_entropy(call: LossCall, entropy: Tensor) -> Tensor:
    assert call.objective.top_entropy is not None
    if call.selection is not None:  # a threshold: a mask would have been settled before
        return entropy >= call.selection
    return select.top_entropy(entropy, call.tokens.live, call.objective.top_entropy)


def _covariance_penalty(call: LossCall, kl_cov: tuple[float, float], logprobs: Tensor) -> Tensor:
    """coef·|ℓ − ℓ_old| on the selected tokens (Cui et al. 2025, eq. 13)."""
    tokens, chosen = call.tokens, call.selection
    if not isinstance(chosen, Tensor):
        chosen = select.kl_cov(logprobs.detach(), tokens.advantages, tokens.live, kl_cov)
    old_logprobs = logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
    counts = chosen & tokens.live & (tokens.weights != 0)
    distance = torch.where(counts, logprobs - old_logprobs, 0.0).abs()
    return kl_cov[1] * (tokens.weights * distance).sum()


def loss_output(
    call: LossCall,
    loss: Tensor,
    logprobs: Tensor,
    entropy: Tensor | None,
    clip_hit: Tensor,
    ref_kl: Tensor | None,
    log_ratio: Tensor | None = None,
) -> LossOutput:
    """Per-token results [N] in the caller's layout, dead tokens 0, with the metrics."""
    live = call.tokens.live
    logprobs = torch.where(live, logprobs.detach(), 0.0)
    entropy = None if entropy is None else torch.where(live, entropy.detach(), 0.0)
    metrics = loss_metrics(live, logprobs, call.tokens.old_logprobs, log_ratio, clip_hit, ref_kl, entropy)
    shaped = token_stats(call.layout, logprobs, entropy)
    return LossOutput(loss, shaped.logprobs, shaped.entropy, metrics)
