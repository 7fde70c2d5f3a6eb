"""Autograd functions that let the gradient overwrite the logits. Eager mode only: a compiler plans buffers itself."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dapo_kernels.ops import refuse_second_backward, scaled
from dapo_kernels.surrogate import ObjectiveScalars
from dapo_kernels.tokens import Tokens

_REMEDY = "Call with inplace_backward=False to repeat it."


class LogitsStats(torch.autograd.Function):
    """Log-probs and entropy [N]; the backward pass writes ∂loss/∂logits over the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target_ids: Tensor,
        live: Tensor,
        temperature: float | Tensor,
        want_entropy: bool,
        backend: ModuleType,
    ) -> tuple[Tensor, Tensor | None]:
        logprobs, norm, entropy = backend.row_stats(logits, target_ids, live, temperature, want_entropy)
        ctx.save_for_backward(logits, target_ids, live, norm, entropy)
        ctx.temperature, ctx.backend = temperature, backend
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogprobs: Tensor | None, dentropy: Tensor | None) -> tuple[Any, ...]:
        refuse_second_backward(ctx, "inplace_backward=True", _REMEDY)
        logits, target_ids, live, norm, entropy = ctx.saved_tensors
        logits = logits.detach()
        dlogprobs = norm.new_zeros(norm.shape[0]) if dlogprobs is None else dlogprobs.contiguous()
        dentropy = None if dentropy is None else dentropy.contiguous()
        row_grad = ctx.backend.row_grad
        row_grad(logits, logits, target_ids, live, ctx.temperature, norm, entropy, dlogprobs, dentropy)
        torch.autograd.graph.increment_version(logits)
        return logits, None, None, None, None, None


class LogitsLoss(torch.autograd.Function):
    """Loss and per-token results (``RowLoss`` without ``idle``). The logits hold their gradient from here on."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target_ids: Tensor,
        temperature: float | Tensor,
        tokens: Tokens,
        scalars: ObjectiveScalars,
        entropy_coef: float,
        want_entropy: bool,
        backend: ModuleType,
    ) -> tuple[Tensor | None, ...]:
        out = backend.row_loss_(logits, target_ids, temperature, tokens, scalars, entropy_coef, want_entropy)
        # Whoever saved the logits for a backward pass of their own must be told that they are gone.
        torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(logits)
        ctx.mark_non_differentiable(*(x for x in out[1:-1] if x is not None))
        ctx.set_materialize_grads(False)
        return out[:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Any, ...]:
        refuse_second_backward(ctx, "inplace_backward=True", _REMEDY)
        (gradient,) = ctx.saved_tensors
        nothing = (None,) * 7
        return (None if grad_output is None else scaled(gradient.detach(), grad_output), *nothing)
