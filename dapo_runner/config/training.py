"""The settings of training: policy, advantages, loss, optimizer, parallelism."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import combinations_with_replacement
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat

from dapo_runner.config.section import BelowOne, Check, MayChange, NonNegativeInt, Plain, PositiveInt, Section, Share

ModelName = Annotated[str, AfterValidator(os.path.expanduser)]  # a folder in transformers' format or a hub name


class WarmupConfig(Section):
    """A short supervised warm-up of the tiny model."""

    steps: NonNegativeInt = 300  # supervised steps; 0: none
    batch_size: PositiveInt = 64  # worked examples per step
    examples: PositiveInt = 2000  # worked examples in total
    lr: PositiveFloat = 1e-3  # learning rate of the warm-up
    repeat: BelowOne = 0.0  # probability to repeat a line of an example, drawn again after each repetition
    turns: str | None = None  # with env: module:function(question, answer, rng), returns an example's turns
    stop_at: Share | None = None  # end early once this share of unseen training problems is solved


class TinyModelConfig(Section):
    """A small transformer and its tokenizer, created without a download."""

    layers: PositiveInt = 2  # transformer layers
    hidden_size: PositiveInt = 128  # width of the layers
    heads: PositiveInt = 4  # attention heads
    intermediate_size: PositiveInt = 512  # width of the MLPs
    warmup: WarmupConfig = WarmupConfig()

    def checks(self) -> Iterator[Check]:
        yield "heads", self.hidden_size % self.heads == 0, f"a divisor of hidden_size={self.hidden_size}"


class LoraConfig(Section):
    """Train low-rank adapters (arXiv 2106.09685) through peft. The model without them is the reference.

    There is no dropout, because two passes over one policy must agree. vLLM in the trainer's process gets the adapters
    alone. Other rollout engines get the merged weights, rounded to `model.dtype` (docs/vllm.md).
    """

    rank: PositiveInt = 32  # rank of the adapters
    alpha: PositiveInt = 64  # adapters are scaled by alpha / rank
    targets: str | list[str] = "all-linear"  # module names, a pattern of full names, or all-linear (all but the head)


class ModelConfig(Section):
    path: ModelName | None = None  # a folder in transformers' format or a hub name
    tiny: TinyModelConfig | None = None  # a small model, created when the run starts
    # dtype of weights and activations; the optimizer always uses float32. float16 trains with a loss scale
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    float32_logits: bool = False  # the output head computes float32 logits, in trainer and rollout engine
    # auto: flash or varlen if available, else sdpa
    attention: MayChange[Literal["auto", "sdpa", "flash", "varlen"]] = "auto"
    # recompute activations in the backward pass to save memory. offload: also keep the inputs of the layers on the host
    gradient_checkpointing: MayChange[bool | Literal["offload"]] = False
    compile: MayChange[bool] = False  # compile the layers (10 s)
    lora: LoraConfig | None = None  # train low-rank adapters only
    trust_remote_code: bool = False  # run Python code from the model's repository

    def checks(self) -> Iterator[Check]:
        yield "path", (self.path is None) != (self.tiny is None), "exactly one of path and tiny (the other null)"


class SegmentsConfig(Section):
    """Segment Policy Optimization (arXiv 2505.23564): advantages per segment of a response. docs/spo.md.

    A tree has a level for each of three factors of `rollout.group_size`, as equal as possible; two if it has no three.
    """

    requires = {"kind=chain": "interval samples", "kind=tree": "tokens per_step"}

    kind: Literal["chain", "tree"]  # chain: values from continuations; tree: values from the responses below a node
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.9  # tokens less likely than this are cut points
    mask: bool = True  # true: only cut points train; false: all tokens
    interval: PositiveInt = 5  # chain: cut points per segment
    samples: PositiveInt = 9  # chain: continuations per value; their mean reward is the value
    # tree: maximum tokens of a segment, except on the last level. null: rollout.max_response_tokens / levels
    tokens: PositiveInt | None = None
    per_step: PositiveInt | None = None  # tree: responses of a group that train per step; null: all in one step


class TreeShape(NamedTuple):
    """``branching``: children of a node by level, from the root. ``tokens``: of a segment, except on the last level."""

    branching: tuple[int, ...]
    tokens: int


def factors(number: int) -> tuple[int, ...]:
    """Return three factors that differ least, largest first; else two; empty if ``number`` is a prime."""
    divisors = [divisor for divisor in range(number - 1, 1, -1) if number % divisor == 0]
    products = [chosen for n in (3, 2) for chosen in combinations_with_replacement(divisors, n)]
    found = [chosen for chosen in products if math.prod(chosen) == number]
    return min(found, key=lambda chosen: (-len(chosen), chosen[0] - chosen[-1]), default=())


BY_RESPONSE = ("group_std", "group_mean", "batch_std", "batch_mean", "batch_whitened", "leave_one_out")
BY_TOKEN = ("gae", "returns", "group_returns")  # advantages per token
COMPARING = ("group_std", "group_mean", "batch_std", "leave_one_out", "group_returns")  # within a group


class AdvantageConfig(Section):
    requires = {
        "kind=gae|returns|group_returns": "gamma",
        "kind=gae": "lam",
        "kind=group_std !rollout.stop !rollout.max_staleness !reward.calls.max_failed": "segments",
    }

    # group_std, group_mean, batch_std, batch_mean, batch_whitened, leave_one_out; per token gae, returns,
    # group_returns; or module:function. Formulas and papers: dapo_runner/algorithms/advantage.py
    kind: str = "group_std"
    gamma: Share = 1.0  # discount per token; formulas: dapo_runner.algorithms.returns
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95  # λ of gae
    segments: SegmentsConfig | None = None  # advantages per segment, instead of kind

    @property
    def by_token(self) -> bool:
        return self.kind in BY_TOKEN

    def checks(self) -> Iterator[Check]:
        known = BY_RESPONSE + BY_TOKEN
        yield "kind", self.kind in known or ":" in self.kind, f"one of {', '.join(known)}, or module:function"


class CriticConfig(Section):
    """A model that predicts the reward still to come: advantage.kind=gae."""

    path: ModelName | None = None  # the model to add a value head to; null: the one that the policy starts from
    lr: MayChange[PositiveFloat] = 9e-6  # peak learning rate; it follows optimizer.schedule
    # only the critic trains in these first steps; optimizer.warmup_steps counts them too; a fork goes on counting
    warmup_steps: NonNegativeInt = 0
    clip: PositiveFloat | None = 0.2  # clip range of the value change in a step; null: no clipping


class LossConfig(Section):
    requires = {
        "!model.lora": "reference_ema",
        "!model.tiny !model.compile loss.old_logprobs=trainer": "routing_replay",
    }

    objective: str = "dapo"  # a name in docs/objectives.md, or `module:function`
    overrides: dict[str, Plain] = {}  # other values for fields of the objective: docs/objectives.md
    reference: ModelName | None = None  # the model of the reference policy; null: the start model
    # update the reference after each step to reference_ema × reference + (1 − reference_ema) × policy
    reference_ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    old_logprobs: Literal["trainer", "engine"] = "trainer"  # source of old log-probs: trainer, or rollout engine
    # mixtures of experts: replay the routing of the pass for old log-probs (trainer) or of sampling (engine)
    routing_replay: Literal["trainer", "engine"] | None = None


class PreferenceConfig(Section):
    """Iterated DPO: train on the best and the worst response to a prompt instead of advantages and objective."""

    requires = {"!loss.reference !loss.reference_ema": "reference"}

    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"  # formulas: docs/objectives.md
    beta: PositiveFloat = 0.1  # strength of the implicit KL penalty
    reference: Literal["start", "step"] = "start"  # start: loss.reference; step: the policy before the step


class DistillationConfig(Section):
    """On-policy distillation: minimize the divergence from a teacher on the policy's responses, instead of advantages
    and objective. docs/distillation.md.
    """

    teacher: ModelName  # a folder in transformers' format or a hub name, with the policy's tokenizer
    # 1: reverse KL(policy‖teacher); 0: forward KL; between: generalized Jensen-Shannon (docs/objectives.md)
    beta: Annotated[float, Field(ge=0, le=1)] = 1.0


class OptimizerConfig(Section):
    requires = {"schedule=linear|cosine": "min_lr_ratio", "model.dtype=float32|bfloat16": "offload"}

    lr: MayChange[PositiveFloat] = 1e-6  # peak learning rate
    warmup_steps: NonNegativeInt = 20  # rollout steps of linear warm-up
    schedule: MayChange[Literal["constant", "linear", "cosine"]] = "constant"  # learning rate after the warm-up
    # linear and cosine would reach this share of lr one step after the last
    min_lr_ratio: MayChange[Annotated[float, Field(ge=0, le=1)]] = 0.0
    weight_decay: NonNegativeFloat = 0.1  # weight decay of AdamW
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)  # β1 and β2 of AdamW
    eps: PositiveFloat = 1e-8  # ε of AdamW
    offload: MayChange[bool] = False  # run AdamW on the host, which keeps the float32 weights, gradients and moments
    grad_clip: MayChange[PositiveFloat | None] = 1.0  # maximum gradient norm; null: no clipping
    mini_batch_size: PositiveInt | None = 512  # most training responses of an update; null: one update per rollout step
    token_budget: MayChange[PositiveInt] = 22528  # maximum number of packed tokens in a micro-batch


class ParallelConfig(Section):
    """How the processes started by torchrun, one per GPU, share a run."""

    requires = {"rollout.engine=vllm": "rollout_tensor"}

    gpus: PositiveInt = 1  # required number of processes; 1: as many as the launcher starts
    replicate: PositiveInt = 1  # copies of the weights, each sharded over gpus / replicate (HSDP)
    reshard_after_forward: bool = True  # false: keep gathered layers in memory from forward to backward pass
    sequence: PositiveInt = 1  # sequence parallelism: GPUs that share the positions of one micro-batch
    rollout_tensor: PositiveInt = 1  # tensor parallelism of the rollout engine: GPUs per copy of its weights
    timeout: PositiveFloat = 1800.0  # seconds that a rank waits for another rank
