"""The settings of evaluations."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dapo_runner.config.rollout import StopStrings
from dapo_runner.config.section import NonNegativeFloat, NonNegativeInt, PositiveInt, Section, Share


class EvaluationConfig(Section):
    k: PositiveInt = 32  # samples per problem
    temperature: NonNegativeFloat = 1.0  # 0: greedy
    top_p: Share = 0.7
    top_k: PositiveInt | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    stop: StopStrings | None = None  # None: rollout.stop
    max_response_tokens: PositiveInt | None = None  # None: rollout.max_response_tokens
    seed: NonNegativeInt = 1234
