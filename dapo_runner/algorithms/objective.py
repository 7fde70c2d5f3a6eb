"""Resolve the objective of a configuration, and whether it needs a reference."""

from __future__ import annotations

from dataclasses import replace

from dapo_kernels import Objective, objectives
from dapo_runner.config import Config, ConfigError


def resolve_objective(config: Config) -> Objective:
    """Return the objective of the configuration, with its overrides. Raises ConfigError if it is not supported."""
    loss, advantage = config.loss, config.advantage
    try:
        objective = objectives.resolve_objective("loss", loss.objective, loss.overrides)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if objective.aggregate == "seq-mean-token-sum-norm" and objective.length_norm is None:
        objective = replace(objective, length_norm=float(config.rollout.max_response_tokens))
    if weighs_responses(objective) and (advantage.segments is not None or advantage.by_token):
        what = f"advantage.kind={advantage.kind}" if advantage.by_token else "advantage.segments"
        raise ConfigError(
            f"loss.objective: {what} requires a gradient of each token, got {loss.objective!r}. Use 'ppo' or "
            "'gspo_token'"
        )
    uses = objective.needs_reference or config.reward.kl is not None or config.preference is not None
    for key, value in (("reference", loss.reference), ("reference_ema", loss.reference_ema)):
        if value is not None and not uses:
            raise ConfigError(f"loss.{key}: requires loss.overrides.kl_coef or reward.kl with {loss.objective!r}")
    return objective


def weighs_responses(objective: Objective) -> bool:
    """Return whether the objective gives all tokens of a response one weight. Their advantages must then be equal."""
    return objective.ratio in ("sequence", "sequence_clipped") or objective.sequence_weight


def uses_reference(config: Config) -> bool:
    """Return whether the loss or the reward needs a second policy."""
    if config.distillation is not None:
        return True
    if config.preference is not None:
        return config.preference.reference == "start"
    return resolve_objective(config).needs_reference or config.reward.kl is not None
