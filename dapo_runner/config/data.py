"""The settings of problems: data sets, which columns are what, generated arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from dapo_runner.config.section import Int, Name, NonNegativeInt, PositiveInt, Section


class ArithmeticConfig(Section):
    """Generated problems `a ? b`. The split is by problem, so the held-out ones never occur in training."""

    operators: list[Literal["+", "-", "*"]] = Field(default=["+"], min_length=1)
    operands: Annotated[Int, Field(ge=2, le=8)] = 2
    min_digits: PositiveInt = 1
    max_digits: Annotated[Int, Field(gt=0, le=9)] = 2
    even_digits: bool = False  # as many operands of each length; else of each value, and most are of max_digits
    train_size: PositiveInt = 4096
    eval_size: PositiveInt = 256
    seed: NonNegativeInt = 0  # of the problems and the split; apart from run.seed so that runs can share one task

    @model_validator(mode="after")
    def _digits_in_order(self) -> ArithmeticConfig:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits must be ≤ max_digits={self.max_digits}, got {self.min_digits}")
        if self.operands * self.max_digits > 18:
            raise ValueError(f"operands × max_digits must be ≤ 18, got {self.operands} × {self.max_digits}")
        return self


class ColumnsConfig(Section):
    """Which columns of a data set are what: docs/your-own.md."""

    prompt: str  # a text, or a list of chat messages {role, content}
    answer: str | None = None  # the ground truth; None: the reward wants none
    choices: str | None = None  # the texts to choose from, shown as A. B. …; the answer becomes one of these letters
    source: str = "data_source"  # what evaluation figures are told apart by, where a row has it


class EvalSetConfig(Section):
    """One of several evaluation sets."""

    path: Path  # as data.path
    subset: str | None = None
    split: str = "test"
    format: Literal["auto", "dapo", "gsm8k"] = "auto"
    columns: ColumnsConfig | None = None  # None: those of data.columns
    size: PositiveInt | None = None  # the first so many problems; None: all


class DataConfig(Section):
    path: Path | None = None  # a .jsonl, .json, .csv or .parquet file, or a Hugging Face data set: folder or hub name
    subset: str | None = None  # of a Hugging Face data set
    split: str = "train"
    format: Literal["auto", "dapo", "gsm8k", "arithmetic"] = "auto"
    columns: ColumnsConfig | None = None  # None: those of the format
    system: str | None = None  # a system message before every prompt that has none
    template: str | None = None  # dapo, plain or a text with {question}; null: plain with columns, else dapo
    chat_template: Literal["auto", "always", "never"] = "auto"  # auto: where the tokenizer has one
    dedupe: bool = True
    on_conflict: Literal["drop", "first", "error"] = "drop"  # one prompt, several answers: which of them is right?
    eval_path: Path | None = None
    eval_format: Literal["auto", "dapo", "gsm8k"] = "auto"
    eval_size: NonNegativeInt = 256  # held-out problems: the first of eval_path, else cut from the training file
    eval: dict[Name, EvalSetConfig] = {}  # several evaluation sets by name, in place of eval_path and eval_size
    limit: PositiveInt | None = None  # only the first so many problems of path, repeated rows not counted
    arithmetic: ArithmeticConfig = ArithmeticConfig()

    @property
    def prompt_template(self) -> str:
        """By default DAPO's instruction, which is for mathematics; columns of your own need not hold that."""
        return self.template or ("dapo" if self.columns is None else "plain")

    @model_validator(mode="after")
    def _path_or_generator(self) -> DataConfig:
        if self.format == "arithmetic":
            if self.path is not None or self.eval_path is not None or self.eval or self.columns is not None:
                raise ValueError(
                    "format 'arithmetic' generates its problems: path, columns, eval_path and eval must be null"
                )
        elif self.path is None:
            raise ValueError(
                "path: expected a .jsonl, .json, .csv or .parquet file or a Hugging Face data set (or format: "
                "arithmetic), got null"
            )
        if self.columns is not None and self.format != "auto":
            raise ValueError(f"format: expected auto beside columns, which say what a row holds, got {self.format}")
        if self.eval and self.eval_path is not None:
            raise ValueError(f"eval_path: expected null beside eval, which names every set, got {self.eval_path}")
        if self.template not in (None, "dapo", "plain") and "{question}" not in self.prompt_template:
            raise ValueError(
                f"template: expected 'dapo', 'plain' or a text with {{question}} in it, got {self.template!r}"
            )
        return self
