"""The settings of `dapo sft`: sections named and read like those of a run, and nothing that it has no use for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from dapo_runner.config.data import DataConfig
from dapo_runner.config.judge import JudgePrompt
from dapo_runner.config.logging import LoggingConfig
from dapo_runner.config.loss import LossConfig
from dapo_runner.config.model import ModelConfig
from dapo_runner.config.optimizer import OptimizerConfig
from dapo_runner.config.parallel import ParallelConfig
from dapo_runner.config.run import RunConfig
from dapo_runner.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section
from dapo_runner.config.settings import Config


class SftRunConfig(Section):
    name: str = "sft"
    output_dir: Path = Path("runs")  # the run lives in output_dir/name
    seed: NonNegativeInt = 0
    epochs: PositiveFloat = 1.0
    eval_every: NonNegativeInt = 50  # updates; 0: only before the first and after the last
    save_every: NonNegativeInt = 200  # updates; 0: only after the last
    keep: PositiveInt = 2  # checkpoints kept; older ones are removed
    device: str = "auto"  # auto: cuda where there is one, else cpu
    grace: PositiveFloat = 20.0  # seconds from SIGTERM to the kill
    threads: PositiveInt | None = None  # CPU threads; None leaves torch's choice


class SftColumnsConfig(Section):
    """Which columns are what. Where ``messages`` is named, it alone is read."""

    prompt: str = "prompt"  # a text, or a list of chat messages
    completion: str = "completion"  # a text, or the assistant's message in a list
    messages: str | None = None  # a conversation that ends with the assistant's message


class SftDataConfig(Section):
    path: Path  # a .jsonl, .json, .csv or .parquet file, or a Hugging Face data set: a folder or its name on the hub
    subset: str | None = None
    split: str = "train"
    columns: SftColumnsConfig | None = None  # None: prompt and completion, messages, or what a judge said, by its names
    judge: JudgePrompt = JudgePrompt()  # what a judge's verdicts are made prompts with: as in reward.judge
    system: str | None = None  # a system message before every prompt that has none
    chat_template: Literal["auto", "always", "never"] = "auto"  # auto: where the tokenizer has one
    chat_template_kwargs: dict[str, Any] = {}  # as in reward.judge
    max_tokens: PositiveInt = 4096  # of a prompt and its completion; longer ones are left out and counted
    limit: PositiveInt | None = None  # only the first so many rows
    eval_path: Path | None = None  # held-out rows
    eval_size: NonNegativeInt = 64  # the first of eval_path, else cut from the training rows


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
    def _without_effect(self) -> SftConfig:
        unused: dict[str, tuple[Section, tuple[str, ...]]] = {
            "model": (self.model, ("tiny",)),
            "parallel": (self.parallel, ("rollout_tensor",)),
            "logging": (self.logging, ("rollouts", "samples")),
        }
        for section, (settings, names) in unused.items():
            for name in names:
                if getattr(settings, name) != type(settings).model_fields[name].default:
                    raise ValueError(f"{section}.{name}: has no effect in dapo sft")
        if self.optimizer.token_budget < self.data.max_tokens - 1:
            raise ValueError(
                f"optimizer.token_budget: expected at least {self.data.max_tokens - 1}, the positions of the longest "
                f"example (data.max_tokens − 1), got {self.optimizer.token_budget}"
            )
        return self

    @property
    def run_dir(self) -> Path:
        return self.run.output_dir / self.run.name

    def training(self, updates: int = 1) -> Config:
        """The same for what is shared with `dapo train`, where an update is a step of its own: cross-entropy is the
        policy gradient of the completions with an advantage of 1.
        """
        run: dict[str, Any] = self.run.model_dump(exclude={"epochs"})
        return Config(
            run=RunConfig(**run, steps=updates),
            model=self.model,
            data=DataConfig(path=self.data.path, eval_path=self.data.eval_path),
            loss=LossConfig(objective="reinforce"),
            optimizer=OptimizerConfig(**self.optimizer.model_dump()),
            parallel=self.parallel,
            logging=self.logging,
        )
