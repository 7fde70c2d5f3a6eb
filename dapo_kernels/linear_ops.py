"""The torch.library operators of the fused linear path; conventions as in ``ops.py``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dapo_kernels import chunked
from dapo_kernels.backends import backend_module
from dapo_kernels.chunked import Head, Needs, Options
from dapo_kernels.ops import (
    differentiable,
    fake,
    operator,
    or_empty,
    refuse_double_backward,
    refuse_second_backward,
    scaled,
    stats_results,
    tau_of,
    token_results,
)
from dapo_kernels.surrogate import ObjectiveScalars
from dapo_kernels.tokens import Tokens, accumulate_dtype
from dapo_kernels.weight_grad import Gradients


def _gradients_or_empty(head: Head, gradients: Gradients) -> tuple[Tensor, Tensor, Tensor]:
    dhidden, dweight, dbias = (or_empty(x, head.hidden) for x in gradients.results())
    return dhidden, dweight, dbias


def _fake_gradients(head: Head, needs: Needs) -> tuple[Tensor, Tensor, Tensor]:
    empty = head.hidden.new_empty
    return (
        empty(head.hidden.shape if needs.hidden else 0),
        empty(head.weight.shape if needs.weight else 0),
        empty(head.weight.shape[0] if needs.bias else 0),
    )


def _per_token(hidden: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0], dtype=accumulate_dtype(hidden.dtype))


@operator
def linear_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    float32_logits: bool,
    target_ids: Tensor,
    live: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    want_entropy: bool,
    chunk_bytes: int | None,
    host_sync: bool | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """``logits_stats`` of hidden · weightᵀ: log-probs, normalizer, entropy."""
    logprobs, norm, entropy = chunked.linear_stats(
        Head(hidden, weight, bias, softcap, float32_logits),
        target_ids,
        live,
        tau_of(temperature, temperatures),
        want_entropy,
        Options(chunk_bytes, host_sync, backend_module(backend)),
    )
    return logprobs, norm, or_empty(entropy, logprobs)


@fake(linear_stats)
def _(hidden, weight, bias, softcap, float32_logits, target_ids, live, temperature, temperatures, want_entropy, *_):  # type: ignore[no-untyped-def]
    return stats_results(_per_token(hidden), want_entropy)


@operator
def linear_grad(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    float32_logits: bool,
    target_ids: Tensor,
    live: Tensor,
    temperature: float,
    temperatures: Tensor | None,
    norm: Tensor,
    entropy: Tensor,
    dlogprobs: Tensor,
    dentropy: Tensor | None,
    needs: list[bool],
    chunk_bytes: int | None,
    host_sync: bool | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (hidden, weight, bias), those of ``needs``, from ∂loss/∂logprobs and ∂loss/∂entropy."""
    head = Head(hidden, weight, bias, softcap, float32_logits)
    gradients = chunked.linear_grad(
        head,
        target_ids,
        live,
        tau_of(temperature, temperatures),
        norm,
        entropy,
        dlogprobs,
        dentropy,
        Needs(*needs),
        Options(chunk_bytes, host_sync, backend_module(backend)),
    )
    return _gradients_or_empty(head, gradients)


@fake(linear_grad)
def _(hidden, weight, bias, softcap, float32_logits, *args):  # type: ignore[no-untyped-def]
    return _fake_gradients(Head(hidden, weight, bias, softcap, float32_logits), Needs(*args[-4]))


refuse_double_backward(linear_grad)


def _linear_stats_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (
        hidden,
        weight,
        bias,
        softcap,
        float32_logits,
        target_ids,
        live,
        temperature,
        temperatures,
        want_entropy,
        chunk_bytes,
        host_sync,
        backend,
    ) = inputs
    _, norm, entropy = output
    ctx.save_for_backward(hidden, weight, bias, target_ids, live, temperatures, norm, entropy)
    ctx.softcap, ctx.float32_logits, ctx.temperature, ctx.want_entropy = (
        softcap,
        float32_logits,
        temperature,
        want_entropy,
    )
    ctx.chunk_bytes, ctx.host_sync, ctx.backend = chunk_bytes, host_sync, backend
    ctx.mark_non_differentiable(norm)
    ctx.set_materialize_grads(False)


def _linear_stats_backward(ctx: Any, dlogprobs: Tensor | None, _: Any, dentropy: Tensor | None) -> tuple[Any, ...]:
    hidden, weight, bias, target_ids, live, temperatures, norm, entropy = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    gradients = linear_grad(
        hidden,
        weight,
        bias,
        ctx.softcap,
        ctx.float32_logits,
        target_ids,
        live,
        ctx.temperature,
        temperatures,
        norm,
        entropy,
        norm.new_zeros(norm.shape[0]) if dlogprobs is None else dlogprobs.contiguous(),
        dentropy.contiguous() if ctx.want_entropy and dentropy is not None else None,
        needs,
        ctx.chunk_bytes,
        ctx.host_sync,
        ctx.backend,
    )
    return *(g if need else None for g, need in zip(gradients, needs, strict=True)), *(None,) * 10


differentiable(linear_stats, _linear_stats_backward, _linear_stats_setup)


@operator
def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    float32_logits: bool,
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
    needs: list[bool],
    chunk_bytes: int | None,
    host_sync: bool | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, log-probs, entropy, clip hits, reference KL; then the gradients of (hidden, weight, bias), those needed."""
    head = Head(hidden, weight, bias, softcap, float32_logits)
    out, gradients = chunked.linear_loss(
        head,
        target_ids,
        tau_of(temperature, temperatures),
        Tokens(live, weights, advantages, old_logprobs, ref_logprobs, importance_weights),
        ObjectiveScalars.unpack(scalars),
        entropy_coef,
        want_entropy,
        Needs(*needs),
        Options(chunk_bytes, host_sync, backend_module(backend)),
    )
    like = out.logprobs
    per_token = (out.loss, like, or_empty(out.entropy, like), out.clip_hit, or_empty(out.ref_kl, like))
    return *per_token, *_gradients_or_empty(head, gradients)


@fake(linear_loss)
def _(hidden, weight, bias, softcap, float32_logits, *args):  # type: ignore[no-untyped-def]
    scalars, entropy_coef, want_entropy, needs, *_ = args[-7:]
    has_kl = ObjectiveScalars.unpack(scalars).kl_coef != 0
    per_token = token_results(_per_token(hidden), want_entropy or entropy_coef != 0, has_kl)
    return *per_token, *_fake_gradients(Head(hidden, weight, bias, softcap, float32_logits), Needs(*needs))


def _linear_loss_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needs = inputs[-4]
    ctx.n_inputs = len(inputs)
    ctx.save_for_backward(*output[5:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _linear_loss_backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad_output is None:
        return (None,) * ctx.n_inputs
    refuse_second_backward(ctx, "linear_dapo_loss", "Add losses up and call backward once, or call it again.")
    pairs = zip(ctx.saved_tensors, ctx.needs, strict=True)
    gradients = (scaled(gradient, grad_output) if need else None for gradient, need in pairs)
    return *gradients, *(None,) * (ctx.n_inputs - 3)


differentiable(linear_loss, _linear_loss_backward, _linear_loss_setup)
