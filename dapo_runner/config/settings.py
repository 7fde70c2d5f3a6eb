"""The whole configuration: its sections, values that follow from them, and checks between sections."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import model_validator

from dapo_kernels import Objective
from dapo_kernels.objectives import resolve_objective
from dapo_runner.config.algorithms import ALGORITHMS, with_algorithm, with_numerics
from dapo_runner.config.data import DataConfig
from dapo_runner.config.reward import RULES, RewardConfig
from dapo_runner.config.rollout import EnvironmentConfig, EvaluationConfig, RolloutConfig, SamplerConfig
from dapo_runner.config.run import RunConfig, TrainingConfig
from dapo_runner.config.section import Check, MayChange, as_mappings, lay_over, read_key
from dapo_runner.config.training import (
    COMPARING,
    AdvantageConfig,
    CriticConfig,
    DistillationConfig,
    LossConfig,
    PreferenceConfig,
    TreeShape,
    factors,
)
from dapo_runner.errors import ConfigError, did_you_mean
from dapo_runner.plugins import import_function

ONE_GPU = ("auto", "cpu", "cuda", "cuda:0")  # devices of an engine that always takes the first visible GPU


class Config(TrainingConfig):
    """All settings of a run, with their types checked. `load_config` reads them from a file and checks all rules.

    Example:
        >>> from pathlib import Path
        >>> from dapo_runner.config import Config, DataConfig, ModelConfig
        >>> config = Config(model=ModelConfig(path="Qwen/Qwen3-0.6B"), data=DataConfig(path=Path("math.jsonl")))
        >>> config.rollout.group_size, config.optimizer.lr
        (16, 1e-06)
    """

    requires = {
        "advantage.kind=gae": "critic",
        "loss.objective=dapo !loss.overrides loss.old_logprobs=trainer !loss.routing_replay": "preference distillation",
        "advantage.kind=group_std !advantage.segments": "preference distillation",
        "!rollout.correction.weights !rollout.correction.mask": "preference distillation",
        "!rollout.sampling_mask !logging.rollouts.per_token !rollout.max_staleness": "preference distillation",
        "!preference !loss.reference !loss.reference_ema": "distillation",
        "parallel.rollout_tensor=1 !advantage.segments": "env",
    }

    algorithm: MayChange[str | None] = None  # a name in docs/algorithms.md; its settings become the defaults
    # matched: bring the log-probs of engine and trainer closer together. docs/mismatch.md
    numerics: Literal["default", "matched"] = "default"
    run: RunConfig = RunConfig()
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    sampler: SamplerConfig = SamplerConfig()
    env: EnvironmentConfig | None = None  # episodes of several turns, with tools or in a game
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig | None = None  # a model that predicts returns
    loss: LossConfig = LossConfig()
    preference: PreferenceConfig | None = None  # train on preference pairs instead of advantages
    distillation: DistillationConfig | None = None  # train on a teacher's distributions instead of advantages
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="before")
    @classmethod
    def _lay_over_algorithm(cls, raw: Any) -> Any:
        return with_task_reward(with_numerics(with_algorithm(as_mappings(raw))))

    @property
    def responses_per_step(self) -> int:
        return self.sampler.prompts_per_step * self.rollout.group_size

    @property
    def trained_per_step(self) -> int:
        """Responses of a full step that train."""
        return self.responses_per_step if self.preference is None else 2 * self.sampler.prompts_per_step

    @property
    def mini_batch_size(self) -> int:
        size = self.optimizer.mini_batch_size or self.trained_per_step
        return size if self.preference is None else min(size, self.trained_per_step)

    @property
    def objective(self) -> Objective:
        """The objective with its overrides. Raises ConfigError."""
        name, overrides = self.loss.objective, self.loss.overrides
        try:
            chosen = import_function("loss.objective", name) if ":" in name else name
            objective = resolve_objective("loss.overrides", resolve_objective("loss.objective", chosen, {}), overrides)
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error
        if objective.aggregate == "seq-mean-token-sum-norm" and objective.length_norm is None:
            return replace(objective, length_norm=float(self.rollout.max_response_tokens))
        return objective

    @property
    def uses_reference(self) -> bool:
        """Whether the loss or the reward needs a second policy."""
        if self.distillation is not None:
            return True
        if self.preference is not None:
            return self.preference.reference == "start"
        return self.objective.needs_reference or self.reward.kl is not None

    @property
    def loads_reference(self) -> bool:
        """Whether the reference is loaded. Otherwise, with adapters, it is the policy without them."""
        return self.uses_reference and (self.model.lora is None or self.reference_path is not None)

    @property
    def reference_path(self) -> str | None:
        """The path or name of the reference model; None for the model that training starts from."""
        return self.loss.reference if self.distillation is None else self.distillation.teacher

    @property
    def updates_per_step(self) -> int:
        return self.trained_per_step // self.mini_batch_size

    @property
    def max_age(self) -> int:
        """The maximum age of a group. The default exceeds `rollout.max_staleness` by 1: leftovers can fill a step."""
        return self.rollout.max_staleness + 1 if self.sampler.max_age is None else self.sampler.max_age

    @property
    def evaluation_tokens(self) -> int:
        """Maximum number of tokens in a response of an evaluation."""
        return self.evaluation.max_response_tokens or self.rollout.max_response_tokens

    @property
    def cache_length(self) -> int:
        """L_cache of Eq. 13: the length penalty grows over the last tokens of a response."""
        return self.reward.overlong.cache_length or max(1, self.rollout.max_response_tokens // 5)

    @property
    def longest_sequence(self) -> int:
        """Maximum number of tokens in a prompt and its response, in training and evaluation."""
        return self.rollout.max_prompt_tokens + max(self.rollout.max_response_tokens, self.evaluation_tokens)

    @property
    def tree(self) -> TreeShape | None:
        """The shape of the tree of `advantage.segments`. It has no levels if rollout.group_size is a prime."""
        segments = self.advantage.segments
        if segments is None or segments.kind != "tree":
            return None
        branching = factors(self.rollout.group_size)
        return TreeShape(branching, segments.tokens or self.rollout.max_response_tokens // max(1, len(branching)))

    def checks(self) -> Iterator[Check]:
        hint = did_you_mean(str(self.algorithm).lower().replace("-", "_"), ALGORITHMS)
        yield "algorithm", self.algorithm in (None, *ALGORITHMS), f"one of {', '.join(ALGORITHMS)}{hint}"
        for checks in (_sizes, _tree, _engine, _training, _objective):
            yield from checks(self)


def with_task_reward(raw: Any) -> Any:
    """Set the reward of reasoning-gym's tasks for a recipe that uses them and sets no other reward."""
    data, reward = ((raw.get(name) or {}) if isinstance(raw, Mapping) else {} for name in ("data", "reward"))
    has_tasks = isinstance(data, Mapping) and data.get("reasoning_gym") and "parts" not in reward
    return lay_over({"reward": {"kind": "reasoning_gym"}}, raw) if has_tasks else raw


def resolved(config: Config) -> dict[str, Any]:
    """Return the settings that follow from others, by dotted key."""
    return {
        "data.template": config.data.prompt_template,
        "sampler.max_age": config.max_age,
        "optimizer.mini_batch_size": config.mini_batch_size,
        "evaluation.max_response_tokens": config.evaluation_tokens,
        "reward.overlong.cache_length": config.cache_length,
    }


def _sizes(config: Config) -> Iterator[Check]:
    rollout, preference = config.rollout, config.preference
    limit, size = rollout.max_response_tokens, config.mini_batch_size
    fits = config.cache_length < limit or not config.reward.overlong.soft_punishment
    needs = f"less than rollout.max_response_tokens={limit} (or soft_punishment=false)"
    yield "reward.overlong.cache_length", fits, needs
    trained = config.trained_per_step
    yield "optimizer.mini_batch_size", trained % size == 0, f"a divisor of the {trained} training responses of a step"
    yield "optimizer.mini_batch_size", preference is None or size % 2 == 0, "an even number with preference"
    least = (1 if preference is None else 2) * (rollout.max_prompt_tokens + limit - 1)
    what = "sequence" if preference is None else "pair"
    yield "optimizer.token_budget", config.optimizer.token_budget >= least, f"at least {least}, the longest {what}"
    advantage, key = config.advantage, "rollout.group_size"
    has_advantages = advantage.segments is None and config.distillation is None
    compares = (has_advantages and advantage.kind in COMPARING) or config.sampler.filter_groups
    fits = rollout.group_size > 1 or not compares
    yield key, fits, f"at least 2 with advantage.kind={advantage.kind} or sampler.filter_groups"
    staleness = rollout.max_staleness
    yield "sampler.max_age", config.max_age >= staleness, f"at least rollout.max_staleness={staleness}"


def _tree(config: Config) -> Iterator[Check]:
    tree, segments, limit = config.tree, config.advantage.segments, config.rollout.max_response_tokens
    if tree is None or segments is None:
        return
    size = config.rollout.group_size
    yield "rollout.group_size", bool(tree.branching), "a product of two numbers"
    fits = not tree.branching or 0 < tree.tokens * (len(tree.branching) - 1) < limit
    yield "advantage.segments.tokens", fits, f"less than {limit} tokens (rollout) in all levels but the last"
    steps = math.ceil(size / (segments.per_step or size))
    yield "sampler.max_age", config.max_age >= steps - 1, f"at least {steps - 1}: a tree trains for {steps} steps"


def _engine(config: Config) -> Iterator[Check]:
    rollout, name = config.rollout, f"with rollout.engine={config.rollout.engine}"
    spec, (low, high) = rollout.engine_spec, rollout.engine_spec.temperatures
    for key in ("rollout.temperature", "evaluation.temperature"):
        yield key, read_key(config, key) == 0 or low <= read_key(config, key) <= high, f"{low:g} to {high:g} {name}"
    fits = not spec.reserves_memory or config.run.device in ONE_GPU
    yield "run.device", fits, f"{', '.join(ONE_GPU)} {name} (CUDA_VISIBLE_DEVICES chooses a GPU)"
    tree, n_continued = config.tree, config.advantage.segments.samples if config.advantage.segments else 0
    n_samples = max([config.evaluation.k, *(tree.branching if tree else (rollout.group_size, n_continued))])
    fits = not spec.is_remote or rollout.max_batch_sequences >= n_samples
    needs = f"at least {n_samples} (group_size, in a tree its largest factor; evaluation.k; segments.samples)"
    yield "rollout.max_batch_sequences", fits, needs
    compares = rollout.correction.enabled or rollout.max_mismatch_kl is not None
    fits = rollout.sampling_mask or not (compares and rollout.truncations)
    needs = "true with rollout.top_p, top_k or min_p and rollout.correction or max_mismatch_kl"
    yield "rollout.sampling_mask", fits, needs
    if rollout.sampling_mask:
        yield "rollout.sampling_mask", bool(rollout.truncations), "false without rollout.top_p, top_k or min_p"
        fits = spec.names_every_support or rollout.top_k is not None
        yield "rollout.top_k", fits, f"a number with rollout.sampling_mask {name}"


def _training(config: Config) -> Iterator[Check]:
    critic, data, steps = config.critic, config.data, config.run.steps
    replay, spec = config.loss.routing_replay, config.rollout.engine_spec
    fits = config.updates_per_step > 1 or config.rollout.correction.enabled or replay in (None, "engine")
    yield "loss.routing_replay", fits, "null or engine with one update per step (optimizer.mini_batch_size)"
    fits = spec.returns_experts and config.env is None and config.advantage.segments is None
    where = f"not engine with rollout.engine={config.rollout.engine}, env or advantage.segments"
    yield "loss.routing_replay", fits or replay != "engine", where
    yield from check_schedule(config)
    yield "critic", critic is not None or config.advantage.kind != "gae", "a section ({}) with advantage.kind=gae"
    yield "critic.warmup_steps", critic is None or critic.warmup_steps < steps, f"fewer than the {steps} steps"
    has_problems = bool(data.eval_size or data.eval)
    yield "data.eval_size", config.run.early_stop is None or has_problems, "more than 0 with run.early_stop"
    fits = "reasoning_gym" not in config.reward.uses or bool(data.reasoning_gym)
    yield "data.reasoning_gym", fits, "tasks with reward reasoning_gym"
    gives_rewards = config.env is not None and config.env.kind is not None
    needs_answers = not gives_rewards and config.distillation is None
    has_answers = data.columns is None or data.columns.answer is not None
    by_rubric = config.reward.judge is not None and "{reference}" not in config.reward.judge.template
    fits = not (by_rubric and has_answers and config.reward.uses == ["judge"])
    yield "reward.judge.template", fits, "a text with {reference} in it, or data.columns.answer=null"
    if not has_answers and needs_answers:
        rules = (set(config.reward.uses) & set(RULES)) - ({"judge"} if by_rubric else set())
        yield "data.columns.answer", not rules, f"a column, which reward {', '.join(sorted(rules))} reads"


def _objective(config: Config) -> Iterator[Check]:
    advantage, objective = config.advantage, config.objective
    fits = not weighs_responses(objective) or (advantage.segments is None and not advantage.by_token)
    what = f"advantage.kind={advantage.kind}" if advantage.by_token else "advantage.segments"
    yield "loss.objective", fits, f"one with a gradient of each token, such as ppo or gspo_token, with {what}"
    uses = objective.needs_reference or config.reward.kl is not None or config.preference is not None
    for key in ("loss.reference", "loss.reference_ema"):
        yield key, uses or read_key(config, key) is None, "null without loss.overrides.kl_coef or reward.kl"


def weighs_responses(objective: Objective) -> bool:
    """Return whether the objective gives all tokens of a response one weight. Their advantages must then be equal."""
    return objective.ratio in ("sequence", "sequence_clipped") or objective.sequence_weight


def check_schedule(config: Config) -> Iterator[Check]:
    """Check that the warm-up ends before the schedule does."""
    optimizer, steps = config.optimizer, config.run.steps
    fits = optimizer.schedule == "constant" or optimizer.warmup_steps < steps
    yield "optimizer.warmup_steps", fits, f"fewer than the {steps} steps"


def cautions(config: Config) -> Iterator[str]:
    """Yield warnings about settings that work but may be unintended, each as `key: consequence`."""
    rollout, sampler, reward = config.rollout, config.sampler, config.reward
    truncated = ", ".join(f"rollout.{name}={value:g}" for name, value in rollout.truncations.items())
    if truncated and not (rollout.sampling_mask or config.preference or config.distillation):
        yield f"{truncated}: the importance ratio is biased. rollout.sampling_mask corrects it (docs/mismatch.md)."
    if rollout.max_staleness and rollout.partial:
        yield (
            f"rollout.max_staleness={rollout.max_staleness}: one response may come from several policies, "
            "each token weighted by its own. Set rollout.partial=false to finish responses before new weights come, "
            "except preempted responses and episodes of several turns (docs/server.md)."
        )
    if (ramp := config.optimizer.warmup_steps) > config.run.steps:
        yield f"optimizer.warmup_steps={ramp}: the rate does not reach optimizer.lr in {config.run.steps} steps."
    is_graded = ":" in reward.kind or reward.kind == "reasoning_gym"
    is_game = config.env is not None and config.env.kind is not None
    if (is_graded or reward.parts or is_game) and sampler.filter_groups == "correctness":
        name = "env.kind" if is_game else "reward.parts" if reward.parts else f"reward.kind={reward.kind}"
        yield (
            f"{name}: groups are accepted by correctness, so graded rewards are lost where all "
            "samples are correct or all incorrect. Set sampler.filter_groups=reward to keep them, or null if "
            "rewards always differ (docs/your-own.md)."
        )
