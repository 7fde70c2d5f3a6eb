"""The settings of rollouts: engines, how they sample, what is done where engine and learner disagree."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

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

    prompts: NonNegativeInt = 8  # 0: no probe
    tokens: PositiveInt = 4  # of each answer
    # Of the mean |Δ log-prob|. null: 0.001 in float32, 0.2 in bfloat16, and ten times the run's first gaps.
    bound: PositiveFloat | None = None


class VLLMConfig(Section):
    """vLLM, in this process or as `dapo serve` starts it. The first two are for the CPU, the rest for GPUs."""

    kv_cache_gib: PositiveFloat = 2.0  # of the KV cache, on a CPU
    compile: bool = False  # costs about a minute at the start
    gpu_memory: Share = 0.5  # share of the GPU's memory that weights and cache may take
    cuda_graphs: bool = True  # capture them at the start
    sleep: bool = True  # weights and cache leave the GPU while the policy trains; not those of a server


StopStrings = list[Annotated[str, Field(min_length=1)]]


class RolloutConfig(SamplingConfig):
    requires = {
        "loss.old_logprobs=learner": "correction",
        "engine=server rollout.correction.weights": "max_staleness",
        "engine=hf|vllm": "sampling_mask",
    }

    engine: Literal["hf", "vllm", "server"] = "hf"  # transformers or vLLM in this process, or servers
    vllm: VLLMConfig = VLLMConfig()
    server: ServerConfig = ServerConfig()
    # server: how many steps ahead of training responses are sampled; 0: one after the other
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
