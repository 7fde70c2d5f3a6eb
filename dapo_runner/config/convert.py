"""The settings of `dapo convert-answers`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from dapo_runner.config.data import ColumnsConfig, SourceConfig
from dapo_runner.config.judge import AskedModel
from dapo_runner.config.section import PositiveInt


class ConvertConfig(AskedModel, SourceConfig):
    """Which model rewrites problems, and what they are read from. docs/convert-answers.md."""

    requires = {"url": "concurrency"}

    format: Literal["auto", "dapo", "gsm8k"] = "auto"  # as data.format
    columns: ColumnsConfig | None = None  # as data.columns
    limit: PositiveInt | None = None  # only the first so many problems
    chat_template_kwargs: dict[str, Any] = {}  # {enable_thinking: false} for a model that would think first
    max_tokens: PositiveInt = 8192  # of a reply
    concurrency: PositiveInt = 16  # requests at a time

    @model_validator(mode="after")
    def _used(self) -> ConvertConfig:
        if self.columns is not None and self.columns.answer is None:
            raise ValueError("columns.answer: expected the column of the answers, got null")
        return self
