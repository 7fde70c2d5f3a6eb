"""Forward passes over a packed micro-batch: token log-probs and entropies under a policy.

Legend: T positions of a micro-batch, of which ranks that share sequences have T/W each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dapo_kernels import SamplingMask, linear_token_logprobs
from dapo_kernels.logprobs import TokenStats
from dapo_runner.parallel.ulysses import gather_positions, own_positions
from dapo_runner.policy.model import Policy
from dapo_runner.types import PackedBatch

LOSS_TENSORS = ("target_ids", "mask", "advantages", "old_logprobs", "ref_logprobs", "importance_weights")


def local_tensors(batch: PackedBatch, policy: Policy) -> dict[str, Tensor]:
    """Return what a loss takes of this rank's positions, [T/W] each, on the policy's device."""
    group = policy.world.sequence_group
    tensors = batch.tensors()
    return {name: own_positions(tensors[name], group).to(policy.device) for name in LOSS_TENSORS if name in tensors}


def global_tensors(batch: PackedBatch, policy: Policy) -> dict[str, Tensor]:
    """Return what a loss takes of all positions, [T] each, on the policy's device."""
    tensors = batch.tensors()
    return {name: tensors[name].to(policy.device) for name in LOSS_TENSORS if name in tensors}


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


def local_token_stats(policy: Policy, batch: PackedBatch, temperature: float, *, entropy: bool = False) -> TokenStats:
    """Return log-probs and entropies of this rank's positions, float32 [T/W], differentiable."""
    tensors, head = local_tensors(batch, policy), policy.head
    return linear_token_logprobs(
        policy.hidden_states(batch),
        head.weight,
        tensors["target_ids"],
        bias=head.bias,
        lora=head.lora,
        softcap=head.softcap,
        temperature=temperature,
        sampling_mask=local_sampling_mask(batch, policy),
        mask=tensors["mask"],
        entropy=entropy,
    )


def global_token_stats(policy: Policy, batch: PackedBatch, temperature: float, *, entropy: bool = False) -> TokenStats:
    """Return log-probs and entropies of all positions, float32 [T], differentiable. Collective."""
    stats, group = local_token_stats(policy, batch, temperature, entropy=entropy), policy.world.sequence_group
    entropies = None if stats.entropy is None else gather_positions(stats.entropy, group)
    return TokenStats(gather_positions(stats.logprobs, group), entropies)
