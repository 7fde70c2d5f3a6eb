"""The losses that a learner can be given: of single responses, and of preference pairs.

A loss is a value. It says how sequences are ordered and kept together, what a mini-batch is divided by, and what the
loss of one micro-batch is. Everything else of an update is the same for all losses (`learner.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dapo_kernels import Objective, linear_dapo_loss, policy_loss, preference_loss_from_logprobs
from dapo_kernels.losses import LossOutput
from dapo_kernels.preference import PreferenceOutput
from dapo_runner.algorithms.critic import Critic
from dapo_runner.algorithms.forward import (
    global_tensors,
    global_token_stats,
    local_sampling_mask,
    local_tensors,
)
from dapo_runner.algorithms.mini_batch import MiniBatch
from dapo_runner.algorithms.packing import count_training_tokens
from dapo_runner.algorithms.pairs import order_by_pair
from dapo_runner.config import PreferenceConfig
from dapo_runner.parallel.ulysses import gather_positions, own_positions
from dapo_runner.policy.model import Policy
from dapo_runner.types import PackedBatch
from dapo_runner.types import Sequence as TrainingSequence

Output = LossOutput | PreferenceOutput


class Loss(Protocol):
    """What a learner minimizes."""

    @property
    def objective(self) -> Objective | None:
        """The policy objective, whose ratios are taken against old log-probs; None for a loss without ratios."""

    @property
    def sequences_per_unit(self) -> int:
        """How many neighbouring sequences stay in one micro-batch."""

    @property
    def is_local(self) -> bool:
        """Whether ranks that share positions compute the loss of their own ones only."""

    def arrange(self, sequences: Sequence[TrainingSequence]) -> Sequence[TrainingSequence]:
        """Return the sequences that train, in the order in which they are split into mini-batches."""

    def denominator(self, sequences: Sequence[TrainingSequence]) -> int:
        """Return what the loss of a whole mini-batch is divided by."""

    def __call__(self, policy: Policy, mini: MiniBatch, batch: PackedBatch, selection: Tensor | None) -> Output:
        """Return the loss of one micro-batch of ``mini``. ``selection``, bool [T]: the tokens that train.

        FSDP2 takes the mean over ranks, so the denominator is divided by their number: the mean becomes a sum.
        """


@dataclass(frozen=True)
class PolicyLoss:
    """A row of `dapo_kernels.OBJECTIVES` over single responses. ``critic``: shares the trunk, and adds its loss."""

    objective: Objective
    temperature: float = 1.0
    critic: Critic | None = None
    sequences_per_unit: int = 1

    @property
    def is_local(self) -> bool:
        return self.objective.per_sequence is None

    def arrange(self, sequences: Sequence[TrainingSequence]) -> Sequence[TrainingSequence]:
        return sequences

    def denominator(self, sequences: Sequence[TrainingSequence]) -> int:
        if self.objective.aggregate == "token-mean":
            return count_training_tokens(sequences)
        return sum(bool(sequence.mask[1:].any()) for sequence in sequences)

    def __call__(self, policy: Policy, mini: MiniBatch, batch: PackedBatch, selection: Tensor | None) -> LossOutput:
        if policy.world.sequence_group is None or self.is_local:
            return self._fused(policy, mini, batch, selection)
        return self._from_logprobs(policy, mini, batch, selection)

    def _fused(self, policy: Policy, mini: MiniBatch, batch: PackedBatch, selection: Tensor | None) -> LossOutput:
        """Compute the loss from hidden states, of this rank's positions where ranks share them."""
        group, head, hidden = policy.world.sequence_group, policy.head, policy.hidden_states(batch)
        tensors = local_tensors(batch, policy)
        out = linear_dapo_loss(
            hidden,
            head.weight,
            tensors["target_ids"],
            _old_logprobs(mini, batch, tensors),
            tensors["advantages"],
            bias=head.bias,
            lora=head.lora,
            softcap=head.softcap,
            cu_seqlens=batch.cu_seqlens.to(policy.device) if group is None else None,
            selection=None if selection is None else own_positions(selection, group),
            temperature=self.temperature,
            sampling_mask=local_sampling_mask(batch, policy),
            entropy=True,
            **self._options(policy, mini, tensors),
        )
        assert out.entropy is not None
        loss = out.loss if self.critic is None else out.loss + self.critic.shared_loss(hidden, batch, mini)
        return out._replace(
            loss=loss, logprobs=gather_positions(out.logprobs, group), entropy=gather_positions(out.entropy, group)
        )

    def _from_logprobs(
        self, policy: Policy, mini: MiniBatch, batch: PackedBatch, selection: Tensor | None
    ) -> LossOutput:
        """Compute a loss that needs all positions of a sequence: ranks exchange log-probs, not hidden states."""
        stats = global_token_stats(policy, batch, self.temperature, entropy=True)
        tensors = global_tensors(batch, policy)
        return policy_loss(
            stats.logprobs,
            _old_logprobs(mini, batch, tensors),
            tensors["advantages"],
            entropy=stats.entropy,
            cu_seqlens=batch.cu_seqlens.to(policy.device),
            selection=selection,
            **self._options(policy, mini, tensors),
        )

    def _options(self, policy: Policy, mini: MiniBatch, tensors: dict[str, Tensor]) -> dict[str, Any]:
        return {
            "objective": self.objective,
            "denominator": mini.denominator / policy.world.size,
            "mask": tensors["mask"],
            "ref_logprobs": tensors.get("ref_logprobs") if self.objective.needs_reference else None,
            "importance_weights": tensors.get("importance_weights"),
        }


def _old_logprobs(mini: MiniBatch, batch: PackedBatch, tensors: dict[str, Tensor]) -> Tensor | None:
    """Return what ratios are taken against; None for the policy's own log-probs."""
    return None if mini.on_policy and not batch.stale else tensors["old_logprobs"]


@dataclass(frozen=True)
class PreferenceLoss:
    """DPO and its relatives over pairs of responses. Both responses of a pair are in one micro-batch, on one rank."""

    settings: PreferenceConfig
    temperature: float = 1.0
    objective: None = None
    sequences_per_unit: int = 2
    is_local: bool = False

    def arrange(self, sequences: Sequence[TrainingSequence]) -> Sequence[TrainingSequence]:
        return order_by_pair(sequences)

    def denominator(self, sequences: Sequence[TrainingSequence]) -> int:
        return len(sequences) // 2

    def __call__(
        self, policy: Policy, mini: MiniBatch, batch: PackedBatch, selection: Tensor | None
    ) -> PreferenceOutput:
        stats = global_token_stats(policy, batch, self.temperature, entropy=True)
        tensors = global_tensors(batch, policy)
        n_sequences = int((batch.group_ids >= 0).sum())  # padding comes after them
        return preference_loss_from_logprobs(
            stats.logprobs,
            stats.logprobs.detach() if mini.on_policy else tensors["ref_logprobs"],
            entropy=stats.entropy,
            pairs=torch.arange(n_sequences, device=policy.device).view(-1, 2),
            mask=tensors["mask"],
            cu_seqlens=batch.cu_seqlens.to(policy.device),
            denominator=mini.denominator / policy.world.size,
            beta=self.settings.beta,
            loss_type=self.settings.loss_type,
            label_smoothing=self.settings.label_smoothing,
        )
