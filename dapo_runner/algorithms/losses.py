"""The losses that a learner can be given: of single responses, and of preference pairs.

Everything else of an update is the same for all losses (`learner.py`). Each has

    objective             whose ratios are taken against old log-probs; None for a loss without ratios
    sequences_per_unit    how many neighbouring sequences stay in one micro-batch
    is_local              whether ranks that share positions compute the loss of their own ones only
    arrange(sequences)    those that train, in the order in which they are split into mini-batches
    denominator(sequences)            what the loss of a whole mini-batch is divided by
    loss(policy, mini, batch, selection)    of one micro-batch; ``selection``, bool [T]: the tokens that train

FSDP2 takes the mean over ranks, so the denominator is divided by their number: the mean becomes a sum.

Preference pairs are made by reward: the best sample of a group is chosen over the worst, the second best over the
second worst, and so on (RLHF Workflow, arXiv 2405.07863). Two samples with the same reward are a tie, not a pair. Of
equal samples the earlier one counts as better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dapo_kernels import Objective, linear_dapo_loss, policy_loss, preference_loss_from_logprobs
from dapo_kernels.losses import LossOutput
from dapo_kernels.preference import PreferenceOutput
from dapo_runner.algorithms.advantage import make_sequence
from dapo_runner.algorithms.critic import Critic
from dapo_runner.algorithms.mini_batch import MiniBatch, head_arguments, loss_tensors, token_stats
from dapo_runner.algorithms.objective import weighs_responses
from dapo_runner.algorithms.packing import count_training_tokens
from dapo_runner.config import ConfigError, PreferenceConfig
from dapo_runner.parallel.ulysses import gather_positions, own_positions
from dapo_runner.policy.model import Policy
from dapo_runner.types import Group, PackedBatch
from dapo_runner.types import Sequence as TrainingSequence

Output = LossOutput | PreferenceOutput


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
        """Raise ConfigError where the advantages of a response differ and the objective weighs it as a whole."""
        if weighs_responses(self.objective):
            for sequence in sequences:
                advantages = sequence.advantages[sequence.mask]
                if bool((advantages != advantages[:1]).any()):
                    raise ConfigError(
                        "advantage.kind: expected one advantage for all tokens of a response with this loss.objective, "
                        "got several. Use 'ppo' or 'gspo_token'"
                    )
        return sequences

    def denominator(self, sequences: Sequence[TrainingSequence]) -> int:
        if self.objective.aggregate == "token-mean":
            return count_training_tokens(sequences)
        return sum(bool(sequence.mask[1:].any()) for sequence in sequences)

    def __call__(self, policy: Policy, mini: MiniBatch, batch: PackedBatch, selection: Tensor | None) -> LossOutput:
        group = policy.world.sequence_group
        if group is not None and not self.is_local:
            return self._from_logprobs(policy, mini, batch, selection)
        hidden, tensors = policy.hidden_states(batch), loss_tensors(batch, policy, group)
        out = linear_dapo_loss(
            hidden,
            **head_arguments(policy, batch, self.temperature),
            **self._arguments(policy, mini, batch, tensors),
            cu_seqlens=batch.cu_seqlens.to(policy.device) if group is None else None,
            selection=None if selection is None else own_positions(selection, group),
            entropy=True,
        )
        assert out.entropy is not None
        loss = out.loss
        if self.critic is not None:
            loss = loss + self.critic.settings.coef * self.critic.loss(hidden, batch, mini)
        return out._replace(
            loss=loss, logprobs=gather_positions(out.logprobs, group), entropy=gather_positions(out.entropy, group)
        )

    def _from_logprobs(
        self, policy: Policy, mini: MiniBatch, batch: PackedBatch, selection: Tensor | None
    ) -> LossOutput:
        """Compute a loss that needs all positions of a sequence: ranks exchange log-probs, not hidden states."""
        stats = token_stats(policy, batch, self.temperature, entropy=True)
        return policy_loss(
            stats.logprobs,
            **self._arguments(policy, mini, batch, loss_tensors(batch, policy, None)),
            entropy=stats.entropy,
            cu_seqlens=batch.cu_seqlens.to(policy.device),
            selection=selection,
        )

    def _arguments(
        self, policy: Policy, mini: MiniBatch, batch: PackedBatch, tensors: dict[str, Tensor]
    ) -> dict[str, Any]:
        on_policy = mini.on_policy and not batch.stale  # ratios are taken against the policy's own log-probs
        return {
            "objective": self.objective,
            "denominator": mini.denominator / policy.world.size,
            "old_logprobs": None if on_policy else tensors["old_logprobs"],
            "advantages": tensors["advantages"],
            "mask": tensors["mask"],
            "ref_logprobs": tensors.get("ref_logprobs") if self.objective.needs_reference else None,
            "importance_weights": tensors.get("importance_weights"),
        }


CHOSEN, REJECTED = 1.0, -1.0  # where other algorithms have an advantage


def make_pairs(group: Group, most: int) -> tuple[list[tuple[int, int]], int]:
    """Return at most ``most`` pairs (chosen, rejected) of samples that train, by their indices, and how many tied."""
    samples = group.samples
    best = sorted((i for i, sample in enumerate(samples) if sample.trains), key=lambda i: -samples[i].reward)
    facing = list(zip(best, reversed(best), strict=True))[: min(most, len(best) // 2)]
    pairs = [(chosen, rejected) for chosen, rejected in facing if samples[chosen].reward > samples[rejected].reward]
    return pairs, len(facing) - len(pairs)


def pair_sequences(groups: Sequence[Group], config: PreferenceConfig, step: int = 0) -> list[TrainingSequence]:
    """Return the training sequences of a step, group by group in order. Those in no pair do not train. ``step`` counts
    as the steps of the groups do.
    """
    sequences: list[TrainingSequence] = []
    n_pairs = 0
    for group_id, group in enumerate(groups):
        labels, pair_ids = [0.0] * len(group.samples), [-1] * len(group.samples)
        for chosen, rejected in make_pairs(group, config.pairs_per_group)[0]:
            labels[chosen], labels[rejected] = CHOSEN, REJECTED
            pair_ids[chosen] = pair_ids[rejected] = n_pairs
            n_pairs += 1
        for sample, label, pair in zip(group.samples, labels, pair_ids, strict=True):
            sequence = make_sequence(group, sample, label, group_id, step - group.step)
            sequences.append(replace(sequence, pair=pair, mask=sequence.mask & (pair >= 0)))
    return sequences


def order_by_pair(sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """Return the sequences that are in a pair: chosen and rejected of the first pair, of the second, …"""
    paired = [sequence for sequence in sequences if sequence.pair >= 0]
    return sorted(paired, key=lambda sequence: (sequence.pair, -float(sequence.advantages[-1])))


def pair_metrics(groups: Sequence[Group], config: PreferenceConfig | None) -> dict[str, float]:
    """Return the number of ties; nothing without preference training."""
    return {} if config is None else {"ties": sum(make_pairs(group, config.pairs_per_group)[1] for group in groups)}


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
        stats = token_stats(policy, batch, self.temperature, entropy=True)
        tensors = loss_tensors(batch, policy, None)
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


Loss = PolicyLoss | PreferenceLoss
