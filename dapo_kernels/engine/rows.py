"""From logits: statistics of every row, or the whole loss, with their gradients.

N rows (tokens), V vocabulary. Logits are [N, V] or, padded, [B, L, V] with N = B·L, any strides. An operator names the
backend that runs it, so that a compiled graph keeps its choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dapo_kernels.backends import Backend, backend
from dapo_kernels.engine.operators import Kept, hand_out_once, operator, ordinary, scaled
from dapo_kernels.memory import large_tensor
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import Asked, RowsSlopes, RowStats, Slopes, TokenLoss, Tokens, accumulate_dtype


def _fake_stats(logits: Tensor, asked: Asked) -> RowStats:
    return RowStats.empty(asked, accumulate_dtype(logits.dtype))


# --- statistics, and a gradient of any two slopes per token -----------------------------------------------


@operator
def logits_stats(logits: Tensor, asked: Asked, served_by: str) -> RowStats:
    """Log-probs of the targets, normalizer, entropy; each [N], zeros on dead rows."""
    return backend(served_by).row_stats(logits, asked)


@logits_stats.fake
def _(logits: Tensor, asked: Asked, served_by: str) -> RowStats:
    return _fake_stats(logits, asked)


@operator
def logits_grad(logits: Tensor, asked: Asked, stats: RowStats, slopes: Slopes, served_by: str) -> Tensor:
    """∂loss/∂logits, contiguous, from ∂loss/∂ℓ and ∂loss/∂H."""
    large = large_tensor(logits.shape, logits.dtype, logits.device, "logits")
    out, zeroed = large or (torch.empty(logits.shape, dtype=logits.dtype, device=logits.device), False)
    backend(served_by).row_grad(out, logits, asked, stats, slopes, zeroed=zeroed)
    return out


@logits_grad.fake
def _(logits: Tensor, asked: Asked, stats: RowStats, slopes: Slopes, served_by: str) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


logits_grad.has_no_gradient()


def given_slopes(stats: RowStats, grads: RowStats, want_entropy: bool) -> Slopes:
    """What autograd hands to the statistics of rows, absent where nobody asked."""
    logprobs = torch.zeros_like(stats.logprobs) if grads.logprobs is None else grads.logprobs.contiguous()
    return Slopes(logprobs, grads.entropy.contiguous() if want_entropy and grads.entropy is not None else None)


@logits_stats.gradient(lambda stats, *inputs: (*inputs, stats), "logprobs", "entropy")
def _(ctx: Any, logits: Tensor, asked: Asked, served_by: str, stats: RowStats, grads: RowStats) -> dict[str, Tensor]:
    slopes = given_slopes(stats, grads, asked.want_entropy)
    return {"logits": logits_grad(logits, asked, stats, slopes, served_by)}


# --- the loss of objectives whose gradient at a token needs nothing but that token's row --------------------


@operator
def logits_loss(logits: Tensor, asked: Asked, tokens: Tokens, scalars: ObjectiveScalars, served_by: str) -> RowsSlopes:
    """The loss from one sweep over the logits; its gradient takes another, in the backward pass."""
    return backend(served_by).row_slopes(logits, asked, tokens, scalars)


@logits_loss.fake
def _(logits: Tensor, asked: Asked, tokens: Tokens, scalars: ObjectiveScalars, served_by: str) -> RowsSlopes:
    stats = _fake_stats(logits, asked)
    policy = TokenLoss.empty(stats.logprobs, scalars.kl_coef != 0)
    policy = policy._replace(loss=stats.logprobs.new_empty(()))
    return RowsSlopes.of(stats, policy, tokens.weights, scalars.entropy_coef)


def _keep_for_loss(out: RowsSlopes, logits: Tensor, asked: Asked, *inputs: Any) -> tuple[Any, ...]:
    return logits, asked, out.stats, out.slopes, inputs[-1]


@logits_loss.gradient(_keep_for_loss, "loss")
def _(
    ctx: Any, logits: Tensor, asked: Asked, stats: RowStats, slopes: Slopes, served_by: str, grads: RowsSlopes
) -> dict[str, Tensor]:
    slopes = Slopes(grads.loss * slopes.logprobs, None if slopes.entropy is None else grads.loss * slopes.entropy)
    return {"logits": logits_grad(logits, asked, stats, slopes, served_by)}


# --- the gradient over the logits, in eager mode only: a compiler plans buffers itself ----------------------

_REMEDY = "Call with inplace_backward=False to repeat it."


def may_work_in_place(logits: Tensor) -> bool:
    """Whether there is a gradient to be made, of an ordinary tensor in eager mode."""
    wants_grad = torch.is_grad_enabled() and logits.requires_grad
    return wants_grad and not torch.compiler.is_compiling() and ordinary((logits,))


class StatsInPlace(torch.autograd.Function):
    """``logits_stats`` whose backward pass writes ∂loss/∂logits over the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, asked: Asked, by: Backend) -> tuple[Tensor | None, ...]:
        stats = by.row_stats(logits, asked)
        Kept((logits, asked, stats, by)).store(ctx)
        ctx.mark_non_differentiable(stats.norm)
        ctx.set_materialize_grads(False)
        return tuple(stats)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        hand_out_once(ctx, "inplace_backward=True", _REMEDY)
        logits, asked, stats, by = Kept.load(ctx)
        logits = logits.detach()
        slopes = given_slopes(stats, RowStats(*grads), asked.want_entropy)  # type: ignore[arg-type]
        by.row_grad(logits, logits, asked, stats, slopes)
        torch.autograd.graph.increment_version(logits)
        return logits, None, None


def stats_of(logits: Tensor, asked: Asked, served_by: str, in_place: bool) -> RowStats:
    """``logits_stats``, whose gradient takes the logits' memory where that ``may_work_in_place``."""
    if in_place:
        return RowStats(*StatsInPlace.apply(logits, asked, backend(served_by)))
    return logits_stats(logits, asked, served_by)


class LossInPlace(torch.autograd.Function):
    """``RowsLoss``, one visit to every row. The logits hold their gradient from here on."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, asked: Asked, tokens: Tokens, scalars: ObjectiveScalars, by: Backend
    ) -> tuple[Tensor | None, ...]:
        out = by.row_loss_(logits, asked, tokens, scalars)
        # Whoever saved the logits for a backward pass of their own must be told that they are gone.
        torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(logits)
        ctx.mark_non_differentiable(*(x for x in out[1:] if x is not None))
        ctx.set_materialize_grads(False)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Any, ...]:
        hand_out_once(ctx, "inplace_backward=True", _REMEDY)
        (gradient,) = ctx.saved_tensors
        gradient = None if grad_output is None else scaled(gradient.detach(), grad_output)
        return gradient, None, None, None, None
