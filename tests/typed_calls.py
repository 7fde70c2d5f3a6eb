"""Calls as users write them, for the type checker alone: a `type: ignore` of a mistake that passes has no use."""

from pathlib import Path

from torch import Tensor

from dapo_kernels import (
    LoraFactors,
    OwnTokens,
    SamplingMask,
    dapo_loss,
    linear_dapo_loss,
    linear_distillation_loss,
    linear_preference_loss,
    linear_token_logprobs,
    policy_loss,
)
from dapo_runner import Config, train
from dapo_runner.checkpoint import latest_checkpoint
from dapo_runner.config import DataConfig, ModelConfig, OptimizerConfig


def right(x: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    loss = dapo_loss(x, ids, old, advantages, clip_high=0.3, mask=ids > 0, inplace_backward=True).loss
    loss += linear_dapo_loss(x, weight, ids, None, advantages, objective="grpo", ref_logprobs=old, softcap=30.0).loss
    loss += linear_preference_loss(x, weight, ids, old, beta=0.1, loss_type="ipo", softcap=30.0).loss
    loss += linear_dapo_loss(x, weight, ids, old, advantages, group=None, sequence_parallel=False, valid_vocab=9).loss
    loss += linear_dapo_loss(x, weight, ids, old, advantages, lora=LoraFactors(weight, x, 2.0)).loss
    loss += linear_distillation_loss(x, weight, x, weight, beta=1, softcap=30.0, ref_softcap=30.0).loss
    loss += dapo_loss(x, ids, old, advantages, sampling_mask=SamplingMask.from_lists([[1], []])).loss
    loss += policy_loss(old, old, advantages, objective=own, aggregate="seq-mean-token-mean").metrics["tokens"]
    return loss + policy_loss(old, old, advantages, entropy=old, entropy_coef=1e-3).loss


def own(logprobs: Tensor, entropy: Tensor | None, tokens: OwnTokens) -> Tensor:
    return -logprobs * tokens.advantages


def wrong(x: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor) -> None:
    dapo_loss(x, ids, old, advantages, clip_hihg=0.3)  # type: ignore[call-arg]
    dapo_loss(x, ids, old, advantages, clip_high="0.3")  # type: ignore[arg-type]
    dapo_loss(x, ids, old, advantages, softcap=30.0)  # type: ignore[call-arg]
    linear_dapo_loss(x, weight, ids, old, advantages, chunk_bytes=2.0**20)  # type: ignore[arg-type]
    linear_dapo_loss(x, weight, ids, old, advantages, lora=(weight, x, 2.0))  # type: ignore[arg-type]
    linear_distillation_loss(x, weight, x, weight, group=None)  # type: ignore[call-arg]
    linear_token_logprobs(x, weight, ids, temprature=0.7)  # type: ignore[call-arg]
    linear_preference_loss(x, weight, ids, old, bata=0.1)  # type: ignore[call-arg]
    linear_preference_loss(x, weight, ids, old, loss_type="simpo")  # type: ignore[arg-type]
    policy_loss(old, old, advantages, temperature=0.7)  # type: ignore[call-arg]
    policy_loss(old, old, advantages, aggregate="token_mean")  # type: ignore[arg-type]
    policy_loss(old, old, advantages, surrogate="clp")  # type: ignore[arg-type]
    policy_loss(old, old, advantages, ratio="seq", kl_to="old")  # type: ignore[arg-type]
    policy_loss(old, old, advantages, kl_estimator="k4")  # type: ignore[arg-type]
    policy_loss(old, old, advantages, kl_to="reff")  # type: ignore[arg-type]
    policy_loss(old, old, advantages).metrics.nothing()  # type: ignore[attr-defined]


def runs() -> Path:
    data = DataConfig(path=Path("questions.jsonl"))
    OptimizerConfig(schedule="sine")  # type: ignore[arg-type]
    Config(model=ModelConfig(path="x"), dato=data)  # type: ignore[call-arg]
    run = train(Config(model=ModelConfig(path="x"), data=data, optimizer=OptimizerConfig(schedule="cosine")))
    latest = latest_checkpoint(run / "checkpoints")
    return run if latest is None else latest.model
