"""The settings of the other commands: `dapo sft`, `dapo study`, `dapo convert-answers`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat

from dapo_runner.config.data import DataConfig, ProblemsConfig, PromptsConfig
from dapo_runner.config.reward import AuxiliaryModel, JudgePrompt
from dapo_runner.config.run import JobConfig, RunConfig, RunName, TrainingConfig
from dapo_runner.config.section import Check, LocalPath, MayChange, Name, NonNegativeInt, Plain, PositiveInt, Section
from dapo_runner.config.settings import Config
from dapo_runner.config.training import LossConfig, OptimizerConfig


class SftRunConfig(JobConfig):
    name: MayChange[RunName] = "sft"
    epochs: MayChange[PositiveFloat] = 1.0  # passes over the training examples; the next pass fills up the last update
    eval_every: MayChange[NonNegativeInt] = 50
    save_every: MayChange[NonNegativeInt] = 200


class SftColumnsConfig(Section):
    """Which columns hold what. If ``messages`` is set, the other two are not read."""

    prompt: str = "prompt"  # a text, or a list of chat messages
    completion: str = "completion"  # a text, or the assistant's message in a list
    messages: str | None = None  # a conversation that ends with the assistant's message


class SftDataConfig(PromptsConfig):
    path: LocalPath  # as data.path in dapo train
    columns: SftColumnsConfig | None = None  # null: prompt and completion, or messages, or the columns of verdicts
    judge: JudgePrompt = JudgePrompt()  # the prompt for verdicts, as in reward.judge
    max_tokens: PositiveInt = 4096  # tokens of prompt and completion together; longer examples are left out and counted
    eval_path: LocalPath | None = None  # data set of held-out rows, read with data.subset and eval_split
    eval_split: str = "test"  # split of eval_path, if that is a Hugging Face data set
    eval_size: NonNegativeInt = 64  # the first rows of eval_path, or rows held out from the training set


class SftOptimizerConfig(OptimizerConfig):
    lr: MayChange[PositiveFloat] = 1e-5
    warmup_steps: NonNegativeInt = 20  # updates of linear warm-up
    schedule: MayChange[Literal["constant", "linear", "cosine"]] = "cosine"
    mini_batch_size: PositiveInt = 64  # examples of an update


class SftConfig(TrainingConfig):
    run: SftRunConfig = SftRunConfig()
    data: SftDataConfig
    optimizer: SftOptimizerConfig = SftOptimizerConfig()

    def checks(self) -> Iterator[Check]:
        yield "model.path", self.model.path is not None, "a model to train further"
        longest = self.data.max_tokens - 1
        yield "optimizer.token_budget", self.optimizer.token_budget >= longest, f"at least {longest} (data.max_tokens)"

    def training(self, updates: int = 1) -> Config:
        """Return the same training for `dapo train`: cross-entropy is the policy gradient with an advantage of 1."""
        return Config(
            run=RunConfig(**self.run.model_dump(exclude={"epochs"}), steps=updates),
            model=self.model,
            data=DataConfig(path=self.data.path),
            loss=LossConfig(objective="reinforce"),
            optimizer=OptimizerConfig(**self.optimizer.model_dump()),
            parallel=self.parallel,
            logging=self.logging,
        )


class VariantConfig(Section):
    name: Name  # name of the folder of its runs
    label: str | None = None  # null: the name
    over: Name | None = None  # an earlier variant whose overrides this one extends
    overrides: dict[str, Plain] = {}  # sections, or dotted keys
    against: Name | None = None  # the variant it is tested against; null: the previous one


class FigureConfig(Section):
    """A picture with one column per curve: the means of the variants, and their differences to the first variant."""

    name: Name  # name of its file
    title: str  # title above the picture
    variants: list[Name] = Field(min_length=1)  # one line each; the first is the baseline
    curves: list[str] = Field(min_length=1)  # metrics, named as in metrics.jsonl
    x: Literal["step", "tokens", "updates", "seconds"] = "step"  # the horizontal axis


class StudyConfig(Section):
    name: Name = "study"  # name of the study's folder
    title: str = "Study"  # title of the study's page
    about: str = ""  # a paragraph under the title
    base: str  # a YAML file, beside the study's own, or the name of a recipe
    output_dir: LocalPath = Path("studies")  # the study lives in output_dir/name
    runs: Name | None = None  # another study whose runs to use instead of training again
    seeds: list[NonNegativeInt] = Field(min_length=1)  # one run per variant and seed
    overrides: dict[str, Plain] = {}  # applied to the base, for every variant
    # each: every run makes its own tiny model; per_seed: all variants of a seed share one, made as in the base
    start: Literal["each", "per_seed"] = "each"
    variants: list[VariantConfig] = Field(min_length=1)
    figures: list[FigureConfig] = []
    entropy_fit: list[Name] = []  # variants for the fit of accuracy to entropy: arXiv 2505.22617, eq. 1
    threads: PositiveInt = 1  # CPU threads of a run

    @property
    def folder(self) -> Path:
        return self.output_dir / self.name

    @property
    def folder_of_runs(self) -> Path:
        return self.output_dir / (self.runs or self.name)

    def checks(self) -> Iterator[Check]:
        names = [variant.name for variant in self.variants]
        yield "seeds", len(set(self.seeds)) == len(self.seeds), "each once"
        yield "variants", len(set(names)) == len(names), f"names that differ (not {', '.join(names)})"
        for n, variant in enumerate(self.variants):
            is_above = {variant.over, variant.against} <= {None, *names[:n]}
            above = f"to name a variant above it: {', '.join(names[:n])}" if n else "to be null in the first variant"
            yield "variants", is_above, f"{variant.name}'s over and against {above}"
        for figure in self.figures:
            yield "figures", set(figure.variants) <= set(names), f"variants of this study in {figure.name}"
        yield "entropy_fit", set(self.entropy_fit) <= set(names), "variants of this study"


class ConvertConfig(AuxiliaryModel, ProblemsConfig):
    """The model that rewrites problems, and the data set to read: docs/convert-answers.md.

    A reply has up to 8192 tokens; `options.max_tokens` sets another limit.
    """

    model: str  # the model's name on the server
    url: MayChange[str]  # address of an OpenAI-compatible API, e.g. http://localhost:8000/v1
    limit: MayChange[PositiveInt | None] = None
    concurrency: MayChange[PositiveInt] = 16  # requests at a time

    def checks(self) -> Iterator[Check]:
        yield from super().checks()
        yield "columns.answer", self.columns is None or self.columns.answer is not None, "the column of the answers"
