"""The settings of the loss."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from dapo_runner.config.section import Section


class LossConfig(Section):
    requires = {
        "!model.lora": "reference_ema",
        "!model.tiny !model.compile loss.old_logprobs=learner": "routing_replay",
    }

    objective: str = "dapo"  # a name in dapo_kernels.OBJECTIVES
    overrides: dict[str, Any] = {}  # fields of dapo_kernels.Objective, passed through
    reference: str | None = None  # kl_coef ≠ 0: the model the penalty refers to; null: the one training starts from
    # The reference follows the policy: after each step it is this share of itself and the rest of the policy.
    reference_ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    old_logprobs: Literal["learner", "rollout"] = "learner"  # whose log-probs are the ratio's denominator
    routing_replay: bool = False  # mixtures of experts: updates go to the experts that the old log-probs came from

    @field_validator("overrides", mode="after")
    @classmethod
    def _plain_values(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        return {name: _plain(value) for name, value in overrides.items()}


def _plain(value: Any) -> Any:
    """What a field of an objective may be given as text: `3e-4`, alone or in a list, and `yes`."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in value)
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return {"yes": True, "on": True, "no": False, "off": False}.get(value.lower(), value)
