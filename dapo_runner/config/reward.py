"""The settings of rewards: rules and functions, how they are called, the overlong punishment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from dapo_runner.config.judge import JudgeConfig
from dapo_runner.config.section import Name, NonNegativeInt, PositiveFloat, PositiveInt, Section, Share


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
    """How functions of a batch are called. A failed call is one that raises, is late, or returns no rewards."""

    prompts: PositiveInt = 1  # of one call, with all their responses
    concurrency: PositiveInt | None = None  # calls at a time, a function's in threads; null: 1, of an async one 64
    retries: NonNegativeInt = 2  # of a failed call
    max_failed: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of the calls that may fail for good, rounded up


class CodeConfig(Section):
    """Kind code. Each program runs in a process of its own."""

    deadline: PositiveFloat = 10.0  # seconds for one program, after which it is killed
    memory_mb: PositiveInt = 1024  # that one program may use
    workers: PositiveInt = 2  # programs at a time


class RewardKLConfig(Section):
    """A penalty on every token of a response: coef × an estimate of the KL divergence to the reference."""

    coef: PositiveFloat  # of the penalty
    estimator: Literal["k1", "k2", "k3"] = "k1"  # docs/objectives.md; of the log-probs before the step's updates


class RewardConfig(Section):
    requires = {"advantage.kind=gae|returns|group_returns loss.old_logprobs=learner": "kl"}

    # dapo | gsm8k | integer | math | choice | exact | fuzzy | json | code | judge | module:function
    kind: RewardName = "dapo"
    parts: list[RewardPart] = []  # several of them in its place; the first says what is right
    correct: float = 1.0  # reward of a correct response
    incorrect: float = -1.0  # reward of an incorrect response
    boxed_fallback: bool = False  # kind dapo: read the last \boxed{} when no answer line is found
    fuzzy_threshold: Share = 0.9  # kind fuzzy: the similarity from which an answer is right
    json_schema: Path | None = None  # kind json: a file; null: the answer of each row is its schema
    deadline: PositiveFloat = 5.0  # kinds math and json: seconds for one answer
    workers: PositiveInt = 2  # kinds math and json: processes
    code: CodeConfig = CodeConfig()
    judge: JudgeConfig | None = None  # the model of kind judge
    calls: CallsConfig = CallsConfig()
    # Kind module:function: seconds for one call; judge at an endpoint: for one request. null: no deadline.
    plugin_deadline: PositiveFloat | None = 300.0
    overlong: OverlongConfig = OverlongConfig()
    kl: RewardKLConfig | None = None  # advantages per token: taken off their rewards

    @property
    def uses(self) -> list[str]:
        """The rules and functions in use; the first says what is right."""
        return [part.use for part in self.parts] or [self.kind]

    @model_validator(mode="after")
    def _right_beats_wrong(self) -> RewardConfig:
        if self.correct <= self.incorrect:
            raise ValueError(f"correct must be > incorrect={self.incorrect:g}, got {self.correct:g}")
        return self

    @model_validator(mode="after")
    def _judge_in_use(self) -> RewardConfig:
        if "judge" in self.uses and self.judge is None:
            raise ValueError("judge: expected a section that says which model judges (judge.model), got none")
        if self.judge is not None and "judge" not in self.uses:
            raise ValueError("judge: expected kind=judge or a part that uses it, without which it has no effect")
        return self

    @model_validator(mode="after")
    def _parts_have_names_of_their_own(self) -> RewardConfig:
        if self.parts and self.kind != type(self).model_fields["kind"].default:
            raise ValueError(f"kind: expected none beside parts, got {self.kind!r}")
        labels = [part.label for part in self.parts]
        if len(set(labels)) < len(labels):
            raise ValueError(f"parts: expected a name of its own for each, got {', '.join(labels)}")
        return self
