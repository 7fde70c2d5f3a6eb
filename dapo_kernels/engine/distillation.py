"""The divergence of the policy from a reference, from hidden states and heads of both, in chunks of tokens.

N tokens, V vocabulary. Per chunk of C tokens, in two reused [C, V] buffers: the logits of policy and reference → the
divergence of every row, and its gradient in place of the policy's logits → the two gradient GEMMs. Four GEMMs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dapo_kernels.backends import backend
from dapo_kernels.backends.divergence import Distance
from dapo_kernels.backends.reference import check_rows
from dapo_kernels.engine.chunks import Chunks, gradient_rows, live_work
from dapo_kernels.engine.gradients import (
    GradientSum,
    HeadGradients,
    LinearDivergence,
    Unsaved,
    autograd_gradients,
    fake_gradients,
    logits_of,
    sum_bytes,
    wants_float32_sums,
)
from dapo_kernels.engine.operators import check_first_backward, operator, scaled
from dapo_kernels.records import Head, Needs, Plan, RowRequest, accumulate_dtype, on_host


@operator
def linear_divergence(
    head: Head, ref: Head, request: RowRequest, weights: Tensor, beta: float, needs: Needs, plan: Plan
) -> LinearDivergence:
    """Compute the divergence of the policy's ``head`` from ``ref``, which gets no gradient. Targets are not read."""
    divergence, gradients = _over_chunks(head, ref, request, weights, beta, needs, plan)
    loss = (weights * divergence).sum(dtype=torch.float64).to(divergence.dtype)
    return LinearDivergence(loss, divergence, *gradients.results())


def _over_chunks(
    head: Head, ref: Head, request: RowRequest, weights: Tensor, beta: float, needs: Needs, plan: Plan
) -> tuple[Tensor, GradientSum]:
    vocab = head.weight.shape[0] if plan.valid is None else plan.valid
    check_rows(request, vocab)
    chunks = Chunks(
        live_work(request.live, None, plan.host_sync),
        head.hidden,
        vocab,
        head.logits_dtype,
        head.logits_dtype.itemsize + ref.logits_dtype.itemsize,
        plan.chunk_bytes,
        sum_bytes(head.weight, vocab, needs),
    )
    with_gradient = any(needs)
    kernels = backend(plan.backend)
    gradients = GradientSum(head, vocab, needs, chunks.n_with_gradient, kernels, wants_float32_sums(head, plan))
    divergence, distance = torch.zeros_like(weights), Distance(beta, head.softcap, ref.softcap)
    ref_buffer = chunks.buffer(ref.logits_dtype)
    for chunk in chunks:
        rows, logits = chunk.rows, chunk.logits
        ref_logits, wanted = ref_buffer[: logits.shape[0]], request.at(rows)
        hidden = logits_of(head, rows, logits)
        logits_of(ref, rows, ref_logits)
        divergence[rows] = kernels.row_divergence_(logits, ref_logits, wanted, weights[rows], distance)
        if with_gradient and on_host(logits):
            gradients.add(logits, hidden, rows)
        elif with_gradient:
            gradients.add(*gradient_rows(logits, hidden, ~wanted.live, chunk))
    return divergence, gradients


@linear_divergence.fake
def _(
    head: Head, ref: Head, request: RowRequest, weights: Tensor, beta: float, needs: Needs, plan: Plan
) -> LinearDivergence:
    dtype = accumulate_dtype(head.hidden.dtype)
    gradients = fake_gradients(head, needs, wants_float32_sums(head, plan))
    return LinearDivergence(weights.new_empty((), dtype=dtype), torch.empty_like(weights), *gradients)


def _keep(out: LinearDivergence, head: Head, *inputs: Any) -> tuple[Any, ...]:
    plan: Plan = inputs[-1]
    return HeadGradients(*out[2:]), head.hidden.dtype, Unsaved([plan.main_grad])


@linear_divergence.gradient(_keep, "loss")
def _(
    ctx: Any, gradients: HeadGradients, dtype: torch.dtype, unsaved: Unsaved, grads: LinearDivergence
) -> dict[str, Tensor | None]:
    check_first_backward(ctx, "linear_distillation_loss", "Add losses up and call backward once, or call it again.")
    gradients = HeadGradients(*(None if x is None else scaled(x, grads.loss) for x in gradients))
    return autograd_gradients(gradients, dtype, unsaved.tensors[0], None, False)
