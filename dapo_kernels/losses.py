"""The losses, from logits, from hidden states, from log-probs: each checks its arguments and calls the engine."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from dapo_kernels.backends import backend_for
from dapo_kernels.call import LossOptions, PolicyCall, RowOptions
from dapo_kernels.engine import hidden as from_hidden
from dapo_kernels.engine import rows as from_rows
from dapo_kernels.engine.gradients import gradient_unit
from dapo_kernels.engine.tokens import loss_of_stats
from dapo_kernels.head import head_of_call
from dapo_kernels.layout import Layout, check_flag, check_rows_apart, layout_of, token_layout
from dapo_kernels.metrics import Metrics, PerToken, token_sums
from dapo_kernels.objectives.own import OwnLoss, as_number
from dapo_kernels.objectives.table import Objective
from dapo_kernels.records import Asked, Default, HeadOptions, Needs
from dapo_kernels.sharding import (
    GroupOption,
    ShardOptions,
    Telling,
    head_of_ranks,
    logits_of_call,
    parts_of,
    shared_plan,
    shared_server,
)
from dapo_kernels.signature import shows_options

Chosen = str | Objective | OwnLoss


class LossOutput(NamedTuple):
    """``loss`` 0-d, carrying the gradient; ``logprobs`` and ``entropy`` detached, in the layout of ``target_ids``,
    0 on dead tokens (entropy ``None`` unless it was needed); ``metrics`` sums over live tokens, computed when they are
    read, see ``summarize``."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    metrics: Any  # Mapping[str, Tensor]


class LogitsOptions(RowOptions, GroupOption, total=False):
    inplace_backward: Annotated[bool, Default(False)]
    valid_vocab: int | None


class LinearOptions(RowOptions, HeadOptions, ShardOptions, total=False):
    pass


@shows_options
def dapo_loss(
    logits: Tensor,
    target_ids: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    objective: Chosen = "dapo",
    **options: Unpack[LogitsOptions],
) -> LossOutput:
    """The DAPO loss (or a relative) of a batch of responses, from their logits.

    With ℓ = log softmax(logits/τ)[target], ρ = exp(ℓ − ℓ_old), A the advantage and N the live tokens (DAPO, eq. 8)::

        loss = −1/N Σ_t min(ρ_t A_t, clip(ρ_t, 1 − clip_low, 1 + clip_high) A_t)

    N counts the whole mini-batch, as in the code released with the paper. Eq. 8 as printed takes this mean within each
    prompt's group of responses, and then the mean over prompts: ``aggregate="prompt-mean-token-mean"``.

    Args:
        logits: [T, V] packed or [B, L, V] padded; float32, bfloat16 or float16 (float64 on the torch backend), any
            strides. ``logits[t]`` predicts ``target_ids[t]``: shift before the call.
        target_ids: [T] or [B, L], integers in [0, V).
        old_logprobs: same shape, log-probs under the policy that sampled; ``None`` means on-policy: ratio 1.
            Log-probs above 0, probabilities passed by mistake, are refused on the CPU; elsewhere the metric
            ``positive_logprobs`` counts their tokens.
        advantages: per token, or per sequence [S] / [B].
        objective: a name in ``OBJECTIVES``, an ``Objective``, or a function ``fn(logprobs, entropy, tokens)`` that
            returns a loss per token, each [n] (docs/objectives.md, "A loss of your own").
        mask: same shape as ``target_ids``, which tokens train. A masked token may hold anything, NaN included.
        cu_seqlens: int32 [S+1], where packed sequences begin and end.
        ref_logprobs: per token, under the reference policy; needed when ``kl_coef`` is not 0.
        importance_weights: per token or sequence; multiply the policy term and KL-Cov's penalty, not
            the KL to a reference or the entropy bonus (rollout correction).
        temperature: positive number, or one per token; 1 by default.
        sampling_mask: a ``SamplingMask``, which tokens of the vocabulary each one was sampled from, where top-p, top-k
            or min-p had cut it down: log-probs, entropies and gradients are those of the softmax over them, and nothing
            else of a row is looked at (docs/guide.md).
        denominator: replaces the local count of tokens (or of sequences, or of prompts) in the mean; a number or a
            0-d tensor, the count over all micro-batches and ranks.
        group_ids: integers [S] / [B], equal where sequences answer the same prompt; only with
            ``aggregate="prompt-mean-token-mean"``, which needs them, or ``group_tokens`` and ``denominator``.
        group_tokens: [S] / [B], for each sequence the live tokens of its whole group over all micro-batches and ranks,
            where this call may not hold all of a group; counted by default. Only with that aggregate.
        inplace_backward: let the gradient overwrite the logits' storage (already in this call, where the objective
            allows one pass). The logits must not be used afterwards.
        entropy: also return the entropy of every live token.
        selection: with ``top_entropy``, ``clip_cov`` or ``kl_cov``, which tokens were selected (bool, per token), made
            beforehand over the whole batch (``dapo_kernels.select``) so that micro-batches agree with it;
            ``top_entropy`` also takes the entropy threshold as a number.
        generator: for the random choice of ``clip_cov``.
        valid_vocab: how many columns, the first, can be sampled; those behind them, which pad the vocabulary, take no
            part whatever they hold, and their gradient is zero. Targets are then in [0, valid_vocab).
        group: a ``torch.distributed`` process group whose ranks each hold some columns of the logits, in the order of
            its ranks. Everything else is the same on all of them, with targets of the whole vocabulary, and so are
            the results. Not needed for a ``DTensor`` of ``Shard(-1)`` (docs/vocabulary-parallel.md).
        clip_high and every other field of ``Objective``: for this call.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, what was expected and what came. Ranks of a
            ``group`` that were given other tokens or options than each other all raise.
        IndexError: a live token's target, or an id that it keeps, is outside [0, V). As for a target that
            ``sampling_mask`` does not keep (ValueError), on CUDA an asynchronous device assert.
    """
    return _from_logits("dapo_loss", logits, target_ids, old_logprobs, advantages, objective, options)


@shows_options
def policy_loss_from_logits(
    logits: Tensor,
    target_ids: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    objective: Chosen,
    **options: Unpack[LogitsOptions],
) -> LossOutput:
    """``dapo_loss`` for code that names its objective."""
    return _from_logits("policy_loss_from_logits", logits, target_ids, old_logprobs, advantages, objective, options)


@shows_options
def linear_dapo_loss(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    objective: Chosen = "dapo",
    **options: Unpack[LinearOptions],
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
        lora: an adapter of the head, ``LoraFactors(a [r, H], b [V, r], scale)`` of the same dtype: its weight is
            weight + scale · b · a, of which nothing [V, H] is made. Gradients go to whichever of a, b and weight
            require one. With ``group``, b is this rank's rows and a the same on all.
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
        main_grad: float32 [V, H] that the backward pass adds the weight's gradient to, as Megatron's ``main_grad``;
            ``weight.grad`` stays as it is and hooks on it do not run. Every backward pass adds, one that asks for
            another tensor's gradient alone included. Over many micro-batches a 16-bit ``.grad`` loses
            digits at every addition.
        group: a process group whose ranks each hold some rows of the head: then ``weight`` [V/ranks, H], ``bias`` and
            ``main_grad`` are this rank's, their gradients too, and ``hidden.grad`` is added up over the group. Not
            needed for a ``weight`` (and ``bias``) that is a ``DTensor`` of ``Shard(0)`` (docs/vocabulary-parallel.md).
        sequence_parallel: with a shared head, ``hidden`` is this rank's part of the tokens, [T/ranks, H] or
            [B, L/ranks, H]: it is gathered, and its gradient reduce-scattered. Per-token tensors are of all tokens.

    The other arguments, the result and the errors are those of ``dapo_loss``. Softmax arithmetic is float32.
    """
    return _from_hidden("linear_dapo_loss", hidden, weight, target_ids, old_logprobs, advantages, objective, options)


@shows_options
def policy_loss_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    objective: Chosen,
    **options: Unpack[LinearOptions],
) -> LossOutput:
    """``linear_dapo_loss`` for code that names its objective."""
    name = "policy_loss_from_hidden"
    return _from_hidden(name, hidden, weight, target_ids, old_logprobs, advantages, objective, options)


class LogprobsOptions(LossOptions, total=False):
    entropy: Tensor | None
    cu_seqlens: Tensor | None


@shows_options
def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    objective: Chosen = "dapo",
    **options: Unpack[LogprobsOptions],
) -> LossOutput:
    """``dapo_loss`` from log-probs that are already there: O(tokens).

    Args:
        logprobs: [T] packed or [B, L] padded, of the tokens under the policy being trained; differentiable.
        entropy: same shape, differentiable; needed when ``entropy_coef`` is not 0.

    The other arguments and the errors are those of ``dapo_loss``.
    """
    entropy = options.pop("entropy", None)
    layout = token_layout("policy_loss", "logprobs", logprobs, options.pop("cu_seqlens", None))
    call = PolicyCall.of(layout, objective, old_logprobs, advantages, options)
    if call.needs_entropy and entropy is None:
        field = "entropy_coef" if call.objective.entropy_coef != 0 else "top_entropy"
        raise ValueError(f"policy_loss: {field}={getattr(call.objective, field):g} needs entropy, {layout.describe()}")
    entropies = None if entropy is None else layout.per_token("entropy", entropy, keep_grad=True)
    served_by = backend_for("policy_loss", logprobs.device, layout.dtype)
    flat = layout.per_token("logprobs", logprobs, keep_grad=True)
    layout.check_logprobs("logprobs", flat.detach(), call.tokens.live)
    return _of_stats(call, flat, entropies, served_by)


def _from_logits(
    caller: str,
    logits: Tensor,
    target_ids: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    objective: Chosen,
    options: LogitsOptions,
) -> LossOutput:
    logits, shard = logits_of_call(caller, logits, options.pop("group", None))
    valid = options.pop("valid_vocab", None)
    with Telling(shard, logits):
        layout = layout_of(caller, "logits", logits, options.pop("cu_seqlens", None), target_ids=target_ids)
        in_place = check_flag(layout, "inplace_backward", options.pop("inplace_backward", False))
        call, asked = _row_call(layout, target_ids, old_logprobs, advantages, objective, options)
        served_by = backend_for(caller, logits.device, logits.dtype, logits.shape[-1])
        # A compiled graph has no use for the in-place form: the compiler plans buffers itself.
        in_place = in_place and from_rows.may_work_in_place(logits)
        if in_place:
            check_rows_apart(layout, logits)
    server = shared_server(layout, shard, logits, served_by, asked, valid, call)
    call = call.shared_by(None if shard is None else shard.group)
    if not call.one_visit:
        stats = from_rows.stats_of(logits, asked, server, in_place)
        return _of_stats(call, stats.logprobs, stats.entropy, served_by)
    if in_place:
        weights, unit = gradient_unit(logits.dtype, call.tokens.weights)
        rest = (asked, call.tokens._replace(weights=weights), call.scalars, server)
        loss, *reported, _ = from_rows.LossInPlace.apply(logits, *rest)
        return _output(call, loss / unit, *reported)
    out = from_rows.logits_loss(logits, asked, call.tokens, call.scalars, server)
    return _output(call, out.loss, out.logprobs, out.entropy, out.clip_hit, out.ref_kl)


def _from_hidden(
    caller: str,
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    objective: Chosen,
    options: LinearOptions,
) -> LossOutput:
    hidden, weight, shard = head_of_ranks(caller, hidden, weight, options)
    with Telling(shard, weight):
        layout = layout_of(caller, "hidden", hidden, options.pop("cu_seqlens", None), parts_of(shard), target_ids)
        head, plan = head_of_call(layout, hidden, weight, options.get("mask"), options)
        call, asked = _row_call(layout, target_ids, old_logprobs, advantages, objective, options)
    head, plan = shared_plan(layout, shard, head, plan, asked, call)
    call = call.shared_by(None if shard is None else shard.group)
    needs = Needs.of([torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad for x in head])
    if not any(needs) or not (call.one_visit or call.own_alone):
        stats = from_hidden.linear_stats(head, asked, plan)
        return _of_stats(call, stats.logprobs, stats.entropy, plan.backend)
    weights, unit = gradient_unit(head.hidden.dtype, call.tokens.weights)
    tokens = call.tokens._replace(weights=weights)
    with as_number(call.objective.own) as own:
        out = from_hidden.linear_loss(head, asked, tokens, call.scalars._replace(own=own), needs, plan)
    return _output(call, out.loss / unit, *out[1:5])


def _row_call(
    layout: Layout,
    target_ids: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    objective: Chosen,
    options: RowOptions,
) -> tuple[PolicyCall, Asked]:
    want_entropy = check_flag(layout, "entropy", options.pop("entropy", False))
    temperature, sampling_mask = options.pop("temperature", 1.0), options.pop("sampling_mask", None)
    call = PolicyCall.of(layout, objective, old_logprobs, advantages, options)
    want_entropy = want_entropy or call.needs_entropy
    return call, layout.asked(target_ids, temperature, call.tokens.live, want_entropy, sampling_mask)


def _of_stats(call: PolicyCall, logprobs: Tensor, entropy: Tensor | None, served_by: str) -> LossOutput:
    live = call.tokens.live
    loss, clip_hit, ref_kl, log_ratio = loss_of_stats(call, logprobs, entropy, served_by)
    logprobs = torch.where(live, logprobs.detach(), 0.0)
    entropy = None if entropy is None else torch.where(live, entropy.detach(), 0.0)
    return _output(call, loss, logprobs, entropy, clip_hit, ref_kl, log_ratio)


def _output(
    call: PolicyCall,
    loss: Tensor,
    logprobs: Tensor,
    entropy: Tensor | None,
    clip_hit: Tensor | None,
    ref_kl: Tensor | None,
    log_ratio: Tensor | None = None,
) -> LossOutput:
    """Per-token results [N], zeros on dead tokens, in the caller's layout."""
    tokens, shape = call.tokens, call.layout.shape
    old, ref = tokens.old_logprobs, tokens.ref_logprobs
    reported = PerToken(tokens.live, logprobs, old, ref, log_ratio, clip_hit, ref_kl, entropy)
    # What a compiled graph does not return it does not compute.
    metrics = token_sums(reported) if torch.compiler.is_compiling() else Metrics(reported)
    if len(shape) > 1:
        logprobs, entropy = logprobs.view(shape), None if entropy is None else entropy.view(shape)
    return LossOutput(loss, logprobs, entropy, metrics)
