"""The settings of problems: data sets, which columns are what, generated arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from dapo_runner.config.section import Int, Name, NonNegativeInt, PositiveInt, Section


class ArithmeticConfig(Section):
    """Generated problems `a ? b`. The split is by problem, so the held-out ones never occur in training."""

    operators: list[Literal["+", "-", "*"]] = Field(default=["+"], min_length=1)  # one of them in each problem
    operands: Annotated[Int, Field(ge=2, le=8)] = 2  # numbers in a problem
    min_digits: PositiveInt = 1  # of each number
    max_digits: Annotated[Int, Field(gt=0, le=9)] = 2  # of each number
    even_digits: bool = False  # numbers of each length are equally frequent; otherwise all numbers are
    train_size: PositiveInt = 4096  # training problems; data.eval_size more are held out

    @model_validator(mode="after")
    def _check_digits(self) -> ArithmeticConfig:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits: expected at most max_digits={self.max_digits}, got {self.min_digits}")
        if self.operands * self.max_digits > 18:
            raise ValueError(
                f"max_digits: expected operands × max_digits ≤ 18, got {self.operands} × {self.max_digits}"
            )
        return self


class ColumnsConfig(Section):
    """Which columns of a data set are what: docs/your-own.md."""

    prompt: str  # a text, or a list of chat messages {role, content}
    answer: str | None = None  # the ground truth; null: the reward needs none
    choices: str | None = None  # the texts to choose from, shown as A. B. …; the answer becomes one of these letters
    source: str = "data_source"  # evaluation metrics are also logged by the values of this column


class SourceConfig(Section):
    """Which part of a Hugging Face data set is read."""

    subset: str | None = None  # of a Hugging Face data set
    split: str = "train"  # of a Hugging Face data set


class EvalSetConfig(SourceConfig):
    """An evaluation set."""

    requires = {"format=auto": "columns"}

    path: Path  # as data.path
    split: str = "test"
    format: Literal["auto", "dapo", "gsm8k"] = "auto"  # as data.format
    columns: ColumnsConfig | None = None  # null: those of data.columns
    limit: PositiveInt | None = None  # only the first so many problems


class DatasetConfig(SourceConfig):
    """What is made of the rows, in `dapo train` and in `dapo sft`."""

    system: str | None = None  # a system message for every prompt that has none
    chat_template: Literal["auto", "always", "never"] = "auto"  # auto: if the tokenizer has one
    limit: PositiveInt | None = None  # only the first so many problems of path, repeated rows not counted


class DataConfig(DatasetConfig):
    requires = {"format=auto": "columns", "format=auto|dapo|gsm8k": "path eval"}

    path: Path | None = None  # a .jsonl, .json, .csv or .parquet file, or a Hugging Face data set: folder or hub name
    format: Literal["auto", "dapo", "gsm8k", "arithmetic"] = "auto"  # auto: by the columns; arithmetic: generated
    columns: ColumnsConfig | None = None  # null: those of the format
    template: str | None = None  # dapo, plain or a text with {question}; null: plain with columns, else dapo
    eval_size: NonNegativeInt = 256  # problems held out from the training set; without effect if eval is set
    eval: dict[Name, EvalSetConfig] = {}  # evaluation sets by name
    arithmetic: ArithmeticConfig = ArithmeticConfig()

    @property
    def prompt_template(self) -> str:
        """By default DAPO's instruction, which is for mathematics; columns of your own need not hold that."""
        return self.template or ("dapo" if self.columns is None else "plain")

    @model_validator(mode="after")
    def _check_source(self) -> DataConfig:
        if self.path is None and self.format != "arithmetic":
            raise ValueError("path: expected a .jsonl, .json, .csv or .parquet file or a data set, got null")
        if self.prompt_template not in ("dapo", "plain") and "{question}" not in self.prompt_template:
            raise ValueError(f"template: expected dapo, plain or a text with {{question}}, got {self.template!r}")
        return self
