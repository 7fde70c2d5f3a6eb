"""The settings of rollouts: engines and servers, how they sample, which prompts are asked, which groups are kept."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from dapo_runner.config.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
)
from dapo_runner.types import SamplingParams

# vLLM 0.32 samples at 0.01 whatever smaller temperature it is given and takes none above 2.
VLLM_TEMPERATURES = (0.01, 2.0)


class EngineSpec(NamedTuple):
    """What an engine can do. A new engine is a class in a file of its own, and a row of ``ENGINES``.

    Attributes:
        implementation: Of ``RolloutEngine``, `module:name`. It is imported when a run starts.
        is_remote: Other processes hold its weights, which take no memory of the trainer's.
        reserves_memory: It takes all of vllm.gpu_memory, or kv_cache_gib, at the start.
        has_sliding_windows: It computes the sliding windows of every model.
        names_every_support: With `sampling_mask` it names the tokens left by any truncation, not only by top_k.
        temperatures: The range that it samples at, apart from 0 (greedy).
    """

    implementation: str
    is_remote: bool = False
    reserves_memory: bool = False
    has_sliding_windows: bool = False
    names_every_support: bool = False
    temperatures: tuple[float, float] = VLLM_TEMPERATURES


ENGINES = {
    "hf": EngineSpec(
        "dapo_runner.rollout.hf:HFEngine",
        has_sliding_windows=True,
        names_every_support=True,
        temperatures=(0.0, math.inf),
    ),
    "vllm": EngineSpec("dapo_runner.rollout.vllm:VLLMEngine", reserves_memory=True),
    "server": EngineSpec("dapo_runner.rollout.server:ServerEngine", is_remote=True),
}


class SamplingConfig(Section):
    temperature: NonNegativeFloat = 1.0  # 0: greedy, in evaluations only
    top_p: Share = 1.0  # keep the fewest tokens that hold this probability together
    top_k: PositiveInt | None = None  # keep this many of the likeliest tokens; null: all
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0  # drop tokens below this share of the likeliest one's probability

    @property
    def truncations(self) -> dict[str, float]:
        """What takes tokens out of the distribution."""
        values = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        unlimited = SamplingConfig().model_dump()
        return {name: value for name, value in values.items() if value is not None and value != unlimited[name]}

    def params(self, **fields: Any) -> SamplingParams:
        """Return the parameters of a call. ``fields`` are the other fields of ``SamplingParams``."""
        return SamplingParams(**{name: getattr(self, name) for name in SamplingConfig.model_fields}, **fields)


class EvaluationConfig(SamplingConfig):
    k: PositiveInt = 32  # responses to each problem
    top_p: Share = 0.7
    max_response_tokens: PositiveInt | None = None  # null: rollout.max_response_tokens


class ServerConfig(Section):
    """The server engine: `vllm serve` processes that `dapo serve` has started. docs/server.md."""

    urls: Annotated[list[str], Field(min_length=1)] = ["http://localhost:8000"]  # of the servers
    key_env: str | None = None  # the environment variable that holds their key; null: the file `dapo serve` makes
    transfer: Literal["file", "nccl"] = "file"  # how weights pass; nccl: from GPU to GPU
    folder: Path | None = None  # where weights pass, seen from trainer and servers; null: this machine's shared memory
    tensor: PositiveInt = 1  # GPUs that share the weights of one server
    answer_within: PositiveFloat = 1800.0  # seconds for the responses to one prompt
    sync_within: PositiveFloat = 600.0  # seconds for a server to take new weights, or to be there at all

    @property
    def round_within(self) -> float:
        """Seconds for a round of prompts, answered and scored, of a step that waits for it."""
        return 8 * self.answer_within

    @field_validator("urls")
    @classmethod
    def _check_addresses(cls, urls: list[str]) -> list[str]:
        if wrong := [url for url in urls if _host_and_port(url) is None]:
            got = "one with an @" if "@" in wrong[0] else wrong[0]  # a password is neither shown nor kept
            raise ValueError(f"expected addresses like http://localhost:8000 (a key is set by key_env), got {got}")
        if len(set(map(_host_and_port, urls))) < len(urls):
            raise ValueError(f"expected each server once, got {', '.join(urls)}")
        return urls


def _host_and_port(url: str) -> tuple[str, int] | None:
    """Return None for what is no address of a server, or more than that."""
    with suppress(ValueError):  # of a port or a name that is none
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode()
        port = {"http": 80, "https": 443}.get(parts.scheme, 0) if parts.port is None else parts.port
        bare = url.rstrip("/").lower() == f"{parts.scheme}://{parts.netloc}".lower() and not set(url) & {" ", "@"}
        if parts.scheme in ("http", "https") and host and port and bare:
            return host, port
    return None


class VLLMConfig(Section):
    """vLLM, in this process or as `dapo serve` starts it."""

    enforce_eager: bool | None = None  # neither compilation nor CUDA graphs; null: on a CPU alone
    kv_cache_gib: PositiveFloat = 2.0  # of the KV cache, on a CPU
    gpu_memory: Share = 0.5  # share of the GPU's memory that weights and cache may take
    sleep: bool = True  # weights and cache leave the GPU while the policy trains; not those of a server


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


class RolloutConfig(SamplingConfig):
    requires = {
        "loss.old_logprobs=learner": "correction",
        "engine=server rollout.correction.weights": "max_staleness",
        "engine=hf|vllm": "sampling_mask",
    }

    engine: Literal["hf", "vllm", "server"] = "hf"  # transformers (hf) or vLLM in this process, or servers
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
    stop: list[Annotated[str, Field(min_length=1)]] = []  # a response ends where one of them is complete
    max_prompt_tokens: PositiveInt = 2048  # longer prompts are left out
    max_response_tokens: PositiveInt = 20480  # longer responses are cut
    max_batch_sequences: PositiveInt = 256  # responses that the engine decodes side by side

    @property
    def engine_spec(self) -> EngineSpec:
        return ENGINES[self.engine]


class CurriculumConfig(Section):
    """Which training prompts are asked when: dapo_runner.data.curriculum."""

    requires = {"by=column": "column start steps", "by=pass_rate": "rest"}

    by: Literal["column", "pass_rate"]  # a column of the data, or the pass rate so far
    column: str = "difficulty"  # by column: a number in every row, larger where it is harder
    start: Share = 0.25  # by column: the easiest share of the prompts that a run begins with
    steps: PositiveInt = 100  # by column: rollout steps after which all prompts are in play
    rest: PositiveInt = 2  # by pass_rate: epochs that a prompt rests whose samples were all correct, or all incorrect


class SamplerConfig(Section):
    requires = {"!advantage.segments rollout.engine=server": "oversample", "filter_groups": "filter_on"}

    prompts_per_step: PositiveInt = 512  # accepted groups in a step
    filter_groups: bool = True  # dynamic sampling; False trains on every group
    # What accepts a group: correct and incorrect samples, or rewards that vary (without the length term).
    filter_on: Literal["correctness", "reward"] | None = None  # null: reward with reward.parts, else correctness
    initial_acceptance: Share = 1 / 3  # share of groups expected to be mixed before any were seen (paper: 1536 for 512)
    max_rounds: PositiveInt = 10  # generation rounds per step
    # Prompts asked for each that is needed. What still runs once the needed are answered is dropped.
    oversample: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    # Steps old that a group may be when it trains; older ones are dropped and counted. null: rollout.max_staleness + 1
    max_age: NonNegativeInt | None = None
    # after max_rounds: stop, or train on the groups there are
    on_exhausted: Literal["train_partial", "error"] = "error"
    curriculum: CurriculumConfig | None = None  # null: all prompts, in a new order every epoch
