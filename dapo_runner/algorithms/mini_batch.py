"""A mini-batch, the packed micro-batches that make one update, and forward passes over them.

Legend: T positions of a micro-batch, of which ranks that share sequences have T/W each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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

LOSS_TENSORS = ("target_ids", "mask", "advantages", "old_logprobs", "ref_logprobs", "importance_weights")


@dataclass(eq=False)
class MiniBatch:
    """The micro-batches of one update, or this rank's share of them.

    ``denominator`` is what the loss of the whole mini-batch is divided by. ``index`` counts the mini-batches of a step,
    ``first_sequence`` the sequences of the step before this one's.

    ``mismatch`` compares policy and engine on the training tokens before any update of the step. It is empty where the
    policy's log-probs were not computed before an update.

    ``on_policy``: the policy that this update begins with is the one before the step, so its own log-probs are the old
    ones. Micro-batches that an earlier step sampled are an exception: their old log-probs are the engine's.

    ``policy_logprobs``: for each micro-batch those of the policy before any update of the step, float32 [T]; empty
    where they were not computed.
    """

    micro_batches: list[PackedBatch]
    n_tokens: int
    denominator: int
    index: int = 0
    first_sequence: int = 0
    mismatch: Mismatch = field(default_factory=Mismatch)
    on_policy: bool = False
    policy_logprobs: list[Tensor] = field(default_factory=list)

    def set_old_logprobs(
        self,
        logprobs: Sequence[Tensor],
        experts: Sequence[Tensor | None],
        correction: CorrectionConfig,
        *,
        from_engine: bool = False,
    ) -> None:
        """Let ratios be taken against ``logprobs``, float32 [T] of each micro-batch, and updates go to ``experts``.

        The engine's log-probs are kept with ``from_engine``, and for a micro-batch of an earlier step unless an
        importance weight already holds that ratio. A token that the engine gave no log-prob has the policy's.
        """
        self.policy_logprobs = list(logprobs)
        for index, (batch, old, chosen) in enumerate(zip(self.micro_batches, logprobs, experts, strict=True)):
            engine = batch.old_logprobs
            weights = correct(old, engine, batch.mask, batch.cu_seqlens, correction)
            self.mismatch += measure(old, engine, batch.mask, weights)
            if from_engine or (batch.stale and correction.weights is None):
                old = torch.where(engine.isnan(), old, engine)
            self.micro_batches[index] = batch.with_old_logprobs(old, weights, chosen)

    def set_ref_logprobs(self, logprobs: Sequence[Tensor]) -> None:
        """Let ``logprobs``, float32 [T] of each micro-batch, be those of the reference policy."""
        pairs = zip(self.micro_batches, logprobs, strict=True)
        self.micro_batches = [batch.with_ref_logprobs(reference) for batch, reference in pairs]


class NonFiniteUpdateError(RunError):
    """A loss or gradient that is not finite. The weights are those before the update, which ``mini`` was to make."""

    def __init__(self, message: str, mini: MiniBatch) -> None:
        super().__init__(message)
        self.mini = mini


def loss_tensors(batch: PackedBatch, policy: Policy, group: ProcessGroup | None) -> dict[str, Tensor]:
    """Return what a loss takes of positions, on the policy's device: [T/W] of this rank in ``group``; without [T]."""
    tensors = batch.tensors()
    return {name: own_positions(tensors[name], group).to(policy.device) for name in LOSS_TENSORS if name in tensors}


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
    tensors, head = loss_tensors(batch, policy, policy.world.sequence_group), policy.head
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
