"""The rollout engines, and what each of them can do: `rollout.engine` names one.

A new engine is a class (``dapo_runner.rollout.engine.RolloutEngine``) in a file of its own, and a row here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine can do. The defaults are those of an engine with a copy of the weights on every rank.

    Attributes:
        implementation: Of the class, `module:name`. It is imported when a run starts.
        is_remote: Other processes hold its weights, which take no memory of the trainer's.
        reserves_memory: Its process takes `rollout.vllm.gpu_memory` of the first GPU that it sees, or
            `rollout.vllm.kv_cache_gib`, at the start.
        is_tensor_parallel: Ranks can share one engine (`parallel.rollout_tensor`).
        is_asynchronous: It takes new weights while it generates, and says which version gave which token.
        drops_answers: It can end a call before every prompt is answered.
        names_kept_tokens: For which truncations it names the tokens that were left to sample from.
        has_sliding_windows: It computes the sliding windows of every model.
        takes_whole_groups: It refuses more samples of a prompt than it decodes side by side.
        temperatures: The range that it samples at, apart from 0 (greedy).
    """

    implementation: str
    is_remote: bool = False
    reserves_memory: bool = False
    is_tensor_parallel: bool = False
    is_asynchronous: bool = False
    drops_answers: bool = False
    names_kept_tokens: Literal["any", "top_k", "none"] = "none"
    has_sliding_windows: bool = False
    takes_whole_groups: bool = False
    temperatures: tuple[float, float] = (0.0, float("inf"))


# vLLM 0.32 samples at 0.01 whatever smaller temperature it is given and takes none above 2.
VLLM_TEMPERATURES = (0.01, 2.0)
ENGINES = {
    "hf": EngineSpec("dapo_runner.rollout.hf:HFEngine", names_kept_tokens="any", has_sliding_windows=True),
    "vllm": EngineSpec(
        "dapo_runner.rollout.vllm:VLLMEngine",
        reserves_memory=True,
        is_tensor_parallel=True,
        names_kept_tokens="top_k",
        temperatures=VLLM_TEMPERATURES,
    ),
    "server": EngineSpec(
        "dapo_runner.rollout.server:ServerEngine",
        is_remote=True,
        is_asynchronous=True,
        drops_answers=True,
        takes_whole_groups=True,
        temperatures=VLLM_TEMPERATURES,
    ),
}
