"""The divergence between the whole distributions of the policy and a reference, from their hidden states and heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from dapo_kernels.call import checked_denominator
from dapo_kernels.engine.distillation import linear_divergence
from dapo_kernels.engine.gradients import OF_HIDDEN, gradient_unit
from dapo_kernels.head import head_of_call
from dapo_kernels.layout import Layout, check_valid_vocab, layout_of
from dapo_kernels.objectives.aggregate import token_weights
from dapo_kernels.objectives.table import OBJECTIVES, is_number
from dapo_kernels.records import Head, HeadOptions, Needs, Plan
from dapo_kernels.signature import refuse_unknown, shows_options


class DistillationOutput(NamedTuple):
    """The result of a distillation loss.

    ``loss`` is 0-d and carries the gradient. ``divergence`` is per token, detached, in the layout of ``hidden``, 0 on
    masked tokens.

    Example:
        >>> import torch
        >>> from dapo_kernels import DistillationOutput, linear_distillation_loss
        >>> hidden, weight = torch.ones(2, 8), torch.zeros(4, 8)
        >>> out = linear_distillation_loss(hidden, weight, hidden, weight)
        >>> isinstance(out, DistillationOutput), out.divergence.tolist()
        (True, [0.0, 0.0])
    """

    loss: Tensor
    divergence: Tensor


@shows_options
def linear_distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    *,
    beta: float = 0.5,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    denominator: float | Tensor | None = None,
    ref_bias: Tensor | None = None,
    ref_softcap: float | None = None,
    **options: Unpack[HeadOptions],
) -> DistillationOutput:
    """Compute the mean over live tokens of a divergence between the distributions of the policy, p, and a reference, q.

    The divergence is over the whole vocabulary and exact, computed in chunks of tokens. With m = (1 − β)·p + β·q, per
    token (Agarwal et al. 2023, eq. 1; β as in TRL's GKD and in Liger)::

        β = 0:      KL(q‖p)                                forward KL, mode-covering
        0 < β < 1:  β·KL(q‖m) + (1 − β)·KL(p‖m)            generalized Jensen-Shannon
        β = 1:      KL(p‖q)                                reverse KL, mode-seeking

    The divergence is +∞ if a token of the vocabulary is possible only in q (β = 0) or only in p (β = 1): its logit is
    −∞ in the other. The gradient is then p − q with β = 0, and not finite with β = 1.

    Only the policy's hidden states and head get gradients. They are computed together with the loss, with four GEMMs
    (one of them for the reference); ``backward`` can be called once. Under ``no_grad`` the call costs two GEMMs.

    Args:
        hidden: [T, H] packed or [B, L, H] padded.
        weight: [V, H], the policy's output head.
        ref_hidden: [T, K] or [B, L, K], of the same tokens; detached. K and the dtype may differ from the policy's.
        ref_weight: [V, K], the reference's output head over the same vocabulary.
        beta: β, in [0, 1]. Between 0 and 1 the divergence is at most log 2 and goes to 0 towards both ends.
        mask: [T] or [B, L]: which tokens count; the others may hold anything, also NaN.
        temperature: of both distributions: a positive number, or one per token.
        denominator: replaces the local count of tokens in the mean; a number or a 0-d tensor, the count over all
            micro-batches and ranks.
        ref_bias, ref_softcap: ``bias`` and ``softcap`` of the reference.
        options: those of the head, as in ``linear_dapo_loss``. ``float32_logits``, ``chunk_bytes`` and ``valid_vocab``
            apply to both heads, which may have different padding.

    Heads shared by ranks (``group=``, ``DTensor``) are not supported.

    Returns:
        ``DistillationOutput``: the loss, 0-d, and the divergence of each token, detached.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, what was expected and what it got.

    Example:
        >>> import torch
        >>> from dapo_kernels import linear_distillation_loss
        >>> hidden, weight = torch.ones(2, 1), torch.zeros(2, 1, requires_grad=True)  # the policy: 1/2, 1/2
        >>> ref_weight = torch.tensor([[0.75], [0.25]]).log()  # the reference: 3/4, 1/4
        >>> out = linear_distillation_loss(hidden, weight, hidden, ref_weight, beta=1.0)
        >>> round(out.loss.item(), 4)  # KL(p‖q) = ½ log(2/3) + ½ log 2
        0.1438
    """
    layout = layout_of("linear_distillation_loss", "hidden", hidden)
    given: dict[str, Any] = dict(options)
    ref_options: dict[str, Any] = {name: given[name] for name in ("float32_logits", "valid_vocab") if name in given}
    head, plan = head_of_call(layout, hidden, weight, mask, given)
    refuse_unknown(layout.caller, given)
    if not (is_number(beta) and 0 <= beta <= 1):
        raise layout.fail("beta", "a number in [0, 1]", repr(beta))
    ref = _reference(layout, ref_hidden, ref_weight, {"bias": ref_bias, "softcap": ref_softcap, **ref_options})
    _check_vocabulary(layout, head, ref, plan)
    live = layout.live(mask)
    count = checked_denominator(layout, denominator, live)
    weights = token_weights(OBJECTIVES["dapo"], live, mask is None, None, 0, count, layout.dtype)
    no_targets = torch.zeros(layout.shape, dtype=torch.int64, device=layout.device)
    request = layout.request(no_targets, temperature, live, want_entropy=False)
    needs = Needs.of_head(head)
    weights, unit = gradient_unit(head.hidden.dtype, OF_HIDDEN, weights)
    out = linear_divergence(head, ref, request, weights, float(beta), needs, plan)
    return DistillationOutput(out.loss / unit, out.divergence.view(layout.shape))


def _reference(layout: Layout, hidden: Any, weight: Any, options: dict[str, Any]) -> Head:
    caller = f"{layout.caller}, of the reference"
    ref_layout = layout_of(caller, "hidden", hidden)
    if ref_layout.shape != layout.shape:
        got = ref_layout.describe()
        raise replace(layout, caller=caller).fail("hidden", f"of the same tokens, {layout.describe()}", got)
    if ref_layout.device != layout.device:
        raise ref_layout.fail("hidden", f"on {layout.device} like the rest", ref_layout.device)
    with torch.no_grad():
        head, _ = head_of_call(ref_layout, hidden, weight, None, options)
    return Head._make(x.detach() if isinstance(x, Tensor) else x for x in head)


def _check_vocabulary(layout: Layout, head: Head, ref: Head, plan: Plan) -> None:
    n, n_ref = head.weight.shape[0], ref.weight.shape[0]
    check_valid_vocab(layout, plan.valid, min(n, n_ref))
    if plan.valid is None and n != n_ref:
        raise layout.fail("ref_weight", f"[V, K] with V={n} like weight, or valid_vocab", [n_ref, ref.weight.shape[1]])
