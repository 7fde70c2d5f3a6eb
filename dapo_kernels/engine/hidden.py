"""Compute losses from hidden states in chunks of tokens, so that only the logits of one chunk exist at a time.

N tokens, V vocabulary, H hidden. Per chunk of C tokens, in one reused [C, V] buffer: logits = hidden · weightᵀ (vendor
GEMM) → row kernel in place, which writes ∂loss/∂logits → the two gradient GEMMs. Three GEMMs in total; recomputing the
logits in the backward pass would take four. Dead tokens are left out of the first GEMM, and tokens with gradient zero
(clipped, zero advantage) of the other two. ``chunks.py`` describes what of that needs the host, and what a GPU does
instead.

The loops over chunks return running sums: converting dW to its dtype takes memory, and by then the buffer is free.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dapo_kernels.backends import Backend
from dapo_kernels.backends.reference import check_rows
from dapo_kernels.engine.chunks import Chunks, gradient_rows, idle_beforehand, live_work
from dapo_kernels.engine.gradients import (
    GradientSum,
    HeadGradients,
    LinearLoss,
    Unsaved,
    autograd_gradients,
    fake_gradients,
    logits_of,
    sum_bytes,
    wants_float32_sums,
)
from dapo_kernels.engine.operators import check_first_backward, operator, scaled
from dapo_kernels.engine.rows import given_slopes, without_logprobs
from dapo_kernels.engine.shards import Widths, backend_of
from dapo_kernels.engine.wrapped import stats_before_gradient
from dapo_kernels.objectives.own import OwnLoss, registered, user_slopes
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.records import (
    Head,
    Needs,
    Plan,
    RowRequest,
    RowsLoss,
    RowStats,
    Slopes,
    Tokens,
    accumulate_dtype,
    on_host,
)


def _chunks(head: Head, live: Tensor, idle: Tensor | None, needs: Needs, plan: Plan, by: Backend) -> Chunks:
    widths = Widths.of(plan, head.weight.shape[0])
    # Bytes per logit in a chunk's buffers: a softcap may need a copy, float32 logits a 16-bit copy for the GEMMs.
    bytes_per_logit = head.logits_dtype.itemsize * (2 if head.softcap is not None and by.SOFTCAP_COPIES else 1)
    if head.logits_dtype != head.hidden.dtype:
        bytes_per_logit += head.hidden.element_size()
    return Chunks(
        live_work(live, idle, plan.host_sync),
        head.hidden,
        widths.here,
        head.logits_dtype,
        bytes_per_logit,
        plan.chunk_bytes,
        sum_bytes(head.weight, widths.widest, needs),
        widths.widest,
    )


def _per_token(head: Head, request: RowRequest) -> Tensor:
    """Return zeros, the results of masked tokens."""
    dtype = accumulate_dtype(head.hidden.dtype)
    return torch.zeros(request.live.shape, dtype=dtype, device=request.live.device)


def _fill(whole: Any, rows: Tensor | slice, part: Any) -> None:
    for into, piece in zip(whole, part, strict=True):
        if into is not None:
            into[rows] = piece


# --- statistics, and a gradient of any two slopes per token: four GEMMs -------------------------------------


@operator
def linear_stats(head: Head, request: RowRequest, plan: Plan) -> RowStats:
    """Return ``logits_stats`` of the head's logits: one GEMM, no gradient."""
    request = request._replace(softcap=head.softcap)
    check_rows(request, Widths.of(plan, head.weight.shape[0]).all)
    by = backend_of(plan, request)
    logprobs = _per_token(head, request)
    entropy = torch.zeros_like(logprobs) if request.want_entropy else None
    stats = RowStats(logprobs, logprobs.new_zeros(*logprobs.shape, 2), entropy)
    for chunk in _chunks(head, request.live, None, Needs(False, False, False), plan, by):
        logits_of(head, chunk.rows, chunk.logits)
        _fill(stats, chunk.rows, by.row_stats(chunk.logits, request.at(chunk.rows)))
    return stats


@linear_stats.fake
def _(head: Head, request: RowRequest, plan: Plan) -> RowStats:
    return RowStats.empty(request, accumulate_dtype(head.hidden.dtype))


@operator
def linear_grad(
    head: Head, request: RowRequest, stats: RowStats, slopes: Slopes, needs: Needs, plan: Plan
) -> HeadGradients:
    """Return the gradients of hidden and head from ∂loss/∂ℓ and ∂loss/∂H: recompute the logits, then two GEMMs."""
    request = request._replace(live=request.live & ~slopes.idle, softcap=head.softcap)
    return _grad_over_chunks(head, request, stats, slopes, needs, plan).results()


def _grad_over_chunks(
    head: Head, request: RowRequest, stats: RowStats, slopes: Slopes, needs: Needs, plan: Plan
) -> GradientSum:
    by = backend_of(plan, request)
    chunks = _chunks(head, request.live, None, needs, plan, by)
    gradients = GradientSum(head, chunks.vocab, needs, chunks.n_with_gradient, by, plan.main_grad is not None)
    for chunk in chunks:
        rows, logits = chunk.rows, chunk.logits
        hidden = logits_of(head, rows, logits)
        by.row_grad(logits, logits, request.at(rows), stats.at(rows), slopes.at(rows))
        if on_host(logits):
            gradients.add(logits, hidden, rows)
        else:
            gradients.add(*gradient_rows(logits, hidden, ~request.live[rows], chunk))
    return gradients


@linear_grad.fake
def _(head: Head, request: RowRequest, stats: RowStats, slopes: Slopes, needs: Needs, plan: Plan) -> HeadGradients:
    return fake_gradients(head, needs, plan.main_grad is not None)


linear_grad.has_no_gradient()


def _keep_for_stats(stats: RowStats, head: Head, request: RowRequest, plan: Plan) -> tuple[Any, ...]:
    return head, request, plan._replace(main_grad=None), without_logprobs(stats), Unsaved([plan.main_grad])


@linear_stats.gradient(_keep_for_stats, "logprobs", "entropy")
def _(
    ctx: Any, head: Head, request: RowRequest, plan: Plan, stats: RowStats, unsaved: Unsaved, grads: RowStats
) -> dict[str, Tensor | None]:
    (main_grad,) = unsaved.tensors
    slopes = given_slopes(stats, grads, request.want_entropy)
    plan = plan._replace(main_grad=main_grad)
    gradients = linear_grad(head, request, stats, slopes, Needs.of(ctx.needs_input_grad), plan)
    return autograd_gradients(gradients, head.hidden.dtype, main_grad, plan.group, plan.partial_hidden)


# --- the loss of objectives whose gradient at a token needs nothing but that token's row: three GEMMs --------


def _no_loss(head: Head, request: RowRequest, scalars: ObjectiveScalars) -> RowsLoss:
    """Return the results of masked tokens."""
    zeros = _per_token(head, request)
    return RowsLoss(
        loss=torch.zeros((), dtype=torch.float64, device=zeros.device),
        logprobs=zeros,
        entropy=zeros.clone() if request.want_entropy else None,
        clip_hit=None if scalars.own else torch.zeros_like(zeros, dtype=torch.int8),
        ref_kl=zeros.clone() if scalars.kl_coef != 0 else None,
        idle=torch.ones_like(request.live),
    )


@operator
def linear_loss(
    head: Head, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars, needs: Needs, plan: Plan
) -> LinearLoss:
    """Return the loss together with the gradients of hidden and head."""
    request = request._replace(softcap=head.softcap)
    total, gradients = _loss_over_chunks(head, request, tokens, scalars, needs, plan)
    return LinearLoss(total.loss.to(total.logprobs.dtype), *total[1:-1], *gradients.results())


def _loss_over_chunks(
    head: Head, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars, needs: Needs, plan: Plan
) -> tuple[RowsLoss, GradientSum]:
    check_rows(request, Widths.of(plan, head.weight.shape[0]).all)
    by, function = backend_of(plan, request), registered(scalars.own)
    total = _no_loss(head, request, scalars)
    idle = None if on_host(request.live) or function else idle_beforehand(tokens, scalars)
    chunks = _chunks(head, request.live, idle, needs, plan, by)
    gradients = GradientSum(head, chunks.vocab, needs, chunks.n_with_gradient, by, wants_float32_sums(head, plan))
    for chunk in chunks:
        rows, logits = chunk.rows, chunk.logits
        hidden = logits_of(head, rows, logits)
        if function is None:
            out = by.row_loss_(logits, request.at(rows), tokens.at(rows), scalars)
        else:
            out = _own_row_loss_(by, logits, request.at(rows), tokens.at(rows), function)
        total.loss.add_(out.loss)
        _fill(total[1:], rows, out[1:])
        gradients.add(*gradient_rows(logits, hidden, total.idle[rows], chunk))
    return total, gradients


def _own_row_loss_(by: Backend, logits: Tensor, request: RowRequest, tokens: Tokens, function: OwnLoss) -> RowsLoss:
    """Compute ``row_loss_`` for a user-defined function."""
    stats = stats_before_gradient(by, logits, request)
    loss, slopes = user_slopes(function, stats.logprobs, stats.entropy, tokens)
    by.row_grad(logits, logits, request, stats, slopes)
    return RowsLoss(loss, stats.logprobs, stats.entropy, None, None, slopes.idle)


@linear_loss.fake
def _(
    head: Head, request: RowRequest, tokens: Tokens, scalars: ObjectiveScalars, needs: Needs, plan: Plan
) -> LinearLoss:
    total = _no_loss(head, request, scalars)
    return LinearLoss(
        total.logprobs.new_empty(()), *total[1:-1], *fake_gradients(head, needs, wants_float32_sums(head, plan))
    )


def _keep_for_loss(out: LinearLoss, head: Head, *inputs: Any) -> tuple[Any, ...]:
    plan: Plan = inputs[-1]
    return HeadGradients(*out[5:]), head.hidden.dtype, Unsaved([plan.main_grad]), plan.group, plan.partial_hidden


@linear_loss.gradient(_keep_for_loss, "loss")
def _(
    ctx: Any,
    gradients: HeadGradients,
    dtype: torch.dtype,
    unsaved: Unsaved,
    group: str | None,
    partial_hidden: bool,
    grads: LinearLoss,
) -> dict[str, Tensor | None]:
    check_first_backward(ctx, "loss from hidden states", "Add losses up and call backward once, or call it again.")
    gradients = HeadGradients(*(None if x is None else scaled(x, grads.loss) for x in gradients))
    return autograd_gradients(gradients, dtype, unsaved.tensors[0], group, partial_hidden)
