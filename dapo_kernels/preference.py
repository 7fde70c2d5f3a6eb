"""Preference losses (DPO and its variants) over pairs of responses, from logits, hidden states or log-probs.

The gradient of a token depends on all log-probs of both responses of its pair. So there are two passes over the
vocabulary with an O(tokens) step between them, which autograd differentiates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from dapo_kernels.backends import backend_for, call_from_logits, starts_of_rows
from dapo_kernels.call import checked_denominator
from dapo_kernels.engine import hidden as from_hidden
from dapo_kernels.engine import rows as from_rows
from dapo_kernels.engine.shards import checksum
from dapo_kernels.head import head_of_call
from dapo_kernels.layout import (
    ROUNDED,
    Layout,
    check_flag,
    check_not_rounded,
    check_rows_apart,
    check_tensor,
    layout_of,
    token_layout,
)
from dapo_kernels.metrics import count_positive
from dapo_kernels.objectives.aggregate import sequence_sums
from dapo_kernels.objectives.pairs import PairLoss
from dapo_kernels.records import Default, HeadOptions, Terms, readable
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
from dapo_kernels.signature import refuse_unknown, shows_options


class PreferenceOutput(NamedTuple):
    """The result of a preference loss.

    ``loss`` is 0-d and carries the gradient. The rest is detached: ``rewards`` [P, 2] of each pair, β·Σ(ℓ − ℓ_ref) of
    the chosen and of the rejected response, 0 if the pair does not count; ``logprobs`` and ``entropy`` in the layout of
    ``target_ids``, 0 on masked tokens (``entropy`` is ``None`` unless requested); ``metrics``, sums over pairs, see
    ``summarize``.

    Example:
        >>> import torch
        >>> from dapo_kernels import PreferenceOutput, preference_loss_from_logprobs
        >>> out = preference_loss_from_logprobs(torch.tensor([[-1.0], [-2.0]]), None)
        >>> isinstance(out, PreferenceOutput), out.rewards.shape
        (True, torch.Size([1, 2]))
    """

    loss: Tensor
    rewards: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    metrics: dict[str, Tensor]


class PairOptions(TypedDict, total=False):
    """The keywords of every preference loss. ``preference_loss`` documents them."""

    beta: Annotated[float, Default(PairLoss.beta)]
    loss_type: Annotated[Literal["sigmoid", "hinge", "ipo"], Default(PairLoss.loss_type)]
    label_smoothing: Annotated[float, Default(PairLoss.label_smoothing)]
    pairs: Tensor | None
    mask: Tensor | None
    cu_seqlens: Tensor | None
    denominator: float | Tensor | None


class PairRowOptions(PairOptions, total=False):
    temperature: Annotated[float | Tensor, Default(1.0)]
    entropy: Annotated[bool, Default(False)]


class PairLogitsOptions(PairRowOptions, GroupOption, total=False):
    inplace_backward: Annotated[bool, Default(False)]
    valid_vocab: int | None


class PairLinearOptions(PairRowOptions, HeadOptions, ShardOptions, total=False):
    pass


class PairLogprobsOptions(PairOptions, total=False):
    entropy: Tensor | None


@shows_options
def preference_loss(
    logits: Tensor, target_ids: Tensor, ref_logprobs: Tensor | None, **options: Unpack[PairLogitsOptions]
) -> PreferenceOutput:
    """Compute the DPO loss, or a variant, of pairs of responses from their logits.

    With ℓ = log softmax(logits/τ)[target], r = Σ(ℓ − ℓ_ref) over the live tokens of a response, w the chosen and l the
    rejected response of a pair, P the number of pairs (Rafailov et al. 2023, eq. 7)::

        loss = −1/P Σ log σ(β(r_w − r_l))

    A pair counts if both its responses have a live token. Tokens that are in no such pair have no effect.

    Args:
        logits: [T, V] packed with ``cu_seqlens`` or [B, L, V] padded; dtypes and strides as in ``dapo_loss``.
            ``logits[t]`` predicts ``target_ids[t]``: shift before the call.
        target_ids: [T] or [B, L], integers in [0, V).
        ref_logprobs: float32, under the reference policy: per token, or summed over the live tokens of each sequence,
            [S] / [B]; detached. ``None``: no reference, ℓ_ref = 0.
        beta: β, positive; 0.1 by default.
        loss_type: ``"sigmoid"`` (DPO), ``"hinge"`` or ``"ipo"``, whose formulas are in docs/objectives.md.
        label_smoothing: with ``"sigmoid"``, the share of pairs assumed to be labelled the wrong way round, in
            [0, 0.5).
        pairs: int64 [P, 2], the sequences (rows of the padded layout) of each pair, the chosen one first. A sequence
            may be in several pairs, or in none. By default sequence 2i is chosen and 2i + 1 rejected.
        mask: same shape as ``target_ids``: the tokens that count, those of the responses. The others may hold anything,
            also NaN.
        cu_seqlens: int32 [S+1], the boundaries of packed sequences.
        temperature: positive number, or one per token; 1 by default.
        denominator: replaces the local count of pairs in the mean; a number or a 0-d tensor, the count over all
            micro-batches and ranks. Both responses of a pair must be in one micro-batch.
        entropy: also return the entropy of every live token.
        inplace_backward: let the backward pass overwrite the logits with their gradient.
        valid_vocab, group: as in ``dapo_loss``.

    Returns:
        ``PreferenceOutput``: the loss, 0-d, and detached rewards, log-probs, entropies (or None) and metrics.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, what was expected and what it got.
        IndexError: a live token's target is outside [0, V) (on CUDA: an asynchronous device assert).

    Example:
        >>> import torch
        >>> from dapo_kernels import preference_loss
        >>> logits = torch.zeros(2, 3, 5, requires_grad=True)  # row 0 is the chosen response, row 1 the rejected one
        >>> ids = torch.tensor([[1, 2, 3], [4, 0, 1]])
        >>> out = preference_loss(logits, ids, ref_logprobs=torch.full((2, 3), 0.2).log(), beta=0.1)
        >>> out.loss.backward()
        >>> round(out.loss.item(), 4)  # the policy is the reference: log 2
        0.6931
    """
    logits, shard = logits_of_call("preference_loss", logits, options.pop("group", None))
    valid = options.pop("valid_vocab", None)
    with RaiseEverywhere(shard, logits):
        layout = layout_of("preference_loss", "logits", logits, options.pop("cu_seqlens", None), target_ids=target_ids)
        in_place = check_flag(layout, "inplace_backward", options.pop("inplace_backward", False))
        want_entropy = check_flag(layout, "entropy", options.pop("entropy", False))
        temperature = options.pop("temperature", 1.0)
        call = PairCall.of(layout, ref_logprobs, options)
        request = layout.request(target_ids, temperature, call.live, want_entropy)
        kind = call_from_logits(logits), starts_of_rows(logits)
        backend_name = backend_for(layout.caller, logits.device, logits.dtype, logits.shape[-1], *kind)
        in_place = in_place and from_rows.may_work_in_place(logits, *request)
        if in_place:
            check_rows_apart(layout, logits)
    server = shared_server(layout, shard, logits, backend_name, request, valid, call)
    stats = from_rows.stats_of(logits, request, server, in_place)
    return call.output(stats.logprobs, stats.entropy)


@shows_options
def linear_preference_loss(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    ref_logprobs: Tensor | None,
    **options: Unpack[PairLinearOptions],
) -> PreferenceOutput:
    """Compute ``preference_loss`` of ``softcap(hidden · weightᵀ + bias)``, a chunk of tokens at a time.

    The backward pass recomputes the logits: four GEMMs in total, and no [tokens, vocab] tensor is kept.

    Args:
        hidden: [T, H] packed with ``cu_seqlens`` or [B, L, H] padded.
        weight: [V, H], the output head (``lm_head.weight``), same dtype as ``hidden``.
        bias, softcap and the other options of the head, group, sequence_parallel: as in ``linear_dapo_loss``.

    The other arguments, the result and the errors are those of ``preference_loss``.

    Returns:
        ``PreferenceOutput``: the loss, 0-d, and detached rewards, log-probs, entropies (or None) and metrics.

    Example:
        >>> import torch
        >>> from dapo_kernels import linear_preference_loss
        >>> hidden, weight = torch.ones(2, 3, 8), torch.zeros(5, 8, requires_grad=True)
        >>> ids = torch.tensor([[1, 2, 3], [4, 0, 1]])
        >>> out = linear_preference_loss(hidden, weight, ids, ref_logprobs=None, loss_type="hinge")
        >>> out.loss.item()
        1.0
    """
    hidden, weight, shard = head_of_ranks("linear_preference_loss", hidden, weight, options)
    with RaiseEverywhere(shard, weight):
        cu_seqlens = options.pop("cu_seqlens", None)
        layout = layout_of("linear_preference_loss", "hidden", hidden, cu_seqlens, parts_of(shard), target_ids)
        want_entropy = check_flag(layout, "entropy", options.pop("entropy", False))
        temperature = options.pop("temperature", 1.0)
        left_out = options.get("pairs") if options.get("mask") is None else options["mask"]  # either can exclude tokens
        head, plan = head_of_call(layout, hidden, weight, left_out, options)
        call = PairCall.of(layout, ref_logprobs, options)
        request = layout.request(target_ids, temperature, call.live, want_entropy)
    head, plan = shared_plan(layout, shard, head, plan, request, call)
    stats = from_hidden.linear_stats(head, request, plan)
    return call.output(stats.logprobs, stats.entropy)


@shows_options
def preference_loss_from_logprobs(
    logprobs: Tensor, ref_logprobs: Tensor | None, **options: Unpack[PairLogprobsOptions]
) -> PreferenceOutput:
    """Compute ``preference_loss`` from existing log-probs: O(tokens).

    Args:
        logprobs: [T] packed with ``cu_seqlens`` or [B, L] padded; differentiable.
        entropy: same shape; reported in the metrics.

    The other arguments, the result and the errors are those of ``preference_loss``.

    Returns:
        ``PreferenceOutput``: the loss, 0-d, and detached rewards, log-probs, entropies (or None) and metrics.

    Example:
        >>> import torch
        >>> from dapo_kernels import preference_loss_from_logprobs
        >>> logprobs = torch.tensor([[-1.0, -1.0], [-2.0, -2.0]], requires_grad=True)  # chosen, rejected
        >>> out = preference_loss_from_logprobs(logprobs, ref_logprobs=None, beta=0.5)
        >>> round(out.loss.item(), 4), out.rewards.tolist()  # log(1 + e^−1)
        (0.3133, [[-1.0, -2.0]])
    """
    entropy = options.pop("entropy", None)
    layout = token_layout("preference_loss_from_logprobs", "logprobs", logprobs, options.pop("cu_seqlens", None))
    if isinstance(ref_logprobs, Tensor) and logprobs.dtype in ROUNDED and ref_logprobs.shape == logprobs.shape:
        ref_logprobs = ref_logprobs.float()  # both are rounded alike
    call = PairCall.of(layout, ref_logprobs, options)
    entropies = None if entropy is None else layout.per_token("entropy", entropy)
    flat = layout.per_token("logprobs", logprobs, keep_grad=True)
    layout.check_logprobs("logprobs", flat.detach(), call.live)
    return call.output(flat, entropies)


@dataclass(frozen=True)
class PairCall:
    """A validated call of a preference loss."""

    layout: Layout
    loss: PairLoss
    pairs: Tensor  # int64 [P, 2]
    counts: Tensor  # bool [P]
    live: Tensor  # bool [N]: in a pair that counts
    sequence_ids: Tensor  # int64 [N]
    lengths: Tensor  # float64 [S], live tokens
    ref_sums: Tensor | None  # float64 [S], if the reference is per sequence
    ref_logprobs: Tensor | None  # [N], if it is per token
    denominator: float | Tensor | None

    @classmethod
    def of(cls, layout: Layout, ref_logprobs: Tensor | None, options: PairOptions) -> PairCall:
        """Check a call and flatten it."""
        check_not_rounded(layout.caller, ref_logprobs=ref_logprobs)
        given: dict[str, Any] = dict(options)
        pairs, mask, denominator = (given.pop(name, None) for name in ("pairs", "mask", "denominator"))
        refuse_unknown(layout.caller, [name for name in given if name not in ("loss_type", "beta", "label_smoothing")])
        try:
            loss = PairLoss(**given)
        except ValueError as error:
            raise ValueError(f"{layout.caller}: {error}") from None
        pairs, sequence_ids = _pairs(layout, pairs), layout.sequence_ids()
        n = layout.n_sequences
        assert n is not None
        assert sequence_ids is not None
        live = layout.live(mask)
        lengths = sequence_sums(live.double(), sequence_ids, n)
        counts = (lengths[pairs] > 0).all(1)
        in_a_pair = sequence_sums(counts.double().repeat_interleave(2), pairs.flatten(), n) > 0
        per_token = isinstance(ref_logprobs, Tensor) and ref_logprobs.shape == layout.shape
        call = cls(
            layout=layout,
            loss=loss,
            pairs=pairs,
            counts=counts,
            live=live & in_a_pair[sequence_ids],
            sequence_ids=sequence_ids,
            lengths=lengths,
            ref_sums=None if ref_logprobs is None or per_token else _per_sequence(layout, ref_logprobs),
            ref_logprobs=layout.per_token("ref_logprobs", ref_logprobs) if per_token else None,
            denominator=checked_denominator(layout, denominator, counts),
        )
        if call.reference is not None:
            layout.check_logprobs("ref_logprobs", call.reference, call.live)
        return call

    @property
    def reference(self) -> Tensor | None:
        """Return [N], the reference's log-prob of each token, or that of its whole sequence."""
        return self.ref_logprobs if self.ref_sums is None else self.ref_sums[self.sequence_ids]

    @property
    def terms(self) -> Terms:
        """The values that must be the same on all ranks of a group."""
        which = checksum(self.counts.repeat_interleave(2), [self.pairs.flatten()])
        count = self.denominator if isinstance(self.denominator, Tensor) else None
        settings = f"{vars(self.loss)}, denominator {self.denominator if count is None else None}"
        return Terms(settings, (self.sequence_ids, self.reference, which, count))

    def output(self, logprobs: Tensor, entropy: Tensor | None) -> PreferenceOutput:
        """Compute the loss from log-probs [N], differentiable, and entropies [N]."""
        counts, live = self.counts, self.live
        sums = self._over_sequences(logprobs if self.ref_logprobs is None else logprobs - self.ref_logprobs)
        if self.ref_sums is not None:
            sums = sums - self.ref_sums
        log_ratios = torch.where(counts[:, None], sums[self.pairs], 0.0)
        n_pairs = counts.sum().clamp(min=1) if self.denominator is None else self.denominator
        losses = self.loss(log_ratios, self.lengths[self.pairs]) / n_pairs
        loss = torch.where(counts, losses, 0.0).sum().to(logprobs.dtype)
        logprobs = torch.where(live, logprobs.detach(), 0.0)
        entropy = None if entropy is None else torch.where(live, entropy.detach(), 0.0)
        rewards = self.loss.beta * log_ratios.detach()
        metrics = self._metrics(rewards, logprobs, entropy)
        shape = self.layout.shape
        entropy = None if entropy is None else entropy.view(shape)
        return PreferenceOutput(loss, rewards.to(logprobs.dtype), logprobs.view(shape), entropy, metrics)

    def _over_sequences(self, values: Tensor) -> Tensor:
        """Return sums over live tokens, float64 [S]. The log-probs of a long response add up to about −10⁴, and a
        reward needs the fourth decimal.
        """
        n = self.layout.n_sequences
        assert n is not None
        return sequence_sums(torch.where(self.live, values, 0.0).double(), self.sequence_ids, n)

    def _metrics(self, rewards: Tensor, logprobs: Tensor, entropy: Tensor | None) -> dict[str, Tensor]:
        """Return the metrics. All inputs are detached."""
        sums = torch.where(self.counts[:, None], self._over_sequences(logprobs)[self.pairs], 0.0).sum(0)
        metrics = {
            "pairs": self.counts.sum(),
            "tokens": self.live.sum(),
            "accuracy": (rewards[:, 0] > rewards[:, 1]).sum(),
            "margin": (rewards[:, 0] - rewards[:, 1]).sum(),
            "reward_chosen": rewards[:, 0].sum(),
            "reward_rejected": rewards[:, 1].sum(),
            "logprob_chosen": sums[0],
            "logprob_rejected": sums[1],
            "nonfinite": (self.live & ~torch.isfinite(logprobs)).sum(),
            "positive_logprobs": count_positive(self.live, logprobs, self.reference),
        }
        return metrics if entropy is None else metrics | {"entropy": entropy.sum()}


def _pairs(layout: Layout, pairs: Any) -> Tensor:
    """Return int64 [P, 2], the given pairs or neighbours."""
    n = layout.n_sequences
    if n is None:
        raise ValueError(f"{layout.caller}: pass cu_seqlens (int32 [S+1]) with the packed layout")
    if pairs is None:
        if n % 2:
            raise ValueError(
                f"{layout.caller}: expected an even number of sequences, 2i chosen and 2i + 1 rejected, or pairs; "
                f"got {n} sequences"
            )
        return torch.arange(n, device=layout.device).view(-1, 2)
    check_tensor(layout.caller, "pairs", pairs, "an integer tensor [P, 2]")
    if pairs.is_floating_point() or pairs.dtype == torch.bool:
        raise TypeError(f"{layout.caller}: pairs must be integers, got {pairs.dtype}")
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise layout.fail("pairs", "[P, 2], chosen and rejected", list(pairs.shape))
    if pairs.device != layout.device:
        raise layout.fail("pairs", f"on {layout.device} like the rest", pairs.device)
    if readable(pairs) and not bool(((pairs >= 0) & (pairs < n)).all()):
        raise layout.fail("pairs", f"sequences from 0 to {n - 1}", f"{int(pairs.min())} to {int(pairs.max())}")
    return pairs.to(torch.int64)


def _per_sequence(layout: Layout, ref_logprobs: Any) -> Tensor:
    check_tensor(layout.caller, "ref_logprobs", ref_logprobs, f"a tensor {layout.describe()} or per sequence")
    n = layout.n_sequences
    if tuple(ref_logprobs.shape) != (n,):
        name = "[S]" if len(layout.shape) == 1 else "[B]"
        raise layout.fail("ref_logprobs", f"{layout.describe()} or {name}=[{n}]", list(ref_logprobs.shape))
    if ref_logprobs.device != layout.device:
        raise layout.fail("ref_logprobs", f"on {layout.device} like the rest", ref_logprobs.device)
    return ref_logprobs.detach().double()
