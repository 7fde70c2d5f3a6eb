"""The settings of the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dapo_runner.config.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class OptimizerConfig(Section):
    requires = {"schedule=linear|cosine": "min_lr_ratio"}

    lr: PositiveFloat = 1e-6  # peak learning rate
    warmup_steps: NonNegativeInt = 20  # linear, in rollout steps
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up: dapo_runner.algorithms.weights
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of lr at which linear and cosine end, at run.steps
    weight_decay: NonNegativeFloat = 0.1  # of AdamW
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)  # of AdamW
    eps: PositiveFloat = 1e-8  # of AdamW
    grad_clip: PositiveFloat | None = 1.0  # null: no clipping
    mini_batch_size: PositiveInt | None = 512  # responses per update; null: one update per rollout step
    token_budget: PositiveInt = 22528  # packed positions per micro-batch
