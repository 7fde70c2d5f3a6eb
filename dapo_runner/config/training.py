"""The settings of training: the policy, advantages, the loss, the optimizer, several processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations_with_replacement
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from dapo_runner.config.section import (
    BelowOne,
    Check,
    Int,
    NonNegativeFloat,
    NonNegativeInt,
    Plain,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
)


class WarmupConfig(Section):
    """A short supervised warm-up of the tiny model."""

    steps: NonNegativeInt = 300  # supervised steps; 0: none
    batch_size: PositiveInt = 64  # worked examples in a step
    examples: PositiveInt = 2000  # worked examples in all
    lr: PositiveFloat = 1e-3  # of the warm-up
    repeat: BelowOne = 0.0  # probability that a line of an example comes again, each time
    stop_at: Share | None = None  # end early, once this share of training problems it has not seen is solved


class TinyModelConfig(Section):
    """A small transformer and tokenizer, made without a download."""

    layers: PositiveInt = 2  # of the transformer
    hidden_size: PositiveInt = 128  # of the layers
    heads: PositiveInt = 4  # of attention
    intermediate_size: PositiveInt = 512  # of the MLPs
    warmup: WarmupConfig = WarmupConfig()

    def checks(self) -> Iterator[Check]:
        yield "heads", self.hidden_size % self.heads == 0, f"a divisor of hidden_size={self.hidden_size}"


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
    # auto: flash or varlen where they are there, else sdpa
    attention: Literal["auto", "sdpa", "flash", "varlen"] = "auto"
    gradient_checkpointing: bool = False  # compute activations again in the backward pass: less memory
    compile: bool = False  # torch.compile for what lies between the matrix products of a layer; costs some 10 s once
    lora: LoraConfig | None = None  # train low-rank adapters only
    trust_remote_code: bool = False  # run the code that comes with a model

    def checks(self) -> Iterator[Check]:
        yield "path", (self.path is None) != (self.tiny is None), "exactly one of path and tiny (the other null)"


class SegmentsConfig(Section):
    """Segment Policy Optimization (arXiv 2505.23564): advantages of the parts of a response. docs/spo.md."""

    requires = {"kind=chain": "interval samples", "kind=tree": "branching tokens per_step"}

    kind: Literal["chain", "tree"]  # chain: values from continuations; tree: from the responses below a node
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.9  # ρ: a token less likely than that is a cut point
    mask: bool = True  # only cut points train
    interval: PositiveInt = 5  # chain: cut points in a segment
    samples: PositiveInt = 9  # chain: continuations that the value of a segment's beginning is the mean of
    # tree: children of a node, by level; null: rollout.group_size in three factors that differ least, or in two.
    branching: Annotated[list[Annotated[Int, Field(ge=2)]], Field(min_length=2)] | None = None
    # tree: of a segment, but on the last level, where it ends the response; null: as many as every level can have.
    tokens: PositiveInt | None = None
    per_step: PositiveInt | None = None  # tree: its responses that a step trains on, the rest later; null: all at once


class TreeShape(NamedTuple):
    """Children of a node by level, from the root down, and tokens of a segment but on the last level."""

    branching: tuple[int, ...]
    tokens: int

    @property
    def leaves(self) -> int:
        """Responses of a whole tree."""
        return math.prod(self.branching)

    @property
    def before_last(self) -> int:
        """Tokens of a response in front of the last level."""
        return self.tokens * (len(self.branching) - 1)


def factors(number: int) -> tuple[int, ...]:
    """Return three factors that differ least, or where there are none two, the largest first; empty of a prime."""
    divisors = [divisor for divisor in range(number - 1, 1, -1) if number % divisor == 0]
    products = [chosen for n in (3, 2) for chosen in combinations_with_replacement(divisors, n)]
    found = [chosen for chosen in products if math.prod(chosen) == number]
    return min(found, key=lambda chosen: (-len(chosen), chosen[0] - chosen[-1]), default=())


BY_RESPONSE = ("group_std", "group_mean", "batch_std", "batch_mean", "batch_whitened", "leave_one_out")
BY_TOKEN = ("gae", "returns", "group_returns")  # advantages of single tokens, made once a step is sampled
COMPARING = ("group_std", "group_mean", "batch_std", "leave_one_out", "group_returns")  # samples of one prompt


class AdvantageConfig(Section):
    requires = {
        "kind=gae|returns|group_returns": "gamma",
        "kind=gae": "lam",
        "kind=group_std !rollout.stop !rollout.max_staleness !reward.calls.max_failed": "segments",
    }

    # group_std, group_mean, batch_std, batch_mean, batch_whitened, leave_one_out; per token gae, returns,
    # group_returns; or module:function. Formulas and papers: dapo_runner.algorithms.advantage.
    kind: str = "group_std"
    gamma: Share = 1.0  # Formulas: dapo_runner.algorithms.returns
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95  # gae
    segments: SegmentsConfig | None = None  # in the place of kind

    @property
    def by_token(self) -> bool:
        return self.kind in BY_TOKEN

    def checks(self) -> Iterator[Check]:
        known = BY_RESPONSE + BY_TOKEN
        yield "kind", self.kind in known or ":" in self.kind, f"one of {', '.join(known)}, or module:function"


class CriticConfig(Section):
    """Predicts what the rest of a response will earn: advantage.kind=gae."""

    requires = {"!share_trunk": "path lr warmup_steps", "share_trunk": "coef", "parallel.sequence=1": "share_trunk"}

    path: str | None = None  # the model that gets a value head; null: the one that the policy starts from
    share_trunk: bool = False  # the head sits on the policy, whose update takes coef × value loss along
    coef: PositiveFloat = 0.1  # share_trunk
    lr: PositiveFloat = 9e-6  # a model of its own: at the peak of the optimizer's schedule, which it follows
    warmup_steps: NonNegativeInt = 0  # a model of its own: rollout steps of a run in which it alone trains
    clip: PositiveFloat | None = 0.2  # how far a value may move in a step before its gradient stops; null: any


class LossConfig(Section):
    requires = {
        "!model.lora": "reference_ema",
        "!model.tiny !model.compile loss.old_logprobs=learner": "routing_replay",
    }

    objective: str = "dapo"  # a name in dapo_kernels.OBJECTIVES
    overrides: dict[str, Plain] = {}  # fields of dapo_kernels.Objective, passed through
    reference: str | None = None  # kl_coef ≠ 0: the model the penalty refers to; null: the one training starts from
    # The reference follows the policy: after each step it is this share of itself and the rest of the policy.
    reference_ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    old_logprobs: Literal["learner", "rollout"] = "learner"  # whose log-probs are the ratio's denominator
    routing_replay: bool = False  # mixtures of experts: updates go to the experts that the old log-probs came from


class PreferenceConfig(Section):
    """Iterated DPO: pairs made from each group by reward take the place of advantages and objective."""

    requires = {"loss_type=sigmoid": "label_smoothing", "!loss.reference !loss.reference_ema": "reference"}

    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"  # formulas: docs/objectives.md
    beta: PositiveFloat = 0.1  # strength of the implicit KL penalty
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0  # sigmoid: share of pairs the wrong way round
    pairs_per_group: PositiveInt = 1  # best against worst, second best against second worst, …
    reference: Literal["start", "step"] = "start"  # loss.reference or the start; or the policy as the step began


class OptimizerConfig(Section):
    requires = {"schedule=linear|cosine": "min_lr_ratio"}

    lr: PositiveFloat = 1e-6  # peak learning rate
    warmup_steps: NonNegativeInt = 20  # linear, in rollout steps
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up: dapo_runner.algorithms.weights
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of lr at which linear and cosine end, at run.steps
    weight_decay: NonNegativeFloat = 0.1  # of AdamW
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)  # of AdamW
    eps: PositiveFloat = 1e-8  # of AdamW
    grad_clip: PositiveFloat | None = 1.0  # null: no clipping
    mini_batch_size: PositiveInt | None = 512  # responses per update; null: one update per rollout step
    token_budget: PositiveInt = 22528  # packed positions per micro-batch


class ParallelConfig(Section):
    """How the processes that torchrun starts, one for each GPU, share a run."""

    requires = {"rollout.engine=vllm": "rollout_tensor"}

    gpus: PositiveInt = 1  # processes; 1: as many as the launcher starts. --dry-run and --simulate plan with it
    replicate: PositiveInt = 1  # copies of the weights, each sharded over gpus / replicate (HSDP)
    reshard_after_forward: bool = True  # False: layers stay whole from forward to backward
    sequence: PositiveInt = 1  # GPUs that share the positions of one micro-batch
    rollout_tensor: PositiveInt = 1  # GPUs that share one copy of the rollout engine's weights
    timeout: PositiveFloat = 1800.0  # seconds that a rank waits for another, such as for its rollouts

    def checks(self) -> Iterator[Check]:
        for name in ("sequence", "rollout_tensor", "replicate"):
            yield name, self.gpus == 1 or self.gpus % getattr(self, name) == 0, f"a divisor of gpus={self.gpus}"
