"""The settings of preference training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dapo_runner.config.section import PositiveFloat, PositiveInt, Section


class PreferenceConfig(Section):
    """Iterated DPO: pairs made from each group by reward take the place of advantages and objective."""

    requires = {"loss_type=sigmoid": "label_smoothing", "!loss.reference !loss.reference_ema": "reference"}

    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"  # formulas: docs/objectives.md
    beta: PositiveFloat = 0.1  # strength of the implicit KL penalty
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0  # sigmoid: share of pairs the wrong way round
    pairs_per_group: PositiveInt = 1  # best against worst, second best against second worst, …
    reference: Literal["start", "step"] = "start"  # loss.reference or the start; or the policy as the step began
