"""Settings of rewards: rules and functions, how they are called, the overlong punishment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from dapo_runner.config.judge import JudgeConfig
from dapo_runner.config.section import Name, NonNegativeInt, PositiveFloat, PositiveInt, Section


class OverlongConfig(Section):
    soft_punishment: bool = True  # subtract a penalty that grows over the last cache_length tokens (Eq. 13)
    max_length: PositiveInt | None = None  # L_max of Eq. 13; null: rollout.max_response_tokens
    cache_length: PositiveInt = 4096  # L_cache of Eq. 13: the stretch over which the punishment grows to −1
    filter: bool = False  # take truncated samples out of the loss


# Rules that hold a response against the ground truth of its prompt.
RULES = ("dapo", "gsm8k", "integer", "math", "choice", "exact", "fuzzy", "json", "code", "judge")


def _check_use(value: str) -> str:
    if value not in RULES and ":" not in value:
        raise ValueError(f"expected one of {', '.join(RULES)} or module:function, got {value!r}")
    return value


RewardName = Annotated[str, AfterValidator(_check_use)]


class RewardPart(Section):
    """One of several rewards: their weighted sum is what trains."""

    use: RewardName  # a rule, or module:function
    weight: float = 1.0  # in the sum
    name: Name | None = None  # in figures; null: that of the rule or the function

    @property
    def label(self) -> str:
        return self.name or self.use.rpartition(":")[2]


class CallsConfig(Section):
    """Calls of functions and of a judge's API. A failed call raises, is late, or returns no rewards."""

    concurrency: PositiveInt | None = None  # calls at a time; null: 64 of an async function or an API, else 1
    retries: NonNegativeInt = 2  # of a failed call
    max_failed: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of the prompts that failed calls may cost, rounded up


class RewardKLConfig(Section):
    """A penalty on every token of a response: coef × an estimate of the KL divergence to the reference."""

    coef: PositiveFloat  # of the penalty
    estimator: Literal["k1", "k2", "k3"] = "k1"  # docs/objectives.md; of the log-probs before the step's updates


class RewardConfig(Section):
    requires = {"advantage.kind=gae|returns|group_returns loss.old_logprobs=learner": "kl", "!parts": "kind"}

    # dapo | gsm8k | integer | math | choice | exact | fuzzy | json | code | judge | module:function
    kind: RewardName = "dapo"
    parts: list[RewardPart] = []  # several instead of one; the first decides what is correct
    correct: float = 1.0  # reward of a correct response
    incorrect: float = -1.0  # reward of an incorrect response
    json_schema: Path | None = None  # kind json: a file; null: the answer of each row is its schema
    deadline: PositiveFloat = 10.0  # kinds math, json, code: seconds for one response, whose process is then killed
    workers: PositiveInt = 2  # kinds math, json, code: processes at a time
    memory_mb: PositiveInt = 1024  # kind code: memory of one program
    plugin_deadline: PositiveFloat | None = 300.0  # seconds for a call of a function or a judge's API; null: none
    calls: CallsConfig = CallsConfig()
    judge: JudgeConfig | None = None  # the model of kind judge
    overlong: OverlongConfig = OverlongConfig()
    kl: RewardKLConfig | None = None  # advantages per token: taken off their rewards

    @property
    def uses(self) -> list[str]:
        """The rules and functions in use; the first decides what is correct."""
        return [part.use for part in self.parts] or [self.kind]

    @model_validator(mode="after")
    def _check(self) -> RewardConfig:
        if self.correct <= self.incorrect:
            raise ValueError(f"correct: expected more than incorrect={self.incorrect:g}, got {self.correct:g}")
        if ("judge" in self.uses) != (self.judge is not None):
            raise ValueError("judge: expected this section beside kind=judge or a part that uses it, and only there")
        labels = [part.label for part in self.parts]
        if len(set(labels)) < len(labels):
            raise ValueError(f"parts: expected a different name for each, got {', '.join(labels)}")
        return self
