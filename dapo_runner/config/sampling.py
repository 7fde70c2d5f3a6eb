"""The settings by which responses are sampled, in rollouts and in evaluations."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from dapo_runner.config.section import NonNegativeFloat, PositiveInt, Section, Share
from dapo_runner.types import SamplingParams


class SamplingConfig(Section):
    """Temperature and truncation of the distribution that tokens are sampled from."""

    temperature: NonNegativeFloat = 1.0  # 0: greedy, in evaluations only
    top_p: Share = 1.0  # keep the fewest tokens that hold this probability together
    top_k: PositiveInt | None = None  # keep this many of the likeliest tokens; null: all
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0  # drop tokens below this share of the likeliest one's probability

    @property
    def truncations(self) -> dict[str, float]:
        """What takes tokens out of the distribution."""
        values = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        unlimited = SamplingConfig().model_dump()
        return {name: value for name, value in values.items() if value is not None and value != unlimited[name]}

    def params(self, **fields: Any) -> SamplingParams:
        """Return the parameters of a call. ``fields`` are the other fields of ``SamplingParams``."""
        return SamplingParams(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p, **fields
        )


class EvaluationConfig(SamplingConfig):
    """How held-out problems are answered."""

    k: PositiveInt = 32  # responses to each problem
    top_p: Share = 0.7
    max_response_tokens: PositiveInt | None = None  # null: rollout.max_response_tokens
