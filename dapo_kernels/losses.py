"""The policy losses, from logits, hidden states or log-probs. Each checks its arguments and calls the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from dapo_kernels.backends import backend_for, call_from_logits, starts_of_rows
from dapo_kernels.call import LossOptions, PolicyCall, RowOptions
from dapo_kernels.engine import hidden as from_hidden
from dapo_kernels.engine import rows as from_rows
from dapo_kernels.engine.gradients import OF_HIDDEN, OF_LOGITS, gradient_unit
from dapo_kernels.engine.tokens import loss_of_stats
from dapo_kernels.head import head_of_call
from dapo_kernels.layout import (
    ROUNDED,
    Layout,
    check_flag,
    check_not_rounded,
    check_rows_apart,
    layout_of,
    token_layout,
)
from dapo_kernels.metrics import Metrics, PerToken, token_sums
from dapo_kernels.objectives.own import OwnLoss, as_number
from dapo_kernels.objectives.table import Objective
from dapo_kernels.records import Default, HeadOptions, Needs, RowRequest, Tokens
from dapo_kernels.sharding import (
    GroupOption,
    RaiseEverywhere,
    ShardOptions,
    head_of_ranks,
    logits_of_call,
    parts_of,
    shared_plan,
    shared_server,
)
from dapo_kernels.signature import shows_options

Chosen = str | Objective | OwnLoss


class LossOutput(NamedTuple):
    """The result of a policy loss.

    ``loss`` is 0-d and carries the gradient. ``logprobs`` and ``entropy`` are detached, in the layout of
    ``target_ids``, 0 on masked tokens; ``entropy`` is ``None`` if it was not computed. ``metrics`` are sums over live
    tokens (``ratio_max``: the maximum), computed when they are first read; add them up with ``summarize`` or
    ``reduce_metrics``. Read them before you change an input through a NumPy array that shares its memory: that change
    is not noticed.

    Example:
        >>> import torch
        >>> from dapo_kernels import LossOutput, policy_loss
        >>> out = policy_loss(torch.tensor([-0.5]), None, torch.tensor([1.0]))
        >>> isinstance(out, LossOutput), out.logprobs.tolist(), out.entropy
        (True, [-0.5], None)
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    metrics: Mapping[str, Tensor]


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
    """Compute the DAPO loss, or a related loss, of a batch of responses from their logits.

    With ℓ = log softmax(logits/τ)[target], ρ = exp(ℓ − ℓ_old), A the advantage and N the live tokens (DAPO, eq. 8)::

        loss = −1/N Σ_t min(ρ_t A_t, clip(ρ_t, 1 − clip_low, 1 + clip_high) A_t)

    N counts the whole mini-batch, as in the code released with the paper. Eq. 8 as printed averages within each
    prompt's group of responses first, and then over prompts: ``aggregate="prompt-mean-token-mean"``.

    Args:
        logits: [T, V] packed or [B, L, V] padded; float32, bfloat16 or float16 (float64 on the torch backend), any
            strides. ``logits[t]`` predicts ``target_ids[t]``: shift before the call. No other argument has a gradient.
        target_ids: [T] or [B, L], integers in [0, V).
        old_logprobs: same shape, float32 (16 bits, which hold two or three digits, are not allowed), log-probs under
            the policy that sampled; ``None`` means on-policy: ratio 1.
            On the CPU, log-probs above 0 (such as probabilities passed by mistake) raise an error; elsewhere the metric
            ``positive_logprobs`` counts their tokens.
        advantages: float32, per token, or per sequence [S] / [B]. In a packed batch with S = T they are per token.
        objective: a name in ``OBJECTIVES``, an ``Objective``, or a function ``fn(logprobs, entropy, tokens)`` that
            returns a loss per token, each [n] (docs/objectives.md, "A loss of your own"). Default: 'dapo'.
        mask: same shape as ``target_ids``, bool, or 0 and 1: which tokens train; a masked one may hold anything, NaN
            too. Default: None, all tokens, prompts included.
        cu_seqlens: int32 [S+1], the boundaries of packed sequences. Default: None.
        ref_logprobs: float32, per token, under the reference policy; required if ``kl_coef`` is not 0. Default: None.
        importance_weights: float32, per token or sequence (rollout correction); they multiply the policy term and
            KL-Cov's penalty, but not the reference KL or the entropy bonus. Default: None.
        temperature: positive number, or one per token. Default: 1.0.
        sampling_mask: a ``SamplingMask``: the tokens that top-p, top-k or min-p left for sampling. Log-probs, entropies
            and gradients are those of the softmax over them; other logits of the row are not read (docs/guide.md).
            Default: None.
        denominator: replaces the local count of tokens (or of sequences, or of prompts) in the mean; a number or a
            0-d tensor, the count over all micro-batches and ranks. Default: None.
        group_ids: integers [S] / [B], equal for sequences that answer the same prompt. Only with
            ``aggregate="prompt-mean-token-mean"``, which requires them, or ``group_tokens`` and ``denominator``.
            Default: None.
        group_tokens: [S] / [B], for each sequence the live tokens of its whole group over all micro-batches and ranks,
            if this call may not hold the whole group. Only with that aggregate. Default: None (counted).
        inplace_backward: let the gradient overwrite the logits' storage (already in this call if the objective allows
            one pass). The logits must not be used afterwards. Default: False.
        entropy: also return the entropy of every live token. Default: False.
        selection: with ``top_entropy``, ``clip_cov`` or ``kl_cov``, the selected tokens (bool, per token), computed
            beforehand over the whole batch (``dapo_kernels.select``), so that it does not depend on micro-batches;
            ``top_entropy`` also takes the entropy threshold as a number. Default: None.
        generator: for the random choice of ``clip_cov`` without ``selection``. Default: None.
        valid_vocab: number of columns that can be sampled, from the first. The columns behind them pad the vocabulary:
            they are ignored and get gradient zero. Targets are then in [0, valid_vocab). Default: None.
        group: a ``torch.distributed`` process group whose ranks each hold some columns of the logits, in the order of
            its ranks. All other arguments and the results are the same on all ranks; targets index the whole
            vocabulary. Not needed for a ``DTensor`` with ``Shard(-1)`` (docs/vocabulary-parallel.md). Default: None.
        clip_high and every other field of ``Objective``: override it for this call. Default: the objective's.

    Returns:
        ``LossOutput``: the loss, 0-d, detached log-probs, entropies (or None) and metrics.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, what was expected and what it got. If ranks
            of a ``group`` pass different tokens or options, all of them raise.
        IndexError: a live token's target, or an id in its ``sampling_mask``, is outside [0, V). On CUDA this is an
            asynchronous device assert, as is a target that its ``sampling_mask`` lacks (otherwise ValueError).

    Example:
        >>> import torch
        >>> from dapo_kernels import dapo_loss
        >>> logits = torch.zeros(2, 3, 5, requires_grad=True)  # 2 responses of 3 tokens, a vocabulary of 5
        >>> target_ids = torch.tensor([[1, 2, 3], [4, 0, 1]])
        >>> old_logprobs = torch.full((2, 3), 0.2).log()
        >>> out = dapo_loss(logits, target_ids, old_logprobs, advantages=torch.tensor([1.0, -0.5]))
        >>> out.loss.backward()
        >>> round(out.loss.item(), 4), logits.grad.shape
        (-0.25, torch.Size([2, 3, 5]))
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
    """Compute ``dapo_loss`` with an explicit objective.

    Args:
        objective: as in ``dapo_loss``, but without a default.

    The other arguments and the errors are those of ``dapo_loss``.

    Returns:
        ``LossOutput``: the loss, 0-d, detached log-probs, entropies (or None) and metrics.

    Example:
        >>> import torch
        >>> from dapo_kernels import policy_loss_from_logits
        >>> logits, ids = torch.zeros(4, 5), torch.tensor([0, 1, 2, 3])
        >>> out = policy_loss_from_logits(logits, ids, None, torch.ones(4), objective="cispo")
        >>> round(out.loss.item(), 4)  # −ℓ = log 5
        1.6094
    """
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
    """Compute ``dapo_loss`` of ``softcap(hidden · weightᵀ + bias)``, a chunk of tokens at a time.

    The gradient is computed together with the loss, with three GEMMs in total, and scaled by ``grad_output`` in the
    backward pass; ``backward`` can be called once. Objectives that need a whole sequence or batch first (``gspo``,
    ``top_entropy``, …) recompute the logits in the backward pass: four GEMMs. Inputs that do not require a gradient
    cost none; under ``no_grad`` the call costs one GEMM. The cost is proportional to the number of live tokens.

    Args:
        hidden: [T, H] packed or [B, L, H] padded.
        weight: [V, H], the output head (``lm_head.weight``), same dtype as ``hidden``.
        bias: [V], same dtype. Default: None.
        lora: an adapter of the head, ``LoraFactors(a [r, H], b [V, r], scale)`` with the same dtype. The weight is then
            weight + scale · b · a, which is never materialized. Those of a, b and weight that require a gradient get
            one. With ``group``, b has this rank's rows and a is the same on all ranks. Default: None.
        softcap: c of c·tanh(logits/c), applied before the temperature. Default: None.
        float32_logits: keep the logits of 16-bit inputs in float32. Default: False, they are rounded to the inputs'
            dtype, as in most models and rollout engines, on a CPU also after a softcap. Match the engine: otherwise the
            ratio contains the difference. On the CPU this product runs at the float32 rate.
        chunk_bytes: size of the logits buffer, the only O(V) memory per token. Default: None (192 MiB, on a
            GPU 1 GiB; more if a single chunk then avoids the float32 running sum of the weight's gradient).
        host_sync: on a GPU, whether the call may wait for the device once per pass to learn the number of live tokens.
            It then computes only those. Without waiting, all tokens go through the GEMMs, shapes depend only on the
            arguments, and the call can be captured in a CUDA graph. Default: None, it waits if a mask is given, because
            a wait costs microseconds and a token's GEMMs 6·H·V flops; but not during graph capture or under
            ``torch.cuda.set_sync_debug_mode``.
        main_grad: float32 [V, H] to which the backward pass adds the weight's gradient, like Megatron's ``main_grad``.
            ``weight.grad`` is not changed and hooks on it do not run. Every backward pass adds to it, also one that
            only asks for another tensor's gradient. Summing many micro-batches in a 16-bit ``.grad`` would lose digits.
            Default: None.
        group: a process group whose ranks each hold some rows of the head. Then ``weight`` [V/ranks, H], ``bias``,
            ``main_grad`` and their gradients are those of this rank, and ``hidden.grad`` is summed over the group. Not
            needed for a ``weight`` (and ``bias``) that is a ``Shard(0)`` ``DTensor`` (docs/vocabulary-parallel.md).
            Default: None.
        sequence_parallel: with a shared head, ``hidden`` is this rank's part of the tokens, [T/ranks, H] or
            [B, L/ranks, H]. It is gathered, and its gradient reduce-scattered. Per-token tensors are for all tokens.
            Default: False.

    The other arguments, the result and the errors are those of ``dapo_loss``. Softmax arithmetic is in float32.

    Returns:
        ``LossOutput``: the loss, 0-d, detached log-probs, entropies (or None) and metrics.

    Example:
        >>> import torch
        >>> from dapo_kernels import linear_dapo_loss
        >>> hidden = torch.ones(4, 8, requires_grad=True)  # 4 packed tokens
        >>> weight = torch.zeros(5, 8, requires_grad=True)  # the head: a vocabulary of 5
        >>> ids, mask = torch.tensor([0, 1, 2, 3]), torch.tensor([False, True, True, True])
        >>> out = linear_dapo_loss(hidden, weight, ids, None, torch.ones(4), mask=mask, clip_high=0.3)
        >>> out.loss.backward()
        >>> round(out.loss.item(), 4), out.metrics["tokens"].item(), weight.grad.shape
        (-1.0, 3, torch.Size([5, 8]))
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
    """Compute ``linear_dapo_loss`` with an explicit objective.

    Args:
        objective: as in ``dapo_loss``, but without a default.

    The other arguments and the errors are those of ``linear_dapo_loss``.

    Returns:
        ``LossOutput``: the loss, 0-d, detached log-probs, entropies (or None) and metrics.

    Example:
        >>> import torch
        >>> from dapo_kernels import policy_loss_from_hidden
        >>> hidden, weight, ids = torch.ones(4, 8), torch.zeros(5, 8), torch.tensor([0, 1, 2, 3])
        >>> out = policy_loss_from_hidden(hidden, weight, ids, None, torch.ones(4), objective="reinforce")
        >>> round(out.loss.item(), 4)  # −ℓ = log 5
        1.6094
    """
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
    """Compute ``dapo_loss`` from existing log-probs: O(tokens).

    Args:
        logprobs: [T] packed or [B, L] padded, of the tokens under the trained policy, at the temperature that the
            tokens were sampled with; differentiable. If they have 16 bits, old and reference log-probs may have, too.
        entropy: same shape, differentiable; required with ``entropy_coef`` or ``top_entropy``. Default: None.

    The other arguments and the errors are those of ``dapo_loss``, without those of logits, such as ``temperature``.

    Returns:
        ``LossOutput``: the loss, 0-d, detached log-probs, entropies (or None) and metrics.

    Example:
        >>> import torch
        >>> from dapo_kernels import policy_loss
        >>> old_logprobs = torch.tensor([-1.0, -2.0])
        >>> logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
        >>> out = policy_loss(logprobs, old_logprobs, torch.tensor([1.0, 1.0]))
        >>> round(out.loss.item(), 4)  # the first ratio, e^0.5, is clipped to 1.28
        -1.14
        >>> out.loss.backward()
        >>> logprobs.grad.tolist()
        [0.0, -0.5]
    """
    entropy = options.pop("entropy", None)
    layout = token_layout("policy_loss", "logprobs", logprobs, options.pop("cu_seqlens", None))
    if logprobs.dtype not in ROUNDED:  # otherwise all are rounded alike: the ratio is 1 on-policy
        check_not_rounded(layout.caller, old_logprobs=old_logprobs, ref_logprobs=options.get("ref_logprobs"))
    call = PolicyCall.of(layout, objective, old_logprobs, advantages, options)
    if call.needs_entropy and entropy is None:
        field = "entropy_coef" if call.objective.entropy_coef != 0 else "top_entropy"
        raise ValueError(f"policy_loss: {field}={getattr(call.objective, field):g} requires entropy, got None")
    entropies = None if entropy is None else layout.per_token("entropy", entropy, keep_grad=True)
    backend_name = backend_for("policy_loss", logprobs.device, layout.dtype)
    flat = layout.per_token("logprobs", logprobs, keep_grad=True)
    layout.check_logprobs("logprobs", flat.detach(), call.tokens.live)
    return _of_stats(call, flat, entropies, backend_name)


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
    with RaiseEverywhere(shard, logits):
        layout = layout_of(caller, "logits", logits, options.pop("cu_seqlens", None), target_ids=target_ids)
        in_place = check_flag(layout, "inplace_backward", options.pop("inplace_backward", False))
        call, request = _row_call(layout, target_ids, old_logprobs, advantages, objective, options)
        # The in-place form has no effect in a compiled graph: the compiler plans buffers itself.
        in_place = in_place and from_rows.may_work_in_place(logits, *request, *call.tokens)
        in_one_kernel = in_place and call.one_visit and shard is None
        kind = call_from_logits(logits, in_one_kernel, request.want_entropy), starts_of_rows(logits)
        backend_name = backend_for(caller, logits.device, logits.dtype, logits.shape[-1], *kind)
        if in_place:
            check_rows_apart(layout, logits)
    server = shared_server(layout, shard, logits, backend_name, request, valid, call)
    call = call.shared_by(None if shard is None else shard.group)
    if not call.one_visit:
        stats = from_rows.stats_of(logits, request, server, in_place)
        return _of_stats(call, stats.logprobs, stats.entropy, backend_name)
    if in_place:
        tokens, unit = _for_gradient(logits.dtype, OF_LOGITS, call.tokens)
        rest = (request, tokens, call.scalars, server)
        loss, *reported, _ = from_rows.LossInPlace.apply(logits, *rest)
        return _output(call, loss / unit, *reported)
    out = from_rows.logits_loss(logits, request, call.tokens, call.scalars, server)
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
    with RaiseEverywhere(shard, weight):
        layout = layout_of(caller, "hidden", hidden, options.pop("cu_seqlens", None), parts_of(shard), target_ids)
        head, plan = head_of_call(layout, hidden, weight, options.get("mask"), options)
        call, request = _row_call(layout, target_ids, old_logprobs, advantages, objective, options)
    head, plan = shared_plan(layout, shard, head, plan, request, call)
    call = call.shared_by(None if shard is None else shard.group)
    needs = Needs.of_head(head)
    if not any(needs) or not (call.one_visit or call.one_visit_user_loss):
        stats = from_hidden.linear_stats(head, request, plan)
        return _of_stats(call, stats.logprobs, stats.entropy, plan.backend)
    tokens, unit = _for_gradient(head.hidden.dtype, OF_HIDDEN, call.tokens)
    with as_number(call.objective.own) as own:
        out = from_hidden.linear_loss(head, request, tokens, call.scalars._replace(own=own), needs, plan)
    return _output(call, out.loss / unit, *out[1:5])


def _for_gradient(dtype: torch.dtype, largest: float, tokens: Tokens) -> tuple[Tokens, Tensor | float]:
    weights, unit = gradient_unit(dtype, largest, tokens.weights, tokens.advantages, tokens.importance_weights)
    return tokens._replace(weights=weights), unit


def _row_call(
    layout: Layout,
    target_ids: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    objective: Chosen,
    options: RowOptions,
) -> tuple[PolicyCall, RowRequest]:
    want_entropy = check_flag(layout, "entropy", options.pop("entropy", False))
    temperature, sampling_mask = options.pop("temperature", 1.0), options.pop("sampling_mask", None)
    check_not_rounded(layout.caller, old_logprobs=old_logprobs, ref_logprobs=options.get("ref_logprobs"))
    call = PolicyCall.of(layout, objective, old_logprobs, advantages, options)
    want_entropy = want_entropy or call.needs_entropy
    return call, layout.request(target_ids, temperature, call.tokens.live, want_entropy, sampling_mask)


def _of_stats(call: PolicyCall, logprobs: Tensor, entropy: Tensor | None, backend_name: str) -> LossOutput:
    live = call.tokens.live
    loss, clip_hit, ref_kl, log_ratio = loss_of_stats(call, logprobs, entropy, backend_name)
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
    """Return the result. Per-token results [N], zero on masked tokens, get the caller's layout."""
    tokens, shape = call.tokens, call.layout.shape
    old, ref = tokens.old_logprobs, tokens.ref_logprobs
    reported = PerToken(tokens.live, logprobs, old, ref, log_ratio, clip_hit, ref_kl, entropy)
    # A compiled graph does not compute what it does not return.
    metrics = token_sums(reported) if torch.compiler.is_compiling() else Metrics(reported)
    if len(shape) > 1:
        logprobs, entropy = logprobs.view(shape), None if entropy is None else entropy.view(shape)
    return LossOutput(loss, logprobs, entropy, metrics)
