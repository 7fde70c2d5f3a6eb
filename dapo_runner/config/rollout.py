"""The settings of rollouts: engines and servers, sampling, environments, order of prompts, accepted groups."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator

from dapo_runner.config.section import BelowOne, Check, MayChange, NonNegativeInt, PositiveInt, Section, Share, spell
from dapo_runner.types import SamplingParams

# vLLM 0.32 raises smaller temperatures to 0.01 and rejects those above 2.
VLLM_TEMPERATURES = (0.01, 2.0)
ADDRESS = re.compile(  # scheme, host and port; no user and password, which would be printed
    r"(https?)://([\w-]{1,63}(?:\.[\w-]{1,63})*\.?|\[[0-9a-f:.]+(?:%[\w.-]+)?\])(?::([0-9]*))?(?:/.*)?"
)


def host_and_port(url: str) -> tuple[str, int] | None:
    """Return host and port of an address, an IPv6 host without brackets; None if it is not valid."""
    found = ADDRESS.fullmatch(url.lower())
    with suppress(ValueError):
        port = int(found[3] or {"http": 80, "https": 443}[found[1]]) if found else 0
        if found and 0 < port < 2**16 and (found[2][0] != "[" or IPv6Address(found[2][1:-1])):
            return found[2].strip("[]"), port
    return None


class EngineSpec(NamedTuple):
    """The capabilities of an engine. A new engine is a class in its own file and a row of ``ENGINES``."""

    implementation: str  # its ``RolloutEngine`` as `module:name`, imported when a run starts
    is_remote: bool = False  # other processes hold its weights, which take none of the trainer's memory
    reserves_memory: bool = False  # it reserves vllm.gpu_memory, or kv_cache_gib, at the start
    has_sliding_windows: bool = False  # it supports the sliding windows of every model
    names_every_support: bool = False  # with `sampling_mask` it returns the support also of top_p and min_p alone
    returns_experts: bool = False  # it returns the experts of each token, for `loss.routing_replay: engine`
    temperatures: tuple[float, float] = VLLM_TEMPERATURES  # lowest and highest, apart from 0 (greedy)


ENGINES = {
    "hf": EngineSpec(
        "dapo_runner.engines.hf:HFEngine",
        has_sliding_windows=True,
        names_every_support=True,
        returns_experts=True,
        temperatures=(1e-6, math.inf),
    ),
    "vllm": EngineSpec("dapo_runner.engines.vllm:VLLMEngine", reserves_memory=True, returns_experts=True),
    "server": EngineSpec("dapo_runner.engines.server:ServerEngine", is_remote=True),
}


class SamplingConfig(Section):
    temperature: NonNegativeFloat = 1.0  # 0: greedy, in evaluations only
    top_p: Share = 1.0  # keep the fewest tokens with this total probability
    top_k: PositiveInt | None = None  # keep this many of the likeliest tokens; null: no limit
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0  # drop tokens below this share of the likeliest one's probability

    @property
    def truncations(self) -> dict[str, float]:
        """The truncations that are set, by name."""
        names, unlimited = ("top_p", "top_k", "min_p"), SamplingConfig()
        return {name: value for name in names if (value := getattr(self, name)) != getattr(unlimited, name)}

    def params(self, **fields: Any) -> SamplingParams:
        """Return the sampling parameters of a call. ``fields`` are the other fields of ``SamplingParams``."""
        return SamplingParams(**{name: getattr(self, name) for name in SamplingConfig.model_fields}, **fields)


class EvaluationConfig(SamplingConfig):
    k: PositiveInt = 32  # responses per problem
    seed: NonNegativeInt = 1234  # of the samples, whatever run.seed is; the same in every evaluation
    top_p: Share = 0.7
    max_response_tokens: PositiveInt | None = None  # null: rollout.max_response_tokens


class ServerConfig(Section):
    """The server engine: `vllm serve` processes started by `dapo serve`. docs/server.md."""

    urls: Annotated[list[str], Field(min_length=1)] = ["http://127.0.0.1:8000"]  # addresses of the servers
    key_env: str | None = None  # the environment variable with their API key; null: the file that `dapo serve` writes
    transfer: Literal["file", "nccl"] = "file"  # how weights are sent; nccl: from GPU to GPU
    folder: Path | None = None  # for file: a folder that trainer and servers share; null: shared memory of this machine
    tensor: PositiveInt = 1  # GPUs that share the weights of one server
    response_timeout: PositiveFloat = 1800.0  # seconds for the responses to one prompt, and for the batch before it
    sync_timeout: PositiveFloat = 600.0  # seconds for a server to load new weights, or to become reachable

    @field_validator("urls")
    @classmethod
    def _check_addresses(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if host_and_port(url) is None or url.rstrip("/").count("/") > 2:
                raise ValueError(f"expected addresses like http://127.0.0.1:8000 (key: key_env), got {spell(url)}")
        # vLLM listens on IPv4, but `localhost` may mean ::1, where another user could listen and get the key.
        urls = [re.sub(r"(?i)^http://localhost(?=[:/]|$)", "http://127.0.0.1", url) for url in urls]
        if len(set(map(host_and_port, urls))) < len(urls):
            raise ValueError(f"expected each server once, got {', '.join(urls)}")
        return urls


class VLLMConfig(Section):
    """vLLM, in this process or as started by `dapo serve`."""

    requires = {"rollout.engine=vllm|server": "batch_invariant"}

    enforce_eager: bool | None = None  # no compilation and no CUDA graphs; null: true on a CPU, else false
    kv_cache_gib: PositiveFloat = 2.0  # size of the KV cache on a CPU
    gpu_memory: Share = 0.5  # share of GPU memory for weights and KV cache
    batch_invariant: bool = False  # on a GPU: log-probs do not depend on the batch (VLLM_BATCH_INVARIANT)
    sleep: bool = True  # free GPU memory while the policy trains; no effect on servers


class CorrectionConfig(Section):
    """Correct the mismatch between engine and trainer. Formulas: dapo_runner.algorithms.correction."""

    requires = {"weights": "cap floor", "mask": "bound lower_bound"}

    weights: Literal["token", "sequence"] | None = None  # multiply the loss by π/μ (trainer ÷ engine)
    cap: PositiveFloat = 2.0  # upper limit of the weights
    floor: NonNegativeFloat = 0.0  # lower limit of the weights
    mask: Literal["token", "sequence"] | None = None  # mask by π/μ; sequence: by its geometric mean
    bound: Annotated[float, Field(gt=1)] = 2.0  # largest π/μ that is not masked
    lower_bound: Annotated[float, Field(gt=0, lt=1)] | None = None  # smallest π/μ that is not masked; null: 1 / bound

    @property
    def enabled(self) -> bool:
        return self.weights is not None or self.mask is not None

    def checks(self) -> Iterator[Check]:
        yield "floor", self.floor <= self.cap, f"at most cap={self.cap:g}"


class RolloutConfig(SamplingConfig):
    requires = {
        "loss.old_logprobs=trainer": "correction",
        "engine=server rollout.correction.weights": "max_staleness",
        "engine=hf|vllm": "sampling_mask",
    }

    engine: Literal["hf", "vllm", "server"] = "hf"  # transformers (hf) or vLLM in this process, or servers
    vllm: MayChange[VLLMConfig] = VLLMConfig()
    server: MayChange[ServerConfig] = ServerConfig()
    # asynchronous rollouts: how many steps sampling may be ahead of training; 0: synchronous
    max_staleness: NonNegativeInt = 0
    # asynchronous: continue responses under new weights; false: finish them first, except preempted ones and episodes
    partial: bool = True
    probe: MayChange[bool] = True  # compare the log-probs of engine and trainer after each weight update: docs/vllm.md
    correction: CorrectionConfig = CorrectionConfig()  # weights that correct for the engine's numerics and its age
    max_mismatch_kl: PositiveFloat | None = None  # warn if train/rollout_k3 of a step, KL(engine‖trainer), exceeds it
    group_size: PositiveInt = 16  # responses per prompt; 1 is allowed if no setting compares responses
    temperature: PositiveFloat = 1.0
    # with top_p, top_k, min_p: compute the trainer's log-probs over the kept tokens; otherwise the ratio is biased
    sampling_mask: bool = False
    stop: list[Annotated[str, Field(min_length=1)]] = []  # a response ends once it contains one of them
    max_prompt_tokens: PositiveInt = 2048  # longer prompts are left out
    max_response_tokens: PositiveInt = 20480  # longer responses are truncated
    max_batch_sequences: MayChange[PositiveInt] = 256  # responses that the engine decodes in parallel

    @property
    def engine_spec(self) -> EngineSpec:
        return ENGINES[self.engine]

    @property
    def request_timeout(self) -> float:
        """Seconds for the responses to one prompt of a server, whose requests of earlier rounds go first."""
        return self.server.response_timeout * (1 + self.max_staleness)


class EnvironmentConfig(Section):
    """Sample episodes of several turns in place of single responses."""

    kind: str | None = None  # module:Class; every episode makes an instance
    tools: list[str] = []  # functions that the policy may call, each as module:function
    max_turns: PositiveInt = 8  # turns of the policy in an episode
    max_turn_tokens: PositiveInt | None = None  # limit of a turn; null: what is left of rollout.max_response_tokens
    timeout: PositiveFloat = 60.0  # limit of a reset or of the answer to a turn; slower episodes are left out
    max_failed: BelowOne = 0.0  # share of a rank's episodes in a round that may fail

    def checks(self) -> Iterator[Check]:
        yield "kind", ":" in self.kind if self.kind else bool(self.tools), "module:Class, or env.tools"
        yield "tools", all(":" in name for name in self.tools), "module:name"


class CurriculumConfig(Section):
    """The order of training prompts: dapo_runner.data.curriculum."""

    requires = {"column": "start steps", "!column": "rest"}

    column: str | None = None  # a number per row, larger for harder problems; null: skip by `rest`
    start: Share = 0.25  # column: the run starts with this easiest share of the prompts
    steps: PositiveInt = 100  # column: rollout steps until all prompts are used
    # epochs to skip a prompt after a group that filter_groups (if null: correctness) would not accept
    rest: Annotated[PositiveInt, Field(le=1000)] = 2


class SamplerConfig(Section):
    prompts_per_step: PositiveInt = 512  # accepted groups per step
    # dynamic sampling: accept groups with correct and incorrect samples, or with varying reward (without the length
    # penalty). null: accept every group
    filter_groups: Literal["correctness", "reward"] | None = "correctness"
    initial_acceptance: Share = 1 / 3  # expected share of accepted groups before the first round (paper: 512 of 1536)
    max_rounds: MayChange[PositiveInt] = 10  # generation rounds per step
    # maximum age of a group in steps when it trains; older groups are dropped. null: rollout.max_staleness + 1
    max_age: MayChange[NonNegativeInt | None] = None
    # after max_rounds: train on the groups accepted so far, or stop with an error
    on_exhausted: MayChange[Literal["train_partial", "error"]] = "error"
    curriculum: CurriculumConfig | None = None  # null: all prompts, shuffled every epoch
