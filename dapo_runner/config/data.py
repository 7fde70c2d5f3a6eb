"""The settings of problems: data sets, which columns are what, generated arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dapo_runner.config.section import Check, Int, Name, NonNegativeInt, PositiveInt, Section


class ArithmeticConfig(Section):
    """Generated problems `a ? b`. The split is by problem, so the held-out ones never occur in training."""

    operators: list[Literal["+", "-", "*"]] = Field(default=["+"], min_length=1)  # one of them in each problem
    operands: Annotated[Int, Field(ge=2, le=8)] = 2  # numbers in a problem
    min_digits: PositiveInt = 1  # of each number
    max_digits: Annotated[Int, Field(gt=0, le=9)] = 2  # of each number
    even_digits: bool = False  # numbers of each length are equally frequent; otherwise all numbers are
    train_size: PositiveInt = 4096  # training problems; data.eval_size more are held out

    def checks(self) -> Iterator[Check]:
        yield "min_digits", self.min_digits <= self.max_digits, f"at most max_digits={self.max_digits}"
        yield "max_digits", self.operands * self.max_digits <= 18, f"at most 18 / operands={self.operands}"


class ColumnsConfig(Section):
    """Which columns of a data set are what: docs/your-own.md."""

    prompt: str  # a text, or a list of chat messages {role, content}
    answer: str | None = None  # the ground truth; null: the reward needs none
    choices: str | None = None  # the texts to choose from, shown as A. B. …; the answer becomes one of these letters
    source: str = "data_source"  # evaluation metrics are also logged by the values of this column


class SourceConfig(Section):
    subset: str | None = None  # of a Hugging Face data set
    split: str = "train"  # of a Hugging Face data set
    limit: PositiveInt | None = None  # only the first so many problems, repeated rows not counted


class ProblemsConfig(SourceConfig):
    """What the rows of a data set are."""

    requires = {"format=auto": "columns"}

    format: Literal["auto", "dapo", "gsm8k"] = "auto"  # auto: by the columns
    columns: ColumnsConfig | None = None  # null: those of the format; of an evaluation set: data.columns


class EvalSetConfig(ProblemsConfig):
    path: Path  # as data.path
    split: str = "test"


class PromptsConfig(SourceConfig):
    """What is made of the rows, in `dapo train` and in `dapo sft`."""

    system: str | None = None  # a system message for every prompt that has none
    chat_template: Literal["auto", "always", "never"] = "auto"  # auto: if the tokenizer has one
    eval_size: NonNegativeInt = 256  # problems held out from the training set; without effect if eval is set


class DataConfig(PromptsConfig, ProblemsConfig):
    requires = {"format=auto|dapo|gsm8k": "path eval"}

    path: Path | None = None  # a .jsonl, .json, .csv or .parquet file, or a Hugging Face data set: folder or hub name
    # auto: by the columns; arithmetic: generated
    format: Literal["auto", "dapo", "gsm8k", "arithmetic"] = "auto"  # type: ignore[assignment]
    template: str | None = None  # dapo, plain or a text with {question}; null: plain with columns, else dapo
    eval: dict[Name, EvalSetConfig] = {}  # evaluation sets by name
    arithmetic: ArithmeticConfig = ArithmeticConfig()

    @property
    def prompt_template(self) -> str:
        """By default DAPO's instruction, which is for mathematics; columns of your own need not hold that."""
        return self.template or ("dapo" if self.columns is None else "plain")

    def checks(self) -> Iterator[Check]:
        has_data = self.path is not None or self.format == "arithmetic"
        yield "path", has_data, "a .jsonl, .json, .csv or .parquet file or a data set"
        fits = self.prompt_template in ("dapo", "plain") or "{question}" in self.prompt_template
        yield "template", fits, "dapo, plain or a text with {question}"
