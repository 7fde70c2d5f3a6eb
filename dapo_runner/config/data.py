"""The settings of problems: data sets and their columns, generated arithmetic, reasoning-gym."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from dapo_runner.config.section import Check, Int, LocalPath, Name, NonNegativeInt, Plain, PositiveInt, Section

GYM_TEMPLATE = "{question}\n\nGive your final answer between <answer> and </answer>."  # reasoning-gym reads these tags


class ArithmeticConfig(Section):
    """Generated problems `a ? b`. Held-out problems never occur in training."""

    operators: list[Literal["+", "-", "*"]] = Field(default=["+"], min_length=1)  # each problem has one of them
    operands: Annotated[Int, Field(ge=2, le=8)] = 2  # numbers in a problem
    min_digits: PositiveInt = 1  # fewest digits of a number
    max_digits: Annotated[Int, Field(gt=0, le=9)] = 2  # most digits of a number
    even_digits: bool = False  # true: sample lengths uniformly, then digits; false: sample numbers uniformly
    train_size: PositiveInt = 4096  # training problems; data.eval_size others are held out

    def checks(self) -> Iterator[Check]:
        yield "min_digits", self.min_digits <= self.max_digits, f"at most max_digits={self.max_digits}"
        yield "max_digits", self.operands * self.max_digits <= 18, f"at most 18 / operands={self.operands}"


class ReasoningGymTask(Section):
    """A task of reasoning-gym (`pip install 'dapo-kernels[reasoning-gym]'`): docs/environments.md."""

    name: str  # e.g. countdown; evaluation metrics are also logged by task
    config: dict[str, Plain] = {}  # options of the task in reasoning-gym, except size, which data.limit sets
    weight: PositiveFloat = 1.0  # its share of the problems is weight / sum of the weights

    def checks(self) -> Iterator[Check]:
        unsound = ("coin_flip", "complex_arithmetic", "game_of_life_halting", "number_sorting", "puzzle24")
        yield "name", self.name not in unsound, f"no task that scores a wrong answer 1 ({', '.join(unsound)})"
        yield "config", "size" not in self.config, "no size (data.limit and data.eval_size decide)"


class ColumnsConfig(Section):
    """Which columns of a data set hold what: docs/your-own.md."""

    prompt: str  # a text, or a list of chat messages {role, content}
    answer: str | None = None  # the ground truth; null if the reward does not need it
    choices: str | None = None  # options of a multiple-choice problem, shown as A. B. …; the answer becomes a letter
    source: str = "data_source"  # evaluation metrics are also logged per value of this column; the default is optional


class SourceConfig(Section):
    subset: str | None = None  # subset of a Hugging Face data set
    split: str = "train"  # split of a Hugging Face data set
    limit: PositiveInt | None = None  # use only the first N problems; `dapo train` does not count repeated rows


class ProblemsConfig(SourceConfig):
    """The format of a data set's rows."""

    requires = {"format=auto": "columns"}

    format: Literal["auto", "dapo", "gsm8k"] = "auto"  # auto: detected from the columns
    columns: ColumnsConfig | None = None  # null: those of the format; in data.eval: those of data.columns


class EvalSetConfig(ProblemsConfig):
    path: LocalPath  # as data.path
    split: str = "test"


class PromptsConfig(SourceConfig):
    """How `dapo train` and `dapo sft` turn rows into prompts."""

    system: str | None = None  # a system message for prompts without one
    chat_template: Literal["auto", "always", "never"] = "auto"  # auto: if the tokenizer has one
    chat_template_kwargs: dict[str, Plain] = {}  # arguments of the chat template, e.g. {enable_thinking: false}
    eval_size: NonNegativeInt = 256  # problems held out from the training set; ignored if data.eval is set

    def checks(self) -> Iterator[Check]:
        reserved = {"add_generation_prompt", "chat", "tokenize", "tokenizer", "tools", "turns", "until"}
        found = sorted(reserved & self.chat_template_kwargs.keys())
        yield "chat_template_kwargs", not found, f"names other than {', '.join(found)}, which the trainer sets"


class DataConfig(PromptsConfig, ProblemsConfig):
    requires = {
        "format=auto|dapo|gsm8k": "path eval limit system",
        "!reasoning_gym": "path eval columns",
        "format=auto": "reasoning_gym",
    }

    path: LocalPath | None = None  # a .jsonl, .json, .csv or .parquet file, or a Hugging Face set: folder or hub name
    # auto: detected from the columns; arithmetic: generated problems
    format: Literal["auto", "dapo", "gsm8k", "arithmetic"] = "auto"  # type: ignore[assignment]
    # dapo, plain, or a text with {question}. null: <answer> tags with reasoning_gym, plain with columns, else dapo
    template: str | None = None
    eval: dict[Name, EvalSetConfig] = {}  # evaluation sets by name
    arithmetic: ArithmeticConfig = ArithmeticConfig()
    reasoning_gym: list[ReasoningGymTask] = []  # generated tasks; 2048 training problems unless data.limit is set

    @property
    def prompt_template(self) -> str:
        """The template in use. The default, DAPO's instruction, is for mathematics; custom columns get `plain`."""
        default = "dapo" if self.columns is None else "plain"
        return self.template or (GYM_TEMPLATE if self.reasoning_gym else default)

    def checks(self) -> Iterator[Check]:
        yield from super().checks()
        has_data = self.path is not None or self.format == "arithmetic" or bool(self.reasoning_gym)
        yield "path", has_data, "a .jsonl, .json, .csv or .parquet file or a data set"
        fits = self.prompt_template in ("dapo", "plain") or "{question}" in self.prompt_template
        yield "template", fits, "dapo, plain or a text with {question}"
