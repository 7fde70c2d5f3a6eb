"""The settings of `dapo sft`: sections named and read like those of a run, and nothing that it has no use for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from dapo_runner.config.data import DataConfig, DatasetConfig, EvalSetConfig
from dapo_runner.config.judge import JudgePrompt
from dapo_runner.config.logging import LoggingConfig
from dapo_runner.config.loss import LossConfig
from dapo_runner.config.model import ModelConfig
from dapo_runner.config.optimizer import OptimizerConfig
from dapo_runner.config.parallel import ParallelConfig
from dapo_runner.config.run import JobConfig, RunConfig
from dapo_runner.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section
from dapo_runner.config.settings import Config


class SftRunConfig(JobConfig):
    name: str = "sft"
    epochs: PositiveFloat = 1.0  # passes over the training examples
    eval_every: NonNegativeInt = 50
    save_every: NonNegativeInt = 200


class SftColumnsConfig(Section):
    """Which columns are what. Where ``messages`` is named, it alone is read."""

    prompt: str = "prompt"  # a text, or a list of chat messages
    completion: str = "completion"  # a text, or the assistant's message in a list
    messages: str | None = None  # a conversation that ends with the assistant's message


class SftDataConfig(DatasetConfig):
    path: Path  # as data.path of a run
    columns: SftColumnsConfig | None = None  # null: prompt and completion, messages, or those of a judge's verdicts
    judge: JudgePrompt = JudgePrompt()  # what verdicts are made prompts with, as in reward.judge
    chat_template_kwargs: dict[str, Any] = {}  # as in reward.judge
    max_tokens: PositiveInt = 4096  # of a prompt and its completion; longer ones are left out and counted
    eval_path: Path | None = None  # held-out rows
    eval_size: NonNegativeInt = 64  # the first rows of eval_path, or rows cut from the training set


class SftOptimizerConfig(OptimizerConfig):
    lr: PositiveFloat = 1e-5
    warmup_steps: NonNegativeInt = 20  # updates
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    mini_batch_size: PositiveInt = 64  # examples of an update


class SftConfig(Section):
    """Everything that a supervised run depends on."""

    run: SftRunConfig = SftRunConfig()
    model: ModelConfig
    data: SftDataConfig
    optimizer: SftOptimizerConfig = SftOptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _check_model_and_lengths(self) -> SftConfig:
        if self.model.path is None:
            raise ValueError("model.path: expected a model to train further, got null")
        longest = self.data.max_tokens - 1
        if self.optimizer.token_budget < longest:
            raise ValueError(
                f"optimizer.token_budget: expected at least {longest}, the longest example (data.max_tokens), got "
                f"{self.optimizer.token_budget}"
            )
        return self

    @property
    def run_dir(self) -> Path:
        return self.run.output_dir / self.run.name

    def training(self, updates: int = 1) -> Config:
        """Return the configuration of the same training in `dapo train`, where an update is a step of its own:
        cross-entropy is the policy gradient of the completions with an advantage of 1.
        """
        heldout = {} if self.data.eval_path is None else {"heldout": EvalSetConfig(path=self.data.eval_path)}
        return Config(
            run=RunConfig(**self.run.model_dump(exclude={"epochs"}), steps=updates),
            model=self.model,
            data=DataConfig(path=self.data.path, eval=heldout),
            loss=LossConfig(objective="reinforce"),
            optimizer=OptimizerConfig(**self.optimizer.model_dump()),
            parallel=self.parallel,
            logging=self.logging,
        )
