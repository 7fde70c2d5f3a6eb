"""Settings of the policy: an existing model or a tiny one, and its adapters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dapo_runner.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section, Share


class WarmupConfig(Section):
    """A short supervised warm-up of the tiny model."""

    steps: NonNegativeInt = 300  # supervised steps; 0: none
    batch_size: PositiveInt = 64  # worked examples in a step
    examples: PositiveInt = 2000  # worked examples in all
    lr: PositiveFloat = 1e-3  # of the warm-up
    repeat: Annotated[float, Field(ge=0, lt=1)] = 0.0  # probability that a line of an example comes again, each time
    stop_at: Share | None = None  # end early, once this share of training problems it has not seen is solved


class TinyModelConfig(Section):
    """A small transformer and tokenizer, made without a download."""

    layers: PositiveInt = 2  # of the transformer
    hidden_size: PositiveInt = 128  # of the layers
    heads: PositiveInt = 4  # of attention
    intermediate_size: PositiveInt = 512  # of the MLPs
    warmup: WarmupConfig = WarmupConfig()

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> TinyModelConfig:
        if self.hidden_size % self.heads:
            raise ValueError(f"heads must divide hidden_size={self.hidden_size}, got {self.heads}")
        return self


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685) through peft. Only they train; the model without them is the reference.

    There is no dropout, because two passes over one policy must agree. The rollout engine serves the merged weights,
    rounded to `model.dtype` (docs/vllm.md).
    """

    rank: PositiveInt = 32  # of the adapters
    alpha: PositiveInt = 64  # adapters are scaled by alpha / rank
    targets: str | list[str] = "all-linear"  # names of modules; all-linear is every linear layer but the head


class ModelConfig(Section):
    path: str | None = None  # a folder in transformers' format or a hub name
    tiny: TinyModelConfig | None = None  # a small model made on the spot
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of weights and activations; the optimizer keeps float32
    attention: Literal["auto", "sdpa"] = "auto"  # auto: varlen on CUDA in half precision, else sdpa
    gradient_checkpointing: bool = False  # compute activations again in the backward pass: less memory
    compile: bool = False  # torch.compile for what lies between the matrix products of a layer; costs some 10 s once
    lora: LoraConfig | None = None  # train low-rank adapters only
    trust_remote_code: bool = False  # run the code that comes with a model

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        if (self.path is None) == (self.tiny is None):
            given = "neither" if self.path is None else "both (set the unwanted one to null)"
            raise ValueError(f"expected exactly one of 'path' and 'tiny', got {given}")
        return self
