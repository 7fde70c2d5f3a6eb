"""A mini-batch: the packed micro-batches of one update, and what a loss computes over one of them.

Legend: T positions of a micro-batch. A sequence-parallel group of W ranks has T/W each.
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
from dapo_runner.parallel.ulysses import gather_positions, shard_positions
from dapo_runner.parallel.world import World
from dapo_runner.policy.model import Policy
from dapo_runner.types import PackedBatch

LOSS_TENSORS = ("mask", "advantages", "old_logprobs", "ref_logprobs", "importance_weights")


@dataclass(eq=False)
class MiniBatch:
    """This rank's micro-batches of one update. Counts are over all ranks."""

    micro_batches: list[PackedBatch]
    n_tokens: int
    denominator: int  # divisor of the loss of the whole mini-batch
    index: int = 0  # among the mini-batches of a step
    group_tokens: Tensor | None = None  # over all ranks, by group id; for a mean over prompts
    # Policy against engine before the first update of the step; empty if those log-probs were not computed.
    mismatch: Mismatch = field(default_factory=Mismatch)
    # The policy has not been updated in this step: its current log-probs are the old ones. Stale micro-batches use the
    # engine's old log-probs.
    on_policy: bool = False
    policy_logprobs: list[Tensor] = field(default_factory=list)  # [T] before the first update, if computed
    # Multiplies the loss, through its denominator: the fused loss computes gradients in its forward pass, where
    # unscaled float16 gradients would underflow.
    loss_scale: float = 1.0

    def denominator_on(self, world: World) -> float:
        """Return the divisor of each rank's loss. FSDP2 averages gradients over ranks; this makes the mean a sum."""
        return self.denominator / world.size / self.loss_scale

    def set_old_logprobs(
        self, index: int, old: Tensor, experts: Tensor | None, correction: CorrectionConfig, *, from_engine: bool
    ) -> None:
        """Set the old log-probs of a micro-batch, float32 [T], and the experts to replay.

        The engine's log-probs stay with ``from_engine``, and in a stale micro-batch without importance weights, which
        would already contain that ratio. A token without a finite log-prob of the engine gets ``old``.
        """
        batch = self.micro_batches[index]
        engine = batch.old_logprobs
        weights = correct(old, engine, batch.mask, batch.cu_seqlens, correction)
        limits = (correction.floor, correction.cap) if correction.weights else None
        self.mismatch += measure(old, engine, batch.mask, weights, limits)
        self.policy_logprobs.append(old)
        if from_engine or (batch.stale and correction.weights is None):
            old = torch.where(engine.isfinite(), engine, old)
        self.micro_batches[index] = replace(batch, old_logprobs=old, importance_weights=weights, experts=experts)


class NonFiniteUpdateError(RunError):
    """A loss or gradient is not finite. The weights are those before the update."""


def loss_tensors(batch: PackedBatch, policy: Policy, group: ProcessGroup | None) -> dict[str, Tensor]:
    """Return the inputs of a loss on the policy's device: [T/W] of this rank's positions in ``group``, else [T]."""
    tensors = batch.tensors()
    return {name: shard_positions(tensors[name], group).to(policy.device) for name in LOSS_TENSORS if name in tensors}


def head_arguments(policy: Policy, batch: PackedBatch, temperature: float) -> dict[str, Any]:
    """Return the arguments with which the linear functions of `dapo_kernels` score this rank's targets."""
    return {
        **policy.head._asdict(),
        "target_ids": shard_positions(batch.target_ids, policy.world.sequence_group).to(policy.device),
        "float32_logits": policy.float32_logits,
        "temperature": temperature,
        "sampling_mask": local_sampling_mask(batch, policy),
    }


def local_sampling_mask(batch: PackedBatch, policy: Policy) -> SamplingMask | None:
    """Return the supports that the engine sampled this rank's targets from; None if they were not recorded."""
    if batch.support_ids is None or batch.support_counts is None:
        return None
    offsets = torch.nn.functional.pad(batch.support_counts.cumsum(0), (1, 0))
    if (group := policy.world.sequence_group) is not None:
        share = batch.n_positions // group.size()
        offsets = offsets[group.rank() * share : (group.rank() + 1) * share + 1]
    ids = batch.support_ids[int(offsets[0]) : int(offsets[-1])]
    return SamplingMask(ids.to(policy.device), (offsets - offsets[0]).to(policy.device))


def token_stats(policy: Policy, batch: PackedBatch, temperature: float, *, entropy: bool = False) -> TokenStats:
    """Return differentiable log-probs and entropies of all positions, float32 [T]. Collective."""
    group = policy.world.sequence_group
    mask = shard_positions(batch.mask, group).to(policy.device)
    arguments = head_arguments(policy, batch, temperature)
    stats = linear_token_logprobs(policy.hidden_states(batch), mask=mask, entropy=entropy, **arguments)
    entropies = None if stats.entropy is None else gather_positions(stats.entropy, group)
    return TokenStats(gather_positions(stats.logprobs, group), entropies)
