"""The settings of preference training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dapo_runner.config.section import PositiveFloat, PositiveInt, Section


class PreferenceConfig(Section):
    """Iterated DPO: pairs made from each group by reward take the place of advantages and objective."""

    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"  # formulas: docs/objectives.md
    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0  # sigmoid: share of pairs the wrong way round
    pairs_per_group: PositiveInt = 1  # best against worst, second best against second worst, …
    reference: Literal["start", "step"] = "start"  # loss.reference or the start; or the policy as the step began

    @model_validator(mode="after")
    def _smoothed_sigmoid(self) -> PreferenceConfig:
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise ValueError(f"label_smoothing: expected loss_type=sigmoid beside it, got {self.loss_type}")
        return self
