"""The public functions that start from hidden states and never hold all the logits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dapo_kernels import linear_ops, ops
from dapo_kernels.backends import backend_for
from dapo_kernels.batch import Layout, check_flag, check_tensor, layout_of, live_tokens, loss_call, target_tokens
from dapo_kernels.chunked import Head
from dapo_kernels.loss import LossOutput, TokenStats, gradient_unit, loss_of_stats, loss_output, token_stats
from dapo_kernels.objectives import Objective, is_number, resolve_objective
from dapo_kernels.surrogate import ObjectiveScalars


def linear_dapo_loss(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    float32_logits: bool = False,
    chunk_bytes: int | None = None,
    host_sync: bool | None = None,
    objective: str | Objective = "dapo",
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    importance_weights: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    denominator: float | Tensor | None = None,
    entropy: bool = False,
    selection: Tensor | float | None = None,
    generator: torch.Generator | None = None,
    **overrides: Any,
) -> LossOutput:
    """``dapo_loss`` of ``softcap(hidden · weightᵀ + bias)``, a chunk of tokens at a time.

    The gradient is formed together with the loss, three GEMMs in all, and scaled by ``grad_output`` in the backward
    pass; it can be handed out once. Objectives that look at a whole sequence or batch first (``gspo``,
    ``top_entropy``, …) compute the logits again in the backward pass: four GEMMs. Inputs that do not require a
    gradient cost none, and under ``no_grad`` the call costs one GEMM. Cost follows live tokens.

    Args:
        hidden: [T, H] packed or [B, L, H] padded.
        weight: [V, H], the output head (``lm_head.weight``), same dtype as ``hidden``.
        bias: [V], same dtype.
        softcap: c of c·tanh(logits/c), applied before the temperature.
        float32_logits: keep the logits of 16-bit inputs in float32. By default they are rounded to the inputs' dtype,
            as the model's own head and most rollout engines do: match the engine, or the ratio carries the
            difference. On the CPU this product runs at the float32 rate.
        chunk_bytes: size of the logits buffer, the only O(V) memory per token; by default 192 MiB, on a GPU 1 GiB
            (more where a single chunk then saves the float32 running sum of the weight's gradient).
        host_sync: on a GPU, whether the call may wait for the device once per pass, to learn how many tokens are live.
            It then computes those only; without waiting all tokens go through the GEMMs, shapes follow from the
            arguments alone and the call can be captured in a CUDA graph. By default it waits when a mask is given,
            since a wait costs microseconds and a token's GEMMs 6·H·V flops; but neither while a graph is captured nor
            under ``torch.cuda.set_sync_debug_mode``.

    The other arguments, the result and the errors are those of ``dapo_loss``. Softmax arithmetic is float32.
    """
    chosen = resolve_objective("linear_dapo_loss", objective, overrides)
    layout = layout_of("linear_dapo_loss", "hidden", hidden, cu_seqlens)
    head = _head(layout, hidden, weight, bias, softcap, float32_logits, chunk_bytes)
    check_flag(layout, "entropy", entropy)
    check_flag(layout, "float32_logits", float32_logits)
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
    backend = backend_for("linear_dapo_loss", hidden.device, hidden.dtype, weight.shape[0])
    wait = _host_sync(layout, host_sync, mask)
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in head[:3]]
    if any(needs) and call.objective.one_pass:
        tokens, unit = gradient_unit(head.hidden.dtype, call.tokens)
        scalars = ObjectiveScalars.of(chosen).pack()
        loss, logprobs, entropies, clip_hit, ref_kl, *_ = linear_ops.linear_loss(
            *head,
            targets,
            *tau,
            *tokens,
            scalars,
            chosen.entropy_coef,
            entropy,
            needs,
            chunk_bytes,
            wait,
            backend,
        )
        has_entropy = entropy or chosen.entropy_coef != 0
        seen = entropies if has_entropy else None
        return loss_output(call, loss / unit, logprobs, seen, clip_hit, ops.or_none(ref_kl))
    needs_entropy = entropy or call.needs_entropy
    logprobs, _, entropies = linear_ops.linear_stats(
        *head, targets, call.tokens.live, *tau, needs_entropy, chunk_bytes, wait, backend
    )
    return loss_of_stats(call, logprobs, entropies if needs_entropy else None, backend)


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    float32_logits: bool = False,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    mask: Tensor | None = None,
    chunk_bytes: int | None = None,
    host_sync: bool | None = None,
) -> TokenStats:
    """``token_logprobs`` of ``softcap(hidden · weightᵀ + bias)``, a chunk of tokens at a time.

    Differentiable with respect to hidden, weight and bias; the backward pass computes the logits again (four GEMMs in
    all). With ``mask`` only live tokens are computed; the others are 0. Arguments and errors as in
    ``linear_dapo_loss``.
    """
    layout = layout_of("linear_token_logprobs", "hidden", hidden)
    head = _head(layout, hidden, weight, bias, softcap, float32_logits, chunk_bytes)
    check_flag(layout, "entropy", entropy)
    check_flag(layout, "float32_logits", float32_logits)
    targets = target_tokens(layout, target_ids)
    backend = backend_for("linear_token_logprobs", hidden.device, hidden.dtype, weight.shape[0])
    wait = _host_sync(layout, host_sync, mask)
    logprobs, _, entropies = linear_ops.linear_stats(
        *head,
        targets,
        live_tokens(layout, mask),
        *layout.temperature(temperature),
        entropy,
        chunk_bytes,
        wait,
        backend,
    )
    return token_stats(layout, logprobs, entropies if entropy else None)


def _host_sync(layout: Layout, value: bool | None, mask: Tensor | None) -> bool | None:
    """What the operators are told: ``None`` leaves it to them. Without a mask every token is live."""
    if value is not None:
        check_flag(layout, "host_sync", value)
        return value
    return False if mask is None else None


def _head(
    layout: Layout,
    hidden: Tensor,
    weight: Any,
    bias: Any,
    softcap: float | None,
    float32_logits: bool,
    chunk_bytes: int | None,
) -> Head:
    caller, width = layout.caller, hidden.shape[-1]
    check_tensor(caller, "weight", weight, "a tensor [V, H]")
    if bias is not None:
        check_tensor(caller, "bias", bias, "a tensor [V]")
    if torch.is_autocast_enabled(hidden.device.type):  # as it treats the Linear layer that this stands for
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if weight.dim() != 2 or weight.shape[1] != width:
        raise layout.fail("weight", f"[V, H] with H={width} like hidden", list(weight.shape))
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise layout.fail("bias", f"[V]=[{weight.shape[0]}]", list(bias.shape))
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.dtype != hidden.dtype:
            raise TypeError(f"{caller}: {name} must have the dtype of hidden, {hidden.dtype}; got {value.dtype}")
        if value is not None and value.device != hidden.device:
            raise layout.fail(name, f"on {hidden.device} like hidden", value.device)
    if softcap is not None and not (is_number(softcap) and 0 < softcap < math.inf):
        raise layout.fail("softcap", "a positive number, or None", repr(softcap))
    if chunk_bytes is not None and not (type(chunk_bytes) is int and chunk_bytes > 0):
        raise layout.fail("chunk_bytes", "a positive integer, or None", repr(chunk_bytes))
    return Head(hidden.reshape(-1, width), weight, bias, softcap, float32_logits and hidden.dtype != torch.float64)
