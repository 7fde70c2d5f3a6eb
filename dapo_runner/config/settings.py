"""A recipe as a whole: its sections, each in the file of its name, and the sizes that follow from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator, model_validator

from dapo_runner.config.advantage import AdvantageConfig, TreeShape, factors
from dapo_runner.config.algorithms import check_name, with_algorithm
from dapo_runner.config.critic import CriticConfig
from dapo_runner.config.data import DataConfig
from dapo_runner.config.logging import LoggingConfig
from dapo_runner.config.loss import LossConfig
from dapo_runner.config.model import ModelConfig
from dapo_runner.config.optimizer import OptimizerConfig
from dapo_runner.config.parallel import ParallelConfig
from dapo_runner.config.preference import PreferenceConfig
from dapo_runner.config.reward import RewardConfig
from dapo_runner.config.rollout import RolloutConfig
from dapo_runner.config.run import RunConfig
from dapo_runner.config.sampler import SamplerConfig
from dapo_runner.config.sampling import EvaluationConfig
from dapo_runner.config.section import Section


class Config(Section):
    """Everything a run depends on, and the sizes that follow from it. `checks.py` knows which sections fit."""

    requires = {
        "advantage.kind=gae": "critic",
        "loss.objective=dapo !loss.overrides loss.old_logprobs=learner !loss.routing_replay": "preference",
        "advantage.kind=group_std !advantage.segments !rollout.correction.enabled": "preference",
        "!rollout.sampling_mask !logging.rollouts.per_token": "preference",
    }

    algorithm: str | None = None  # a row of dapo_runner.config.algorithms: what it sets is the default of every section
    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    sampler: SamplerConfig = SamplerConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig | None = None  # a model that predicts returns
    loss: LossConfig = LossConfig()
    preference: PreferenceConfig | None = None  # train on pairs in place of advantages
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="before")
    @classmethod
    def _algorithm_below_the_recipe(cls, raw: Any) -> Any:
        return with_algorithm(raw)

    @field_validator("algorithm")
    @classmethod
    def _in_the_table(cls, value: str | None) -> str | None:
        if value is not None:
            check_name(value)
        return value

    @property
    def run_dir(self) -> Path:
        return self.run.output_dir / self.run.name

    @property
    def responses_per_step(self) -> int:
        return self.sampler.prompts_per_step * self.rollout.group_size

    @property
    def trained_per_step(self) -> int:
        """Responses of a full step that updates are made from."""
        if self.preference is None:
            return self.responses_per_step
        return 2 * self.preference.pairs_per_group * self.sampler.prompts_per_step

    @property
    def mini_batch_size(self) -> int:
        size = self.optimizer.mini_batch_size or self.trained_per_step
        return size if self.preference is None else min(size, self.trained_per_step)

    @property
    def updates_per_step(self) -> int:
        return self.trained_per_step // self.mini_batch_size

    @property
    def filter_on(self) -> Literal["correctness", "reward"]:
        """What decides whether a group is accepted: by default the reward where it is a sum of several."""
        summed = self.reward.parts and self.sampler.filter_groups
        return self.sampler.filter_on or ("reward" if summed else "correctness")

    @property
    def max_age(self) -> int:
        """By default one step more than `rollout.max_staleness`, so that left-over groups can fill the next step."""
        return self.rollout.max_staleness + 1 if self.sampler.max_age is None else self.sampler.max_age

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and response that an engine may be asked for."""
        responses = (self.rollout.max_response_tokens, self.evaluation.max_response_tokens or 0)
        return self.rollout.max_prompt_tokens + max(responses)

    @property
    def tree(self) -> TreeShape | None:
        """Of `advantage.segments`, kind tree; without levels where rollout.group_size is a prime."""
        segments = self.advantage.segments
        if segments is None or segments.kind != "tree":
            return None
        branching = tuple(segments.branching or factors(self.rollout.group_size))
        tokens = segments.tokens or self.rollout.max_response_tokens // max(1, len(branching))
        return TreeShape(branching, tokens)

    @property
    def overlong_max_length(self) -> int:
        """L_max of Eq. 13."""
        return self.reward.overlong.max_length or self.rollout.max_response_tokens


def resolved(config: Config) -> dict[str, Any]:
    """Return the settings that are null in ``config`` and what they resolve to, by dotted key."""
    answers = config.evaluation.max_response_tokens or config.rollout.max_response_tokens
    values = {
        "data.template": (config.data.template, config.data.prompt_template),
        "sampler.filter_on": (config.sampler.filter_on, config.filter_on),
        "sampler.max_age": (config.sampler.max_age, config.max_age),
        "reward.overlong.max_length": (config.reward.overlong.max_length, config.overlong_max_length),
        "optimizer.mini_batch_size": (config.optimizer.mini_batch_size, config.mini_batch_size),
        "evaluation.max_response_tokens": (config.evaluation.max_response_tokens, answers),
    }
    return {key: value for key, (given, value) in values.items() if given is None}
