"""What one update is made from: packed micro-batches, and what a loss takes of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dapo_kernels import Objective, SamplingMask
from dapo_runner.algorithms.correction import Mismatch, correct, measure
from dapo_runner.algorithms.packing import ALL, Share, count_training_tokens, pack
from dapo_runner.config import CorrectionConfig
from dapo_runner.errors import RunError
from dapo_runner.parallel.ulysses import own_positions
from dapo_runner.policy.model import Policy
from dapo_runner.types import PackedBatch
from dapo_runner.types import Sequence as TrainingSequence


class MiniBatch:
    """Packed micro-batches that make one update, or this rank's share of them, and the count that all of them are
    divided by.

    ``mismatch``: learner against engine on the training tokens, before any update of the step. It stays at the
    rounding of the two unless the engine sampled from other weights: groups carried over, or an update that never
    arrived. Empty where nobody asked the learner before an update.
    ``on_policy``: the policy of the update is the one before the step, so its own log-probs are the old ones; but for
    micro-batches that an earlier step sampled, whose old ones are the engine's, from when it sampled them.
    ``own_logprobs``: of each micro-batch the learner's own before any update of the step, float32 [T], whatever its
    ratios are taken against. Empty where nobody asked.
    """

    def __init__(
        self,
        sequences: Sequence[TrainingSequence],
        token_budget: int,
        objective: Objective,
        number: int = 0,
        first: int = 0,
        share: Share = ALL,
        together: int = 1,
    ) -> None:
        """``number`` counts the mini-batches of a step, ``first`` the sequences of those before it. ``together``: so
        many neighbours stay in one micro-batch.
        """
        self.number = number
        self.first = first
        self.micro_batches = pack(sequences, token_budget, share, together)
        self.n_tokens = count_training_tokens(sequences)
        n_live = sum(bool(sequence.mask[1:].any()) for sequence in sequences)
        self.denominator = self.n_tokens if objective.aggregate == "token-mean" else n_live
        self.mismatch = Mismatch()
        self.on_policy = False
        self.own_logprobs: list[Tensor] = []

    def take_old_logprobs(
        self,
        logprobs: Callable[[PackedBatch], Tensor],
        correction: CorrectionConfig,
        chosen_experts: Callable[[], Tensor | None] = lambda: None,
        *,
        of_engine: bool = False,
    ) -> None:
        """Let ``logprobs(micro-batch)``, float32 [T], be what its ratios are taken against, and the experts that were
        chosen on the way those of the update.

        Where an earlier step sampled it, the ratio is that to the policy which did, as long as no importance weight
        holds that already, or if ``of_engine`` is true. Tokens that the engine gave no log-prob have the policy's.
        """
        replaced, self.own_logprobs = [], []
        for batch in self.micro_batches:
            engine = batch.old_logprobs
            old = logprobs(batch).to(engine.device)
            self.own_logprobs.append(old)
            weights = correct(old, engine, batch.mask, batch.cu_seqlens, correction)
            self.mismatch += measure(old, engine, batch.mask, weights)
            if of_engine or (batch.stale and correction.weights is None):
                old = torch.where(engine.isnan(), old, engine)
            replaced.append(batch.with_old_logprobs(old, weights, chosen_experts()))
        self.micro_batches = replaced

    def take_ref_logprobs(self, logprobs: Callable[[PackedBatch], Tensor]) -> None:
        """Let ``logprobs(micro-batch)``, float32 [T], be what its KL penalty refers to."""
        self.micro_batches = [
            batch.with_ref_logprobs(logprobs(batch).to(batch.old_logprobs.device)) for batch in self.micro_batches
        ]


class NonFiniteUpdateError(RunError):
    """A loss or gradient that is not a number. Raised before the weights are touched; ``mini`` is what did it."""

    def __init__(self, message: str, mini: MiniBatch) -> None:
        super().__init__(message)
        self.mini = mini


def positions_of(batch: PackedBatch, policy: Policy, own: bool = True) -> dict[str, Tensor]:
    """What a loss takes of a micro-batch for every position, on the policy's device: of this rank's own, or of all."""
    names = ("target_ids", "mask", "advantages", "old_logprobs", "ref_logprobs", "importance_weights")
    tensors = {name: tensor for name, tensor in batch.tensors().items() if name in names}
    group = policy.world.sequence_group if own else None
    return {name: own_positions(tensor, group).to(policy.device) for name, tensor in tensors.items()}


def sampling_mask_of(batch: PackedBatch, policy: Policy) -> SamplingMask | None:
    """What the engine sampled the targets of this rank's positions from, on the policy's device."""
    if batch.support_ids is None or batch.support_counts is None:
        return None
    offsets = torch.nn.functional.pad(batch.support_counts.cumsum(0), (1, 0))
    if (group := policy.world.sequence_group) is not None:
        share = batch.n_positions // group.size()
        offsets = offsets[group.rank() * share : (group.rank() + 1) * share + 1]
    ids = batch.support_ids[int(offsets[0]) : int(offsets[-1])]
    return SamplingMask(ids.to(policy.device), (offsets - offsets[0]).to(policy.device))
