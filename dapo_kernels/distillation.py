"""The divergence of the policy's whole distribution from a reference's, both from hidden states and a head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from dapo_kernels.call import checked_denominator
from dapo_kernels.engine.distillation import linear_divergence
from dapo_kernels.engine.gradients import gradient_unit
from dapo_kernels.head import head_of_call
from dapo_kernels.layout import Layout, check_valid_vocab, layout_of
from dapo_kernels.objectives.aggregate import token_weights
from dapo_kernels.objectives.table import OBJECTIVES, is_number
from dapo_kernels.records import Head, HeadOptions, Needs, Plan
from dapo_kernels.signature import shows_options


class DistillationOutput(NamedTuple):
    """``loss`` 0-d, carrying the gradient; ``divergence`` of every token, detached, in the layout of ``hidden``, 0 on
    dead tokens."""

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
    """The mean over live tokens of a divergence between the policy's distribution p over the vocabulary and the
    reference's, q (a teacher's, or that of the policy before), exact, a chunk of tokens at a time.

    With m = (1 − β)·p + β·q, of every token (Agarwal et al. 2023, eq. 1; β as in TRL's GKD and in Liger)::

        β = 0:      KL(q‖p)                                forward: cover all that the reference does
        0 < β < 1:  β·KL(q‖m) + (1 − β)·KL(p‖m)            generalized Jensen-Shannon
        β = 1:      KL(p‖q)                                reverse: do nothing that the reference does not

    The divergence is +∞ where a token of the vocabulary is possible in q alone (β = 0) or in p alone (β = 1): its logit
    is −∞ in the other. The gradient of such a loss is p − q with β = 0, and not finite with β = 1.

    The gradient, of the policy's hidden states and head alone, is formed together with the loss: four GEMMs, of which
    one is the reference's; it can be handed out once. Under ``no_grad`` the call costs two.

    Args:
        hidden: [T, H] packed or [B, L, H] padded.
        weight: [V, H], the policy's output head.
        ref_hidden: [T, K] or [B, L, K], of the same tokens; a constant. K and the dtype are the reference's own.
        ref_weight: [V, K], its output head over the same vocabulary.
        beta: β, in [0, 1]. Between the ends the divergence is at most log 2 and goes to 0 towards them.
        mask: [T] or [B, L], which tokens count; the others may hold anything, NaN included.
        temperature: of both distributions: a positive number, or one per token.
        denominator: replaces the local count of tokens in the mean; a number or a 0-d tensor, the count over all
            micro-batches and ranks.
        ref_bias, ref_softcap: as ``bias`` and ``softcap``, of the reference.
        options: those of the head, as in ``linear_dapo_loss``; ``float32_logits``, ``chunk_bytes`` and ``valid_vocab``
            are of both heads, which may then be padded differently.

    Heads shared by ranks (``group=``, ``DTensor``) are not served.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, what was expected and what came.
    """
    layout = layout_of("linear_distillation_loss", "hidden", hidden)
    given: dict[str, Any] = dict(options)
    of_ref: dict[str, Any] = {name: given[name] for name in ("float32_logits", "valid_vocab") if name in given}
    head, plan = head_of_call(layout, hidden, weight, mask, given)
    if given:
        raise TypeError(f"{layout.caller}: unknown argument {next(iter(given))!r}")
    if not (is_number(beta) and 0 <= beta <= 1):
        raise layout.fail("beta", "a number in [0, 1]", repr(beta))
    ref = _reference(layout, ref_hidden, ref_weight, {"bias": ref_bias, "softcap": ref_softcap, **of_ref})
    _check_vocabulary(layout, head, ref, plan)
    live = layout.live(mask)
    count = checked_denominator(layout, denominator, live)
    weights = token_weights(OBJECTIVES["dapo"], live, mask is None, None, 0, count, layout.dtype)
    nowhere = torch.zeros(layout.shape, dtype=torch.int64, device=layout.device)
    asked = layout.asked(nowhere, temperature, live, want_entropy=False)
    needs = Needs.of([torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad for x in head])
    weights, unit = gradient_unit(head.hidden.dtype, weights)
    out = linear_divergence(head, ref, asked, weights, float(beta), needs, plan)
    return DistillationOutput(out.loss / unit, out.divergence.view(layout.shape))


def _reference(layout: Layout, hidden: Any, weight: Any, options: dict[str, Any]) -> Head:
    caller = f"{layout.caller}, of the reference"
    own = layout_of(caller, "hidden", hidden)
    if own.shape != layout.shape:
        raise replace(layout, caller=caller).fail("hidden", f"of the same tokens, {layout.describe()}", own.describe())
    if own.device != layout.device:
        raise own.fail("hidden", f"on {layout.device} like the rest", own.device)
    with torch.no_grad():
        head, _ = head_of_call(own, hidden, weight, None, options)
    return Head._make(x.detach() if isinstance(x, Tensor) else x for x in head)


def _check_vocabulary(layout: Layout, head: Head, ref: Head, plan: Plan) -> None:
    n, of_ref = head.weight.shape[0], ref.weight.shape[0]
    check_valid_vocab(layout, plan.valid, min(n, of_ref))
    if plan.valid is None and n != of_ref:
        raise layout.fail("ref_weight", f"[V, K] with V={n} like weight, or valid_vocab", [of_ref, ref.weight.shape[1]])
