"""The objective that a configuration trains, and whether it looks at a reference."""

from __future__ import annotations

from dataclasses import replace

from dapo_kernels import Objective, objectives
from dapo_runner.config import Config, ConfigError


def resolve_objective(config: Config) -> Objective:
    """The objective the configuration names, with its overrides. Raises ConfigError where it cannot be
    trained here.
    """
    loss = config.loss
    try:
        objective = objectives.resolve_objective("loss", loss.objective, loss.overrides)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if objective.aggregate == "seq-mean-token-sum-norm" and objective.length_norm is None:
        objective = replace(objective, length_norm=float(config.rollout.max_response_tokens))
    advantage = config.advantage
    if (advantage.segments is not None or advantage.by_token) and (
        objective.ratio in ("sequence", "sequence_clipped") or objective.sequence_weight
    ):
        beside = f"advantage.kind={advantage.kind}" if advantage.by_token else "advantage.segments"
        raise ConfigError(
            f"loss.objective: expected a gradient of each token's own beside {beside}, whose advantages differ within "
            f"a response (as of 'ppo' or 'gspo_token'), got {loss.objective!r}, which weighs a response as a whole"
        )
    used = objective.needs_reference or config.reward.kl is not None or config.preference is not None
    for key, value in (("reference", loss.reference), ("reference_ema", loss.reference_ema)):
        if value is not None and not used:
            raise ConfigError(
                f"loss.{key}: {loss.objective!r} has no KL penalty to a reference, so {value!r} would go unused; set "
                "loss.overrides.kl_coef or reward.kl, or leave the reference out"
            )
    return objective


def uses_reference(config: Config) -> bool:
    """Whether loss or reward look at a reference policy that is not the one being trained."""
    if config.preference is not None:
        return config.preference.reference == "start"
    return resolve_objective(config).needs_reference or config.reward.kl is not None
