"""The settings of rollouts: engines, how they sample, what is done where engine and learner disagree."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from dapo_runner.config.engines import ENGINES, EngineSpec
from dapo_runner.config.rollout_server import ServerConfig
from dapo_runner.config.sampling import SamplingConfig
from dapo_runner.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section, Share


class CorrectionConfig(Section):
    """What is done about engine and learner disagreeing. Formulas: dapo_runner.algorithms.correction."""

    requires = {"weights": "cap", "mask": "bound"}

    weights: Literal["token", "sequence"] | None = None  # truncated importance weights
    cap: PositiveFloat = 2.0  # of the weights
    mask: Literal["token", "sequence"] | None = None  # leave tokens or sequences out of the loss
    bound: Annotated[float, Field(gt=1)] = 2.0  # masked beyond this ratio, or below its inverse

    @property
    def enabled(self) -> bool:
        return self.weights is not None or self.mask is not None


class ProbeConfig(Section):
    """After each sync the engine answers a few training prompts, and the learner says how likely those answers are."""

    enabled: bool = True  # the probe
    # Of the mean |Δ log-prob|. null: 0.001 in float32, 0.2 in bfloat16, and ten times the run's first gaps.
    bound: PositiveFloat | None = None


class VLLMConfig(Section):
    """vLLM, in this process or as `dapo serve` starts it."""

    enforce_eager: bool | None = None  # neither compilation nor CUDA graphs; null: on a CPU alone
    kv_cache_gib: PositiveFloat = 2.0  # of the KV cache, on a CPU
    gpu_memory: Share = 0.5  # share of the GPU's memory that weights and cache may take
    sleep: bool = True  # weights and cache leave the GPU while the policy trains; not those of a server


StopStrings = list[Annotated[str, Field(min_length=1)]]


class RolloutConfig(SamplingConfig):
    requires = {
        "loss.old_logprobs=learner": "correction",
        "rollout.correction.weights": "max_staleness",
    }

    engine: str = "hf"  # transformers (hf) or vLLM (vllm) in this process, or servers (server)
    vllm: VLLMConfig = VLLMConfig()
    server: ServerConfig = ServerConfig()
    # how many steps ahead of training responses are sampled; 0: one after the other
    max_staleness: NonNegativeInt = 0
    partial: bool = True  # asynchronous: responses under way go on under new weights; False: they end before these come
    probe: ProbeConfig = ProbeConfig()
    correction: CorrectionConfig = CorrectionConfig()
    group_size: PositiveInt = 16  # 1: where nothing is compared within a group
    temperature: PositiveFloat = 1.0
    # top_p, top_k, min_p: compute the learner's log-probs over the tokens that were left; otherwise the ratio is biased
    sampling_mask: bool = False
    stop: StopStrings = []  # a response ends where one of them is complete
    max_prompt_tokens: PositiveInt = 2048  # longer prompts are left out
    max_response_tokens: PositiveInt = 20480  # longer responses are cut
    max_batch_sequences: PositiveInt = 256  # responses that the engine decodes side by side

    @field_validator("engine")
    @classmethod
    def _in_the_table(cls, engine: str) -> str:
        if engine not in ENGINES:
            raise ValueError(f"expected one of {', '.join(ENGINES)}, got {engine!r}")
        return engine

    @property
    def engine_spec(self) -> EngineSpec:
        return ENGINES[self.engine]
