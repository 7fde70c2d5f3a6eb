"""The torch.library operators: what torch.compile, fake tensors and autograd see of the kernels.

N rows (tokens), V vocabulary, H hidden. Per-token tensors are flat [N]; logits are [N, V] or, padded, [B, L, V] with
N = B·L, any strides. An operator names the backend that runs it, so that a compiled graph keeps its choice. Absent
results are empty tensors: an operator cannot return None. ``norm`` [N, 2] is what a backend wants to know again in the
backward pass about a row's softmax.

Inputs were validated where the public functions take them (``batch.py``); here only values the host must not look at
earlier are checked, by the kernels (target ids).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dapo_kernels.backends import backend_module
from dapo_kernels.surrogate import ObjectiveScalars
from dapo_kernels.tokens import Tokens, accumulate_dtype

_op = torch.library.custom_op


def or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def or_none(x: Tensor) -> Tensor | None:
    return None if x.numel() == 0 else x


def tau_of(temperature: float, temperatures: Tensor | None) -> float | Tensor:
    return temperature if temperatures is None else temperatures


def _per_token(like: Tensor, target_ids: Tensor) -> Tensor:
    return torch.empty(target_ids.shape, dtype=accumulate_dtype(like.dtype), device=like.device)


def stats_results(per_token: Tensor, want_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    entropy = torch.empty_like(per_token) if want_entropy else per_token.new_empty(0)
    return per_token, per_token.new_empty(*per_token.shape, 2), entropy


def refuse_second_backward(ctx: Any, caller: str, remedy: str) -> None:
    """The gradient buffer is handed out once; a second request would return what autograd has since changed."""
    if getattr(ctx, "handed_out", False):
        raise RuntimeError(f"{caller}: second backward through the same call; its gradient was handed out. {remedy}")
    ctx.handed_out = True


# --- logits: statistics forward, gradient backward -------------------------------------------------------------------


@_op("dapo_kernels::logits_stats", mutates_args=())
def logits_stats(
    logits: Tensor,
    target_ids: Tensor,
    live: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    want_entropy: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the targets, normalizer, entropy; each [N], zeros on dead rows."""
    tau = tau_of(temperature, temperatures)
    logprobs, norm, entropy = backend_module(backend).row_stats(logits, target_ids, live, tau, want_entropy)
    return logprobs, norm, or_empty(entropy, logprobs)


@logits_stats.register_fake
def _(logits, target_ids, live, temperature, temperatures, want_entropy, backend):  # type: ignore[no-untyped-def]
    return stats_results(_per_token(logits, target_ids), want_entropy)


@_op("dapo_kernels::logits_grad", mutates_args=())
def logits_grad(
    logits: Tensor,
    target_ids: Tensor,
    live: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    norm: Tensor,
    entropy: Tensor,
    dlogprobs: Tensor,
    dentropy: Tensor | None,
    backend: str,
) -> Tensor:
    """∂loss/∂logits, contiguous, from ∂loss/∂logprobs and ∂loss/∂entropy."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    tau = tau_of(temperature, temperatures)
    backend_module(backend).row_grad(out, logits, target_ids, live, tau, norm, or_none(entropy), dlogprobs, dentropy)
    return out


@logits_grad.register_fake
def _(logits, *args):  # type: ignore[no-untyped-def]
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@_op("dapo_kernels::logits_grad_", mutates_args={"logits"})
def logits_grad_(
    logits: Tensor,
    target_ids: Tensor,
    live: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    norm: Tensor,
    entropy: Tensor,
    dlogprobs: Tensor,
    dentropy: Tensor | None,
    backend: str,
) -> None:
    """``logits_grad`` written over the logits."""
    tau = tau_of(temperature, temperatures)
    backend_module(backend).row_grad(logits, logits, target_ids, live, tau, norm, or_none(entropy), dlogprobs, dentropy)


def _logits_stats_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target_ids, live, temperature, temperatures, want_entropy, backend = inputs
    _, norm, entropy = output
    ctx.save_for_backward(logits, target_ids, live, temperatures, norm, entropy)
    ctx.temperature, ctx.want_entropy, ctx.backend = temperature, want_entropy, backend
    ctx.mark_non_differentiable(norm)
    ctx.set_materialize_grads(False)


def _stats_grad_args(ctx: Any, dlogprobs: Tensor | None, dentropy: Tensor | None) -> tuple[Any, ...]:
    logits, target_ids, live, temperatures, norm, entropy = ctx.saved_tensors
    dlogprobs = norm.new_zeros(norm.shape[0]) if dlogprobs is None else dlogprobs.contiguous()
    dentropy = dentropy.contiguous() if ctx.want_entropy and dentropy is not None else None
    tau = (ctx.temperature, temperatures)
    return logits, target_ids, live, *tau, norm, entropy, dlogprobs, dentropy, ctx.backend


def _logits_stats_backward(ctx: Any, dlogprobs: Tensor | None, _: Any, dentropy: Tensor | None) -> tuple[Any, ...]:
    return logits_grad(*_stats_grad_args(ctx, dlogprobs, dentropy)), None, None, None, None, None, None


logits_stats.register_autograd(_logits_stats_backward, setup_context=_logits_stats_setup)


class LogitsStatsInPlace(torch.autograd.Function):
    """``logits_stats`` whose backward overwrites the logits with their gradient. Same inputs and outputs."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        return logits_stats(*inputs)

    setup_context = staticmethod(_logits_stats_setup)

    @staticmethod
    def backward(ctx: Any, dlogprobs: Tensor | None, _: Any, dentropy: Tensor | None) -> tuple[Any, ...]:
        refuse_second_backward(ctx, "inplace_backward=True", "Call with inplace_backward=False to repeat it.")
        args = _stats_grad_args(ctx, dlogprobs, dentropy)
        logits_grad_(*args)
        return args[0], None, None, None, None, None, None


# --- logits: loss and gradient in one pass ---------------------------------------------------------------------------


@_op("dapo_kernels::logits_loss_", mutates_args={"logits"})
def logits_loss_(
    logits: Tensor,
    target_ids: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    live: Tensor,
    weights: Tensor,
    advantages: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    importance_weights: Tensor | None,
    scalars: list[float],
    entropy_coef: float,
    want_entropy: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, log-probs, entropy, clip hits, reference KL; ∂loss/∂logits is left in ``logits``."""
    tokens = Tokens(live, weights, advantages, old_logprobs, ref_logprobs, importance_weights)
    out = backend_module(backend).row_loss_(
        logits,
        target_ids,
        tau_of(temperature, temperatures),
        tokens,
        ObjectiveScalars.unpack(scalars),
        entropy_coef,
        want_entropy,
    )
    logprobs = out.logprobs
    return out.loss, logprobs, or_empty(out.entropy, logprobs), out.clip_hit, or_empty(out.ref_kl, logprobs)


def token_results(per_token: Tensor, has_entropy: bool, has_kl: bool) -> tuple[Tensor, ...]:
    empty = per_token.new_empty(0)
    return (
        per_token.new_empty(()),
        per_token,
        torch.empty_like(per_token) if has_entropy else empty,
        torch.empty_like(per_token, dtype=torch.int8),
        torch.empty_like(per_token) if has_kl else empty.clone(),
    )


@logits_loss_.register_fake
def _(  # type: ignore[no-untyped-def]
    logits,
    target_ids,
    temperature,
    temperatures,
    live,
    weights,
    advantages,
    old_logprobs,
    ref_logprobs,
    importance_weights,
    scalars,
    entropy_coef,
    want_entropy,
    backend,
):
    has_entropy = want_entropy or entropy_coef != 0
    return token_results(_per_token(logits, target_ids), has_entropy, ObjectiveScalars.unpack(scalars).kl_coef != 0)


class LogitsLossInPlace(torch.autograd.Function):
    """``logits_loss_`` as a differentiable function of the logits, which it consumes in the forward pass."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return logits_loss_(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.n_inputs = len(inputs)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Any, ...]:
        refuse_second_backward(ctx, "inplace_backward=True", "Call with inplace_backward=False to repeat it.")
        (grad,) = ctx.saved_tensors
        return (None if grad_output is None else scaled(grad, grad_output), *(None,) * (ctx.n_inputs - 1))


def scaled(gradient: Tensor, grad_output: Tensor) -> Tensor:
    """grad_output · gradient, in the gradient's own storage: a second copy of dW would be the peak of memory.

    The common grad_output 1 costs nothing on the CPU; elsewhere looking at it would wait for the device. Under a
    tracer (whose tensors are of another type) the product is a new tensor and the compiler plans the memory.
    """
    if type(gradient) is not Tensor:
        return gradient * grad_output
    if gradient.device.type != "cpu" or grad_output.item() != 1.0:
        gradient.mul_(grad_output)
    return gradient


# --- log-probs already there -----------------------------------------------------------------------------------------


@_op("dapo_kernels::token_loss", mutates_args=())
def token_loss(
    logprobs: Tensor,
    log_ratio: Tensor | None,
    live: Tensor,
    weights: Tensor,
    advantages: Tensor,
    ref_logprobs: Tensor | None,
    importance_weights: Tensor | None,
    scalars: list[float],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss without entropy, ∂/∂logprobs, ∂/∂log_ratio, clip hits, reference KL. ``log_ratio`` None: on-policy."""
    tokens = Tokens(live, weights, advantages, None, ref_logprobs, importance_weights)
    out = backend_module(backend).token_loss(logprobs, log_ratio, tokens, ObjectiveScalars.unpack(scalars))
    return out.loss, out.d_logprobs, out.d_log_ratio, out.clip_hit, or_empty(out.ref_kl, out.d_logprobs)


@token_loss.register_fake
def _(logprobs, log_ratio, live, weights, advantages, ref_logprobs, importance_weights, scalars, backend):  # type: ignore[no-untyped-def]
    has_kl = ObjectiveScalars.unpack(scalars).kl_coef != 0
    loss, d_logprobs, d_log_ratio, hit, kl = token_results(torch.empty_like(logprobs), True, has_kl)
    return loss, d_logprobs, d_log_ratio, hit, kl


def _token_loss_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, d_logprobs, d_log_ratio, clip_hit, ref_kl = output
    ctx.save_for_backward(d_logprobs, d_log_ratio)
    ctx.off_policy = inputs[1] is not None
    ctx.mark_non_differentiable(d_logprobs, d_log_ratio, clip_hit, ref_kl)
    ctx.set_materialize_grads(False)


def _token_loss_backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad_output is None:
        return (None,) * 9
    d_logprobs, d_log_ratio = ctx.saved_tensors
    if not ctx.off_policy:
        return grad_output * (d_logprobs + d_log_ratio), *(None,) * 8
    return grad_output * d_logprobs, grad_output * d_log_ratio, *(None,) * 7


token_loss.register_autograd(_token_loss_backward, setup_context=_token_loss_setup)
