"""The public functions that start from logits or from log-probs. ``linear.py`` has those that start from hidden states."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dapo_kernels import ops
from dapo_kernels.backends import backend_for
from dapo_kernels.batch import Layout, layout_of, live_tokens, loss_tokens, target_tokens, token_layout
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
        **overrides: fields of ``Objective`` for this call, e.g. ``clip_high=0.3``.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, what was expected and what came.
        IndexError: a live token's target is outside [0, V) (on CUDA: an asynchronous device assert).
    """
    chosen = resolve_objective("dapo_loss", objective, overrides)
    layout = layout_of("dapo_loss", "logits", logits, cu_seqlens)
    targets = target_tokens(layout, target_ids)
    tokens = loss_tokens(
        layout,
        chosen,
        old_logprobs=old_logprobs,
        advantages=advantages,
        mask=mask,
        ref_logprobs=ref_logprobs,
        importance_weights=importance_weights,
        denominator=denominator,
    )
    tau = layout.temperature(temperature)
    backend = backend_for("dapo_loss", logits.device, logits.dtype)
    wants_grad = torch.is_grad_enabled() and logits.requires_grad
    # A compiled graph has no use for the in-place form: the compiler plans buffers itself.
    in_place = inplace_backward and wants_grad and not torch.compiler.is_compiling()
    if in_place:
        scalars = ObjectiveScalars.of(chosen).pack()
        loss, logprobs, entropies, clip_hit, ref_kl = ops.LogitsLossInPlace.apply(
            logits, targets, *tau, *tokens, scalars, chosen.entropy_coef, entropy, backend
        )
        return loss_output(
            layout, tokens, loss, logprobs, ops.or_none(entropies), clip_hit, ops.or_none(ref_kl)
        )
    needs_entropy = entropy or chosen.entropy_coef != 0
    logprobs, _, entropies = ops.logits_stats(logits, targets, tokens.live, *tau, needs_entropy, backend)
    return loss_of_stats(layout, chosen, tokens, logprobs, entropies if needs_entropy else None, backend)


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
    if chosen.entropy_coef != 0 and entropy is None:
        raise ValueError(
            f"policy_loss: entropy_coef={chosen.entropy_coef:g} needs entropy, {layout.describe()}"
        )
    tokens = loss_tokens(
        layout,
        chosen,
        old_logprobs=old_logprobs,
        advantages=advantages,
        mask=mask,
        ref_logprobs=ref_logprobs,
        importance_weights=importance_weights,
        denominator=denominator,
    )
    entropies = None if entropy is None else layout.per_token("entropy", entropy)
    backend = backend_for("policy_loss", logprobs.device, layout.dtype)
    return loss_of_stats(layout, chosen, tokens, layout.per_token("logprobs", logprobs), entropies, backend)


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
    targets = target_tokens(layout, target_ids)
    backend = backend_for("token_logprobs", logits.device, logits.dtype)
    in_place = inplace_backward and not torch.compiler.is_compiling()
    stats = ops.LogitsStatsInPlace.apply if in_place else ops.logits_stats
    logprobs, _, entropies = stats(
        logits, targets, live_tokens(layout, None), *layout.temperature(temperature), entropy, backend
    )
    return token_stats(layout, logprobs, entropies if entropy else None)


def token_stats(layout: Layout, logprobs: Tensor, entropy: Tensor | None) -> TokenStats:
    return TokenStats(logprobs.view(layout.shape), None if entropy is None else entropy.view(layout.shape))


def loss_of_stats(
    layout: Layout,
    objective: Objective,
    tokens: Tokens,
    logprobs: Tensor,
    entropy: Tensor | None,
    backend: str,
) -> LossOutput:
    """The O(tokens) half: from differentiable per-token statistics [N] to the loss."""
    log_ratio = None if tokens.old_logprobs is None else logprobs - tokens.old_logprobs
    loss, _, _, clip_hit, ref_kl = ops.token_loss(
        logprobs,
        log_ratio,
        tokens.live,
        tokens.weights,
        tokens.advantages,
        tokens.ref_logprobs,
        tokens.importance_weights,
        ObjectiveScalars.of(objective).pack(),
        backend,
    )
    if objective.entropy_coef != 0:
        assert entropy is not None
        loss = loss - objective.entropy_coef * (tokens.weights * torch.where(tokens.live, entropy, 0.0)).sum()
    return loss_output(layout, tokens, loss, logprobs, entropy, clip_hit, ops.or_none(ref_kl))


def loss_output(
    layout: Layout,
    tokens: Tokens,
    loss: Tensor,
    logprobs: Tensor,
    entropy: Tensor | None,
    clip_hit: Tensor,
    ref_kl: Tensor | None,
) -> LossOutput:
    """Per-token results [N] in the caller's layout, dead tokens 0, with the metrics."""
    logprobs = torch.where(tokens.live, logprobs.detach(), 0.0)
    entropy = None if entropy is None else torch.where(tokens.live, entropy.detach(), 0.0)
    metrics = loss_metrics(tokens.live, logprobs, tokens.old_logprobs, clip_hit, ref_kl, entropy)
    shaped = token_stats(layout, logprobs, entropy)
    return LossOutput(loss, shaped.logprobs, shaped.entropy, metrics)
