"""Compute statistics of every row of logits, or the whole loss, with their gradients.

N rows (tokens), V vocabulary. Logits are [N, V] or, padded, [B, L, V] with N = B·L, any strides. An argument of the
operator names its backend, so that a compiled graph keeps the choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dapo_kernels.engine.operators import (
    SavedForBackward,
    check_first_backward,
    check_not_batched,
    operator,
    ordinary,
    scaled,
)
from dapo_kernels.engine.shards import Widths, backend_of
from dapo_kernels.memory import large_tensor
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import (
    RowRequest,
    RowsSlopes,
    RowStats,
    Server,
    Slopes,
    TokenLoss,
    Tokens,
    accumulate_dtype,
)


def _sampled(server: Server, logits: Tensor, zero_rest: bool = False) -> Tensor:
    """Return the columns that can be sampled. The columns behind them are padding."""
    n = Widths.of(server, logits.shape[-1]).here
    if n == logits.shape[-1]:
        return logits
    if zero_rest:
        logits[..., n:] = 0.0
    return logits[..., :n]


def _fake_stats(logits: Tensor, request: RowRequest) -> RowStats:
    return RowStats.empty(request, accumulate_dtype(logits.dtype))


# --- statistics, and a gradient of any two slopes per token -----------------------------------------------


@operator
def logits_stats(logits: Tensor, request: RowRequest, server: Server) -> RowStats:
    """Return log-probs of the targets, normalizer, entropy; each [N], zero on dead rows."""
    return backend_of(server, request).row_stats(_sampled(server, logits), request)


@logits_stats.fake
def _(logits: Tensor, request: RowRequest, server: Server) -> RowStats:
    return _fake_stats(logits, request)


@operator
def logits_grad(logits: Tensor, request: RowRequest, stats: RowStats, slopes: Slopes, server: Server) -> Tensor:
    """Return ∂loss/∂logits, contiguous, from ∂loss/∂ℓ and ∂loss/∂H."""
    large = large_tensor(logits.shape, logits.dtype, logits.device, "logits")
    out, zeroed = large or (torch.empty(logits.shape, dtype=logits.dtype, device=logits.device), False)
    _row_grad(out, logits, request, stats, slopes, server, zeroed)
    return out


def _row_grad(
    out: Tensor,
    logits: Tensor,
    request: RowRequest,
    stats: RowStats,
    slopes: Slopes,
    server: Server,
    zeroed: bool = False,
) -> None:
    to = _sampled(server, out, zero_rest=True)
    backend_of(server, request).row_grad(to, _sampled(server, logits), request, stats, slopes, zeroed)


@logits_grad.fake
def _(logits: Tensor, request: RowRequest, stats: RowStats, slopes: Slopes, server: Server) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


logits_grad.has_no_gradient()


def without_logprobs(stats: RowStats) -> RowStats:
    """Return what the backward pass needs: a caller may change the log-probs before, as those of eager PyTorch."""
    return stats._replace(logprobs=stats.norm[:, 0])  # of the same shape


def given_slopes(stats: RowStats, grads: RowStats, want_entropy: bool) -> Slopes:
    """Return the gradients of row statistics from autograd as slopes; None if the entropy's is not needed."""
    logprobs = torch.zeros_like(stats.logprobs) if grads.logprobs is None else grads.logprobs.contiguous()
    return Slopes(logprobs, grads.entropy.contiguous() if want_entropy and grads.entropy is not None else None)


@logits_stats.gradient(lambda stats, *inputs: (*inputs, without_logprobs(stats)), "logprobs", "entropy")
def _(
    ctx: Any, logits: Tensor, request: RowRequest, server: Server, stats: RowStats, grads: RowStats
) -> dict[str, Tensor]:
    slopes = given_slopes(stats, grads, request.want_entropy)
    return {"logits": logits_grad(logits, request, stats, slopes, server)}


# --- the loss of objectives whose gradient at a token needs nothing but that token's row --------------------


@operator
def logits_loss(
    logits: Tensor, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars, server: Server
) -> RowsSlopes:
    """Return the loss from one sweep over the logits. Its gradient takes a second sweep, in the backward pass."""
    return backend_of(server, request).row_slopes(_sampled(server, logits), request, tokens, scalars)


@logits_loss.fake
def _(logits: Tensor, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars, server: Server) -> RowsSlopes:
    stats = _fake_stats(logits, request)
    policy = TokenLoss.empty(stats.logprobs, scalars.kl_coef != 0)
    policy = policy._replace(loss=stats.logprobs.new_empty(()))
    return RowsSlopes.of(stats, policy, tokens.weights, scalars.entropy_coef)


def _keep_for_loss(out: RowsSlopes, logits: Tensor, request: RowRequest, *inputs: Any) -> tuple[Any, ...]:
    return logits, request, without_logprobs(out.stats), out.slopes, inputs[-1]


@logits_loss.gradient(_keep_for_loss, "loss")
def _(
    ctx: Any, logits: Tensor, request: RowRequest, stats: RowStats, slopes: Slopes, server: Server, grads: RowsSlopes
) -> dict[str, Tensor]:
    slopes = Slopes(grads.loss * slopes.logprobs, None if slopes.entropy is None else grads.loss * slopes.entropy)
    return {"logits": logits_grad(logits, request, stats, slopes, server)}


# --- the gradient in place of the logits, in eager mode only: a compiler plans buffers itself ---------------

_REMEDY = "Call with inplace_backward=False to repeat it."


def may_work_in_place(logits: Tensor, *others: Any) -> bool:
    """Return whether ``logits`` needs a gradient, and it and the tensors of ``others`` are ordinary, in eager mode."""
    wants_grad = torch.is_grad_enabled() and logits.requires_grad
    tensors = [x for x in (logits, *others) if isinstance(x, Tensor)]
    return wants_grad and not torch.compiler.is_compiling() and ordinary(tensors)


class StatsInPlace(torch.autograd.Function):
    """``logits_stats`` with a backward pass that writes ∂loss/∂logits over the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, request: RowRequest, server: Server) -> tuple[Tensor | None, ...]:
        stats = logits_stats.run(logits, request, server)
        SavedForBackward((logits, request, without_logprobs(stats), server)).store(ctx)
        ctx.mark_non_differentiable(stats.norm)
        ctx.set_materialize_grads(False)
        return tuple(stats)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        check_not_batched(grads)
        check_first_backward(ctx, "inplace_backward=True", _REMEDY)
        logits, request, stats, server = SavedForBackward.load(ctx)
        logits = logits.detach()
        slopes = given_slopes(stats, RowStats(*grads), request.want_entropy)  # type: ignore[arg-type]
        _row_grad(logits, logits, request, stats, slopes, server)
        torch.autograd.graph.increment_version(logits)
        return logits, None, None


def stats_of(logits: Tensor, request: RowRequest, server: Server, in_place: bool) -> RowStats:
    """Return ``logits_stats``. With ``in_place`` its gradient overwrites the logits."""
    if in_place:
        return RowStats(*StatsInPlace.apply(logits, request, server))
    return logits_stats(logits, request, server)


_gradient_at = WeakTensorKeyDictionary()  # for each base of logits, the address and version of the last gradient


def _check_not_recomputed(base: Tensor, logits: Tensor) -> None:
    """Raise RuntimeError if a checkpoint repeats the loss, in a backward pass, on what has become the gradient."""
    is_backward = torch._C._current_graph_task_id() != -1
    if is_backward and _gradient_at.get(base) == (logits.data_ptr(), logits._version):
        raise RuntimeError(
            "inplace_backward=True: activation checkpointing recomputes the loss from logits that hold their gradient "
            "now. Compute the logits inside the checkpoint too, or pass inplace_backward=False."
        )


class LossInPlace(torch.autograd.Function):
    """``RowsLoss`` in one visit to every row. Afterwards the logits contain their gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars, server: Server
    ) -> tuple[Tensor | None, ...]:
        base = logits if logits._base is None else logits._base
        _check_not_recomputed(base, logits)
        rows = _sampled(server, logits, zero_rest=True)
        out = backend_of(server, request).row_loss_(rows, request, tokens, scalars)
        # If someone else has saved the logits for a backward pass, autograd must know that they have changed.
        torch.autograd.graph.increment_version(logits)
        _gradient_at[base] = logits.data_ptr(), logits._version
        # Detached: autograd refuses to return a view that a function made (``DTensor.to_local``) once it has changed.
        ctx.save_for_backward(logits.detach())
        ctx.mark_non_differentiable(*(x for x in out[1:] if x is not None))
        ctx.set_materialize_grads(False)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Any, ...]:
        check_not_batched([grad_output])
        check_first_backward(ctx, "inplace_backward=True", _REMEDY)
        (gradient,) = ctx.saved_tensors
        gradient = None if grad_output is None else scaled(gradient, grad_output)
        return gradient, None, None, None, None
