"""verl's policy losses and fused linear layer, computed by this package. Written for verl 0.9.

Importing this module registers one policy loss per objective, named ``dapo_kernels/<objective>``, with verl's registry.
verl imports it in every worker with::

    actor_rollout_ref.model.external_lib=dapo_kernels.integrations.verl
    actor_rollout_ref.actor.policy_loss.loss_mode=dapo_kernels/dapo

The name selects the kind of loss. Its numbers are read from verl's settings, in ``actor_rollout_ref.actor``:

==========================================  ============================================================
``clip_ratio_low``, ``clip_ratio_high``     clip_low, clip_high of clip, cispo and dppo (``up``: clip_low alone)
``clip_ratio_c``                            dual_clip, where verl's ``vanilla`` uses it: token-level clip
``tau_pos``, ``tau_neg``                    sapo_tau
``policy_loss.clip_cov_*``                  clip_cov
``policy_loss.kl_cov_ratio, ppo_kl_coef``   kl_cov
``policy_loss.dro_beta``                    kl_coef of ``dro``
``loss_agg_mode``, ``loss_scale_factor``    aggregate, length_norm (``sapo`` is always seq-mean-token-mean, as in verl)
==========================================  ============================================================

One warning is logged if ``clip_ratio_low``, ``clip_ratio_high`` or ``loss_agg_mode`` are not the objective's own
(``dapo`` with verl's default ``clip_ratio_high`` of 0.2, for example). verl adds the KL to the reference and the
entropy bonus itself, so ``grpo`` here is only its clip. Intended differences from verl's losses: docs/verl.md.

verl passes no prompts to a policy loss. So the mean over prompts (DAPO, eq. 8 as printed) is an advantage estimator,
``dapo_kernels/grpo_prompt_mean``, used with ``loss_agg_mode=seq-mean-token-sum``; see ``prompt_mean_advantages``.

``install_fused_linear`` replaces the layer behind ``use_fused_kernels=True`` by ``linear_token_logprobs``.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo_kernels.integrations.heads import whole
from dapo_kernels.integrations.versions import VERL, require
from dapo_kernels.logprobs import linear_token_logprobs
from dapo_kernels.losses import LossOutput, policy_loss
from dapo_kernels.objectives import select
from dapo_kernels.objectives.aggregate import sequence_sums
from dapo_kernels.objectives.table import DUAL_CLIPPED, OBJECTIVES, READ_BY, Objective

require("dapo_kernels.integrations.verl", *VERL)

from verl.trainer.ppo.core_algos import (  # noqa: E402
    compute_grpo_outcome_advantage,
    register_adv_est,
    register_policy_loss,
)

PREFIX = "dapo_kernels/"
_log = logging.getLogger(__name__)

PolicyLoss = Callable[..., tuple[Tensor, dict[str, float]]]


def aggregation(mode: str, width: int, batch: Mapping[str, Any]) -> tuple[dict[str, Any], float | Tensor | None]:
    """Return fields of the objective and the denominator that are equivalent to verl's ``agg_loss``.

    Args:
        mode: verl's ``loss_agg_mode``.
        width: padded response length, the ``length_norm`` if ``loss_scale_factor`` is not set.
        batch: verl's ``global_batch_info``: dp_size, batch_num_tokens, global_batch_size, loss_scale_factor.

    verl averages gradients over ranks, hence the denominator: global count / dp_size.
    """
    ranks = batch.get("dp_size", 1)
    if mode == "token-sum":
        return {"aggregate": "token-mean"}, 1.0 / ranks
    fields: dict[str, Any] = {"aggregate": mode}
    if mode == "seq-mean-token-sum-norm":
        factor = batch.get("loss_scale_factor")
        fields["length_norm"] = width if factor is None else factor
    name = "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
    count = batch.get(name)
    if count is None and ranks > 1:
        raise ValueError(f"{PREFIX}*: loss_agg_mode={mode!r} with dp_size={ranks} requires the global {name}, got None")
    if count is None:
        return fields, None
    count = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
    return fields, count / ranks


def configured(name: str, config: Any) -> Objective:
    """Return the row ``name`` with the numbers of verl's actor config. verl adds KL and entropy itself."""
    row = OBJECTIVES[name]
    if row.kl_to == "old":
        return replace(row, kl_coef=_dro_beta(name, config))
    row = replace(row, kl_coef=0.0)
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    if row.surrogate == "sapo":
        return replace(row, sapo_tau=(float(config.tau_pos), float(config.tau_neg)))
    if row.kl_cov is not None:
        return replace(row, kl_cov=(config.policy_loss.kl_cov_ratio, config.policy_loss.ppo_kl_coef))
    if row.surrogate == "reinforce":
        return row
    if row.ratio == "sequence_clipped":  # verl bounds the log-ratio
        return replace(row, clip_low=-math.expm1(-low), clip_high=math.expm1(high))
    row = replace(row, clip_low=min(low, 1.0), clip_high=high)  # a ratio is never below 0
    if row.clip_cov is not None:
        covariance = config.policy_loss
        return replace(row, clip_cov=(covariance.clip_cov_ratio, covariance.clip_cov_lb, covariance.clip_cov_ub))
    if row.surrogate in DUAL_CLIPPED and row.ratio == "token":
        return replace(row, dual_clip=config.clip_ratio_c)
    return row


def _dro_beta(name: str, config: Any) -> float:
    beta: float | None = config.policy_loss.dro_beta
    if beta is None or not beta > 0:
        raise ValueError(f"{PREFIX}{name}: policy_loss.dro_beta must be positive, got {beta!r}")
    return beta


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning(text)


def _warn_of_differences(name: str, objective: Objective) -> None:
    row = OBJECTIVES[name]
    differing = [
        f"{field}={getattr(objective, field)} (the objective's own: {getattr(row, field)})"
        for field in ("clip_low", "clip_high", "aggregate")
        if getattr(objective, field) != getattr(row, field) and row.surrogate in READ_BY.get(field, (row.surrogate,))
    ]
    if differing:
        _warn_once(f"{PREFIX}{name} takes its numbers from verl's actor config: {', '.join(differing)}")


def _covariance_clipped(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, live: Tensor, objective: Objective
) -> Tensor:
    """Return the tokens that Clip-Cov drops, bool [B, L], chosen before the loss so that they can be reported."""
    assert objective.clip_cov is not None
    logprobs = torch.where(live, log_prob.detach(), 0.0).reshape(-1)
    old_logprobs = torch.where(live, old_log_prob, 0.0).reshape(-1)
    advantages = torch.where(live, advantages, 0.0).reshape(-1)
    clip_hit = select.clip_hits(objective, logprobs, logprobs - old_logprobs, advantages, live.reshape(-1))
    chosen = select.clip_cov(logprobs, advantages, live.reshape(-1), clip_hit, objective.clip_cov, None)
    return chosen.view(live.shape)


def _metrics(
    objective: Objective, out: LossOutput, distance: Tensor | None, dropped: Tensor | None
) -> dict[str, float]:
    """Return verl's metrics for this kind of loss. They take one copy to the host; verl's take one per key."""
    sums = out.metrics
    if distance is not None:
        values = {"actor/ppo_kl": distance.sum()}
    elif objective.surrogate == "reinforce":
        values = {"actor/ppo_kl": sums["approx_kl"]}
    elif dropped is not None:
        values = {"actor/pg_clipfrac": dropped.sum(), "actor/ppo_kl": sums["approx_kl"]}
    else:
        values = {
            "actor/pg_clipfrac": sums["clip_low"] + sums["clip_high"],
            "actor/ppo_kl": sums["approx_kl"],
            "actor/pg_clipfrac_lower": sums["clip_dual"],
        }
    means = torch.stack([value.float() for value in values.values()]) / sums["tokens"].clamp(min=1)
    return dict(zip(values, means.tolist(), strict=True))


def policy_loss_of(name: str) -> PolicyLoss:
    """Return verl's policy-loss function for a row of ``OBJECTIVES``; the module's docstring lists what it reads.

    Its arguments are verl's: ``old_log_prob``, ``log_prob`` (differentiable), ``advantages``, ``response_mask`` [B, L],
    ``loss_agg_mode``, ``config`` (the actor's) and ``rollout_is_weights`` [B, L]. It returns the loss, 0-d, and a dict
    of floats with verl's metric keys.

    Example:
        >>> from dapo_kernels.integrations.verl import policy_loss_of
        >>> policy_loss_of("dapo").__name__  # registered with verl as dapo_kernels/dapo
        'dapo_policy_loss'
    """

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = OBJECTIVES[name].aggregate,
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        if OBJECTIVES[name].top_entropy is not None:
            raise ValueError(
                f"{PREFIX}{name} is not supported with verl, which passes no entropies to a policy loss: "
                f"call dapo_kernels.policy_loss(entropy=…) from a loss function of your own"
            )
        if config is None:
            raise ValueError(f"{PREFIX}{name}: config must be verl's actor config, got None")
        objective = configured(name, config)
        mode = "seq-mean-token-mean" if objective.surrogate == "sapo" else loss_agg_mode
        fields, denominator = aggregation(mode, response_mask.shape[-1], config.global_batch_info)
        objective = replace(objective, **fields)
        _warn_of_differences(name, objective)
        live = response_mask.bool()
        dropped = None
        if objective.clip_cov is not None:
            dropped = _covariance_clipped(log_prob, old_log_prob, advantages, live, objective)
        out = policy_loss(
            log_prob,
            old_log_prob,
            advantages,
            objective=objective,
            mask=live,
            importance_weights=rollout_is_weights,
            denominator=denominator,
            selection=dropped,
        )
        distance = None
        if objective.kl_cov is not None:
            distance = torch.where(live, out.logprobs - old_log_prob, 0.0).abs()
        return out.loss, _metrics(objective, out, distance, dropped)

    loss.__name__ = loss.__qualname__ = f"{name}_policy_loss"
    return loss


@register_adv_est(PREFIX + "grpo_prompt_mean")
def prompt_mean_advantages(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any, config: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Return verl's GRPO advantages, weighted so that ``loss_agg_mode=seq-mean-token-sum`` is the mean over prompts.

    With S sequences of P prompts and n_g live tokens in the group of sequence i, its advantage is multiplied by
    S / (P·n_g). The sum over its tokens, divided by S, is then its term of DAPO's eq. 8 as printed. All groups must
    have equally many sequences, and the policy loss must be proportional to the advantage.

    Args:
        token_level_rewards, response_mask: [B, L].
        index: [B], the prompt of each sequence, any hashable value.
        config: verl's algorithm config; ``norm_adv_by_std_in_grpo`` is read.

    Returns:
        the weighted advantages and verl's, [B, L] each.

    Example:
        >>> import torch
        >>> from dapo_kernels.integrations.verl import prompt_mean_advantages
        >>> rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2)
        >>> prompt_mean_advantages(rewards, mask, index=["p", "p"])[0].shape
        torch.Size([2, 2])
    """
    by_std = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
    advantages, returns = compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=by_std
    )
    prompts, groups = np.unique(np.asarray(index), return_inverse=True)
    ids = torch.from_numpy(groups).to(response_mask.device)
    tokens = sequence_sums(response_mask.sum(-1), ids, len(prompts)).clamp(min=1)[ids]
    return advantages * (len(index) / len(prompts) / tokens)[:, None], returns


class FusedLinear(torch.nn.Module):
    """Compute log-probs and entropy from hidden states: verl's ``FusedLinearForPPO`` by ``linear_token_logprobs``.

    Args:
        chunk_size: tokens whose logits are in memory at a time; ``None``: by the default ``chunk_bytes``.
        impl_backend: ``"torch"``, verl's default; verl's other backends do not use this class.
    """

    def __init__(self, chunk_size: int | None = None, impl_backend: str = "torch") -> None:
        super().__init__()
        if impl_backend != "torch":
            raise ValueError(
                f"dapo_kernels.integrations.verl: impl_backend must be 'torch' with install_fused_linear, got "
                f"{impl_backend!r}: set actor_rollout_ref.model.fused_kernel_options.impl_backend=torch"
            )
        self.chunk_size = chunk_size

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float | Tensor = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies, float32 [...], from [..., H], ``vocab_weights`` [V, H] and targets [...]."""
        vocab_weights = whole(vocab_weights)  # of FSDP2: verl reads it outside the forward of its module
        row_bytes = vocab_weights.shape[0] * hidden_states.element_size()
        stats = linear_token_logprobs(
            hidden_states,
            vocab_weights,
            input_ids,
            temperature=temperature,
            entropy=True,
            chunk_bytes=None if self.chunk_size is None else self.chunk_size * row_bytes,
        )
        assert stats.entropy is not None
        return stats.logprobs, stats.entropy


def install_fused_linear() -> None:
    """Make verl's fused forward (``use_fused_kernels=True``, ``impl_backend=torch``) compute with ``FusedLinear``.

    verl looks up the layer by name at every forward pass; this sets that name in
    ``verl.utils.experimental.torch_functional``, in this process. Call it from your own module that verl imports in its
    workers (``external_lib``); importing ``dapo_kernels.integrations.verl`` does not call it.

    Example:
        >>> from dapo_kernels.integrations.verl import install_fused_linear
        >>> install_fused_linear()  # doctest: +SKIP
    """
    from verl.utils.experimental import torch_functional

    torch_functional.FusedLinearForPPO = FusedLinear


for _name in OBJECTIVES:
    register_policy_loss(PREFIX + _name)(policy_loss_of(_name))
