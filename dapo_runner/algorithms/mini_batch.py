"""A mini-batch, the packed micro-batches that make one update, and what a loss computes over one of them.

Legend: T positions of a micro-batch, of which ranks that share sequences have T/W each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dapo_kernels import SamplingMask, linear_token_logprobs
from dapo_kernels.logprobs import TokenStats
from dapo_runner.algorithms.correction import Mismatch, correct, measure
from dapo_runner.config import CorrectionConfig
from dapo_runner.errors import RunError
from dapo_runner.parallel.ulysses import gather_positions, own_positions
from dapo_runner.policy.model import Policy
from dapo_runner.types import PackedBatch

LOSS_TENSORS = ("mask", "advantages", "old_logprobs", "ref_logprobs", "importance_weights")


@dataclass(eq=False)
class MiniBatch:
    """This rank's micro-batches of one update. Counts are those of all ranks."""

    micro_batches: list[PackedBatch]
    n_tokens: int
    denominator: int  # of the loss of the whole mini-batch
    index: int = 0  # among the mini-batches of a step
    # Policy against engine before any update of the step; empty where the policy's log-probs were not computed then.
    mismatch: Mismatch = field(default_factory=Mismatch)
    # The update begins with the policy from before the step: its own log-probs are the old ones, but for stale
    # micro-batches, whose old log-probs are the engine's.
    on_policy: bool = False
    policy_logprobs: list[Tensor] = field(default_factory=list)  # [T] before any update, where they were computed

    def set_old_logprobs(
        self, index: int, old: Tensor, experts: Tensor | None, correction: CorrectionConfig, *, from_engine: bool
    ) -> None:
        """Set the log-probs that the ratios of a micro-batch are taken against, float32 [T], and the experts to replay.

        The engine's log-probs stay with ``from_engine``, and for a stale micro-batch unless an importance weight
        already holds that ratio. A token that the engine gave no log-prob gets ``old``.
        """
        batch = self.micro_batches[index]
        engine = batch.old_logprobs
        weights = correct(old, engine, batch.mask, batch.cu_seqlens, correction)
        self.mismatch += measure(old, engine, batch.mask, weights)
        self.policy_logprobs.append(old)
        if from_engine or (batch.stale and correction.weights is None):
            old = torch.where(engine.isnan(), old, engine)
        self.micro_batches[index] = replace(batch, old_logprobs=old, importance_weights=weights, experts=experts)


class NonFiniteUpdateError(RunError):
    """A loss or gradient is not finite. The weights are those before the update of ``mini``."""

    def __init__(self, message: str, mini: MiniBatch) -> None:
        super().__init__(message)
        self.mini = mini


def loss_tensors(batch: PackedBatch, policy: Policy, group: ProcessGroup | None) -> dict[str, Tensor]:
    """Return what a loss takes of positions, on the policy's device: [T/W] of this rank in ``group``; without [T]."""
    tensors = batch.tensors()
    return {name: own_positions(tensors[name], group).to(policy.device) for name in LOSS_TENSORS if name in tensors}


def head_arguments(policy: Policy, batch: PackedBatch, temperature: float) -> dict[str, Any]:
    """Return what the linear functions of `dapo_kernels` need to score this rank's targets."""
    head = policy.head
    return {
        "weight": head.weight,
        "target_ids": own_positions(batch.target_ids, policy.world.sequence_group).to(policy.device),
        "bias": head.bias,
        "lora": head.lora,
        "softcap": head.softcap,
        "temperature": temperature,
        "sampling_mask": local_sampling_mask(batch, policy),
    }


def local_sampling_mask(batch: PackedBatch, policy: Policy) -> SamplingMask | None:
    """Return the tokens that the engine sampled the targets of this rank's positions from."""
    if batch.support_ids is None or batch.support_counts is None:
        return None
    offsets = torch.nn.functional.pad(batch.support_counts.cumsum(0), (1, 0))
    if (group := policy.world.sequence_group) is not None:
        share = batch.n_positions // group.size()
        offsets = offsets[group.rank() * share : (group.rank() + 1) * share + 1]
    ids = batch.support_ids[int(offsets[0]) : int(offsets[-1])]
    return SamplingMask(ids.to(policy.device), (offsets - offsets[0]).to(policy.device))


def token_stats(policy: Policy, batch: PackedBatch, temperature: float, *, entropy: bool = False) -> TokenStats:
    """Return log-probs and entropies of all positions, float32 [T], differentiable. Collective."""
    group = policy.world.sequence_group
    mask = own_positions(batch.mask, group).to(policy.device)
    arguments = head_arguments(policy, batch, temperature)
    stats = linear_token_logprobs(policy.hidden_states(batch), mask=mask, entropy=entropy, **arguments)
    entropies = None if stats.entropy is None else gather_positions(stats.entropy, group)
    return TokenStats(gather_positions(stats.logprobs, group), entropies)
