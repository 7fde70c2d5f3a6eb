"""The settings of `dapo convert-answers`."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from dapo_runner.config.data import ColumnsConfig
from dapo_runner.config.judge import AskedModel
from dapo_runner.config.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class ConvertConfig(AskedModel):
    """Which model rewrites problems, and what they are read from. docs/convert-answers.md."""

    requires = {"engine=hf": "batch", "engine=endpoint": "concurrency retries timeout"}

    # Of IN, as in `data`.
    format: Literal["auto", "dapo", "gsm8k"] = "auto"
    columns: ColumnsConfig | None = None
    subset: str | None = None
    split: str = "train"
    limit: PositiveInt | None = None  # only the first so many problems
    # Of a reply.
    temperature: NonNegativeFloat = 0.0
    max_tokens: PositiveInt = 8192
    unchecked: Literal["keep", "reject"] = "keep"  # what the rules cannot evaluate
    # Engine hf.
    batch: PositiveInt = 32  # problems that are decoded side by side
    # Engine endpoint.
    concurrency: PositiveInt = 16  # requests at a time
    retries: NonNegativeInt = 2  # of a failed request, before all is given up
    timeout: PositiveFloat = 600.0  # seconds without a sign of the server

    @model_validator(mode="after")
    def _used(self) -> ConvertConfig:
        if self.columns is not None and self.columns.answer is None:
            raise ValueError("columns.answer: expected the column of the answers, got null")
        return self
