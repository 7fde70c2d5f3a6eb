"""Check the options of a policy loss once, and turn them into one record.

T tokens packed, or B×L padded; S sequences; N = T or B·L rows. An option of every loss is a field of ``LossOptions``
and a step of ``PolicyCall.of``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from dapo_kernels.layout import Layout, SamplingMask
from dapo_kernels.objectives.aggregate import PromptGroups, sequence_sums, token_weights
from dapo_kernels.objectives.own import may_be_compiled_in, name_of
from dapo_kernels.objectives.surrogate import ObjectiveScalars
from dapo_kernels.objectives.table import PROMPT_MEAN, Objective, ObjectiveFields, is_number, resolve_objective
from dapo_kernels.records import Default, Terms, Tokens, readable


class LossOptions(ObjectiveFields, total=False):
    """The keywords of every loss. ``dapo_loss`` documents them."""

    mask: Tensor | None
    ref_logprobs: Tensor | None
    importance_weights: Tensor | None
    denominator: float | Tensor | None
    group_ids: Tensor | None
    group_tokens: Tensor | None
    selection: Tensor | float | None
    generator: torch.Generator | None


class RowOptions(LossOptions, total=False):
    """The keywords of losses from logits or hidden states."""

    cu_seqlens: Tensor | None
    temperature: Annotated[float | Tensor, Default(1.0)]
    entropy: Annotated[bool, Default(False)]
    sampling_mask: SamplingMask | None


_OF_GROUPS = ("group_ids", "group_tokens")
_OPTIONS = ("mask", "ref_logprobs", "importance_weights", "denominator", *_OF_GROUPS, "selection", "generator")


@dataclass(frozen=True)
class PolicyCall:
    """A validated call of a loss."""

    layout: Layout
    objective: Objective  # without the selections that ``tokens`` already contain
    scalars: ObjectiveScalars
    tokens: Tokens
    sequence_ids: Tensor | None
    selection: Tensor | float | None  # bool [N], or the entropy threshold of top_entropy
    generator: torch.Generator | None
    group: str | None = None  # of ranks that share the vocabulary; they must use the same random numbers

    def shared_by(self, group: str | None) -> PolicyCall:
        return self if group is None else replace(self, group=group)

    @property
    def terms(self) -> Terms:
        """The values that must be the same on all ranks of a group."""
        own, chosen = self.objective.own, self.selection
        fields = dict(vars(self.objective), surrogate=self.objective.surrogate if own is None else name_of(own))
        settings = f"objective {fields}, selection {chosen if isinstance(chosen, float) else None}"
        picked = chosen if isinstance(chosen, Tensor) else None
        return Terms(settings, (*self.tokens[1:], self.sequence_ids, picked))

    @property
    def needs_entropy(self) -> bool:
        return self.objective.entropy_coef != 0 or self.objective.top_entropy is not None

    @property
    def one_visit(self) -> bool:
        """Whether a token's gradient depends only on its own row: log-prob and gradient are computed in one visit."""
        return self.objective.one_pass and self.objective.own is None

    @property
    def one_visit_user_loss(self) -> bool:
        """Whether the same holds for a user-defined objective, which an operator can call between the kernels."""
        if not self.objective.one_pass or self.objective.own is None:
            return False
        return not torch.compiler.is_compiling() or may_be_compiled_in(self.objective.own)

    @classmethod
    def of(
        cls,
        layout: Layout,
        objective: str | Objective | Callable[..., Any],
        old_logprobs: Tensor | None,
        advantages: Tensor,
        options: LossOptions,
    ) -> PolicyCall:
        """Check a loss call and flatten it. Every token gets its weight in the scalar loss."""
        given: dict[str, Any] = dict(options)
        mask, ref_logprobs, importance_weights, denominator, group_ids, group_tokens, selection, generator = (
            given.pop(name, None) for name in _OPTIONS
        )
        chosen = resolve_objective(layout.caller, objective, given)
        # A schedule of a row of the table has reached 0: ref_logprobs are checked, but not read.
        ended = chosen.own is None and given.get("kl_coef") == 0
        _check_combination(layout, chosen, old_logprobs, None if ended else ref_logprobs)
        live = layout.live(mask)
        sequence_ids = None if chosen.per_sequence is None else layout.sequence_ids()
        count = checked_denominator(layout, denominator, live)
        if count is not None and chosen.aggregate != "token-mean":
            _warn_of_a_token_count(layout, chosen, count, live)
        groups = None
        if chosen.aggregate == PROMPT_MEAN or group_ids is not None or group_tokens is not None:
            groups = _prompt_groups(layout, chosen, live, sequence_ids, group_ids, group_tokens, denominator)
        counted = (sequence_ids, layout.n_sequences or 0, count, layout.dtype, groups)
        weights = token_weights(chosen, live, mask is None, *counted)
        if chosen.kl_to == "old" and chosen.kl_coef != 0:
            ref_logprobs = old_logprobs
            if old_logprobs is None:  # on-policy: KL and its gradient are zero
                chosen = replace(chosen, kl_coef=0.0)
        tokens = Tokens(
            live=live,
            weights=weights,
            advantages=layout.per_token_or_sequence("advantages", advantages),
            old_logprobs=None if old_logprobs is None else layout.per_token("old_logprobs", old_logprobs),
            ref_logprobs=None if ref_logprobs is None else layout.per_token("ref_logprobs", ref_logprobs),
            importance_weights=None
            if importance_weights is None
            else layout.per_token_or_sequence("importance_weights", importance_weights),
        )
        for name, values in (("old_logprobs", tokens.old_logprobs), ("ref_logprobs", tokens.ref_logprobs)):
            if values is not None:
                layout.check_logprobs(name, values, live)
        if ended:
            tokens = tokens._replace(ref_logprobs=None)
        if chosen.max_old_prob is not None:
            assert tokens.old_logprobs is not None
            sure = tokens.old_logprobs > math.log(chosen.max_old_prob)  # a NaN stays, so that it shows in the loss
            tokens = tokens._replace(weights=torch.where(sure, 0.0, weights))
        picked = None if selection is None else _selection(layout, chosen, selection)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"{layout.caller}: generator must be a torch.Generator, got {type(generator).__name__}")
        settled, tokens = _settle(chosen, tokens, picked)
        if generator is not None and settled.clip_cov is None:
            raise ValueError(f"{layout.caller}: generator requires clip_cov without selection: leave it out")
        return cls(layout, settled, ObjectiveScalars.of(settled), tokens, sequence_ids, picked, generator)


def _selection(layout: Layout, objective: Objective, value: Tensor | float) -> Tensor | float:
    """Return a checked precomputed selection: bool [N], or a threshold for ``top_entropy``."""
    name = objective.batch_selection
    if name is None:
        raise ValueError(f"{layout.caller}: selection requires top_entropy, clip_cov or kl_cov, got none of them")
    if isinstance(value, Tensor) and value.dim() > 0:
        if value.dtype != torch.bool:
            raise TypeError(f"{layout.caller}: selection per token must be bool, got {value.dtype}")
        return layout.per_token("selection", value, torch.bool)
    if name != "top_entropy" or not (isinstance(value, Tensor) or is_number(value)):
        threshold = ", or an entropy threshold" if name == "top_entropy" else ""
        raise layout.fail("selection", f"bool {layout.describe()} with {name}{threshold}", repr(value))
    return _threshold(layout, layout.number("selection", value) if isinstance(value, Tensor) else float(value))


def _threshold(layout: Layout, value: Tensor | float) -> Tensor | float:
    """Return the entropy threshold. Raises ValueError for NaN, which compares with no entropy; on a GPU this is an
    asynchronous assert.
    """
    if isinstance(value, Tensor) and not readable(value):
        if not torch.compiler.is_compiling():
            torch._assert_async(~value.isnan())
    elif value != value:  # NaN; the compiler does not take math.isnan of a number that varies
        raise layout.fail("selection", "an entropy threshold", "nan")
    return value


def _settle(objective: Objective, tokens: Tokens, selection: Tensor | float | None) -> tuple[Objective, Tokens]:
    """Fold a precomputed selection into the tokens, so that it needs no second pass."""
    if not isinstance(selection, Tensor) or selection.dim() == 0:
        return objective, tokens
    if objective.top_entropy is not None:
        tokens = tokens._replace(weights=torch.where(selection, tokens.weights, 0.0))
        return replace(objective, top_entropy=None), tokens
    if objective.clip_cov is not None:
        return replace(objective, clip_cov=None), without_policy_term(tokens, selection)
    return objective, tokens


def times_policy_term(tokens: Tokens, weight: Tensor | None) -> Tokens:
    """Multiply every token's policy term by ``weight`` [N]; ``None`` is 1."""
    if weight is None:
        return tokens
    given = tokens.importance_weights
    return tokens._replace(importance_weights=weight if given is None else weight * given)


def without_policy_term(tokens: Tokens, selection: Tensor) -> Tokens:
    """Remove the policy gradient of the selected tokens. They keep their KL and entropy terms."""
    base = torch.ones_like(tokens.weights) if tokens.importance_weights is None else tokens.importance_weights
    return tokens._replace(importance_weights=torch.where(selection, 0.0, base))


def _check_combination(
    layout: Layout, objective: Objective, old_logprobs: Tensor | None, ref_logprobs: Tensor | None
) -> None:
    name = objective.per_sequence
    if name is not None and layout.n_sequences is None:
        raise ValueError(
            f"{layout.caller}: {name}={getattr(objective, name)!r} works per sequence: pass cu_seqlens (int32 [S+1]) "
            "with the packed layout"
        )
    if objective.aggregate == "seq-mean-token-sum-norm" and objective.length_norm is None:
        raise ValueError(
            f"{layout.caller}: aggregate='seq-mean-token-sum-norm' requires length_norm, got None: pass a "
            "constant number of tokens (Dr.GRPO: the longest response allowed)"
        )
    if objective.needs_reference and ref_logprobs is None:
        raise ValueError(f"{layout.caller}: kl_coef={objective.kl_coef:g} requires ref_logprobs, or pass kl_coef=0.0")
    if not objective.needs_reference and objective.own is None and ref_logprobs is not None:
        why = "kl_coef=0: pass kl_coef" if objective.kl_coef == 0 else "kl_to='old': pass kl_to='reference'"
        raise ValueError(f"{layout.caller}: ref_logprobs is not supported with {why}, or leave it out")
    if objective.max_old_prob is not None and old_logprobs is None:
        raise ValueError(f"{layout.caller}: max_old_prob={objective.max_old_prob:g} requires old_logprobs, got None")


def _prompt_groups(
    layout: Layout,
    objective: Objective,
    live: Tensor,
    sequence_ids: Tensor | None,
    group_ids: Any,
    group_tokens: Any,
    denominator: Any,
) -> PromptGroups:
    """Return the groups of sequences with the same prompt, for a mean over prompts."""
    if objective.aggregate != PROMPT_MEAN:
        for name, value in zip(_OF_GROUPS, (group_ids, group_tokens), strict=True):
            if value is not None:
                raise ValueError(
                    f"{layout.caller}: {name} requires aggregate={PROMPT_MEAN!r}, got {objective.aggregate!r}: set "
                    f"it, or leave {name} out"
                )
    if group_ids is None and (group_tokens is None or denominator is None):
        raise ValueError(
            f"{layout.caller}: aggregate={PROMPT_MEAN!r} requires group_ids, integers {layout.describe_sequences()}, "
            "equal where sequences answer the same prompt; or both group_tokens and denominator"
        )
    ids = None if group_ids is None else _group_ids(layout, group_ids)
    return PromptGroups(ids, None if group_tokens is None else _group_tokens(layout, group_tokens, live, sequence_ids))


def _group_ids(layout: Layout, value: Any) -> Tensor:
    """Return int64 [S] in [0, S), equal where the given ids are equal. Needs no host sync."""
    ids = layout.per_sequence("group_ids", value)
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"{layout.caller}: group_ids must be integers, got {ids.dtype}")
    ids = ids.to(torch.int64)
    return torch.searchsorted(ids.sort().values, ids)


def _group_tokens(layout: Layout, value: Any, live: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """Return [S], the live tokens of each sequence's group. Too small counts are an asynchronous assert on a GPU."""
    counts = layout.per_sequence("group_tokens", value)
    if counts.dtype == torch.bool:
        raise TypeError(f"{layout.caller}: group_tokens must be numbers, got {counts.dtype}")
    counts = counts.to(layout.dtype)
    if torch.compiler.is_compiling():
        return counts
    assert sequence_ids is not None
    lengths = sequence_sums(live.to(layout.dtype), sequence_ids, counts.shape[0])
    too_few = (lengths > 0) & ~(counts >= lengths)  # also for NaN
    if not readable(too_few):
        torch._assert_async(~too_few.any())
    elif bool(too_few.any()):
        found = float(counts[too_few][0])
        expected = "the live tokens of each sequence's whole group, at least those of the sequence"
        raise layout.fail("group_tokens", expected, f"{found:g} for sequence {int(too_few.nonzero()[0])}")
    return counts


def checked_denominator(layout: Layout, value: float | Tensor | None, live: Tensor) -> float | Tensor | None:
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise layout.fail("denominator", "a number or a 0-d tensor", list(value.shape))
        value = layout.number("denominator", value)
    elif not is_number(value):
        raise TypeError(f"{layout.caller}: denominator must be a number or a 0-d tensor, got {type(value).__name__}")
    _check_positive(layout, value, live)
    return value if isinstance(value, Tensor) else float(value)


def _check_positive(layout: Layout, value: float | Tensor, live: Tensor) -> None:
    """Raise ValueError unless positive; 0 is valid if no rank has a live token. Asynchronous on a GPU."""
    if torch.compiler.is_compiling() and isinstance(value, Tensor):
        return
    if isinstance(value, Tensor) and not readable(value):
        torch._assert_async((value > 0) | ((value == 0) & ~live.any()))
        return
    count = float(value)
    if 0 < count < math.inf:
        return
    if count != 0 or (readable(live) and bool(live.any())):
        raise layout.fail("denominator", "positive and finite", f"{count:g}")
    if not readable(live):
        torch._assert_async(~live.any())


def _warn_of_a_token_count(layout: Layout, objective: Objective, value: float | Tensor, live: Tensor) -> None:
    """Warn if a token count divides a mean over sequences or prompts. The only symptom is a small gradient.

    Skipped on a GPU, where it would wait. The text has no number, so that Python shows it only once.
    """
    if not readable(live) or (isinstance(value, Tensor) and not readable(value)):
        return
    tokens = int(live.sum())
    counted = "prompts" if objective.aggregate == PROMPT_MEAN else "sequences"
    if float(value) == tokens > (layout.n_sequences or 0):
        warnings.warn(
            f"{layout.caller}: denominator equals the number of live tokens in this call, but with aggregate="
            f"{objective.aggregate!r} it has to be the number of {counted} with a live token, over all micro-batches "
            "and ranks. Ignore this if both counts are equal",
            stacklevel=2,
        )
