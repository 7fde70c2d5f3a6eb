"""The torch.library operators: what torch.compile, fake tensors and autograd see of the kernels.

N rows (tokens), V vocabulary, H hidden. Per-token tensors are flat [N]; logits are [N, V] or, padded, [B, L, V] with
N = B·L, any strides. An operator names the backend that runs it, so that a compiled graph keeps its choice. Absent
results are empty tensors: an operator cannot return None. ``norm`` [N, 2] is what a backend wants to know again in the
backward pass about a row's softmax.

Inputs were validated where the public functions take them (``batch.py``); here only values the host must not look at
earlier are checked, by the kernels (target ids).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from dapo_kernels.backends import backend_module
from dapo_kernels.memory import large_gradient
from dapo_kernels.surrogate import ObjectiveScalars
from dapo_kernels.tokens import Tokens, accumulate_dtype


def operator(function: Any) -> Any:
    """Register ``dapo_kernels::<name>`` with the schema its annotations spell; returns the operator.

    ``torch.library.custom_op`` does as much, but its first call imports torch._dynamo (a second and 900 modules) and
    every call pays for its wrapping.
    """
    name = f"dapo_kernels::{function.__name__}"
    schema = torch.library.infer_schema(function, mutates_args=())
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "default")(_without_autocast(function))
    return getattr(torch.ops.dapo_kernels, function.__name__).default


def _without_autocast(function: Any) -> Any:
    """An operator's dtypes are its inputs': autocast has had its say where the public function took them."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        device = args[0].device.type
        if not torch.is_autocast_enabled(device):
            return function(*args)
        with torch.autocast(device, enabled=False):
            return function(*args)

    return run


def fake(op: Any) -> Any:
    return torch.library.register_fake(op.name())


def differentiable(op: Any, backward: Any, setup_context: Any) -> None:
    torch.library.register_autograd(op.name(), backward, setup_context=setup_context)


def refuse_double_backward(op: Any) -> None:
    """A gradient operator has no gradient of its own: say so, where autograd would only warn and answer wrongly."""

    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(f"{op.name()}: the gradient of a gradient is not implemented; use create_graph=False")

    differentiable(op, backward, lambda ctx, inputs, output: None)


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


@operator
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


@fake(logits_stats)
def _(logits, target_ids, live, temperature, temperatures, want_entropy, backend):  # type: ignore[no-untyped-def]
    return stats_results(_per_token(logits, target_ids), want_entropy)


@operator
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
    module = backend_module(backend)
    arguments = (logits, target_ids, live, tau_of(temperature, temperatures), norm, entropy, dlogprobs, dentropy)
    skips = getattr(module, "SKIPS_ZEROS", False)
    if skips and (large := large_gradient(logits.shape, logits.dtype, logits.device, "logits")) is not None:
        out, zeroed = large
        module.row_grad(out, *arguments, zeroed=zeroed)
        return out
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    module.row_grad(out, *arguments)
    return out


@fake(logits_grad)
def _(logits, *args):  # type: ignore[no-untyped-def]
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


refuse_double_backward(logits_grad)


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


differentiable(logits_stats, _logits_stats_backward, _logits_stats_setup)


def token_results(per_token: Tensor, has_entropy: bool, has_kl: bool) -> tuple[Tensor, ...]:
    empty = per_token.new_empty(0)
    return (
        per_token.new_empty(()),
        per_token,
        torch.empty_like(per_token) if has_entropy else empty,
        torch.empty_like(per_token, dtype=torch.int8),
        torch.empty_like(per_token) if has_kl else empty.clone(),
    )


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


@operator
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


@fake(token_loss)
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


@operator
def token_grad(derivative: Tensor, grad_output: Tensor) -> Tensor:
    """grad_output · derivative [N]."""
    return grad_output * derivative


@fake(token_grad)
def _(derivative, grad_output):  # type: ignore[no-untyped-def]
    return torch.empty_like(derivative)


refuse_double_backward(token_grad)


def _token_loss_backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad_output is None:
        return (None,) * 9
    d_logprobs, d_log_ratio = ctx.saved_tensors
    if not ctx.off_policy:
        return token_grad(d_logprobs + d_log_ratio, grad_output), *(None,) * 8
    return token_grad(d_logprobs, grad_output), token_grad(d_log_ratio, grad_output), *(None,) * 7


differentiable(token_loss, _token_loss_backward, _token_loss_setup)
