"""The losses of the trainer: of single responses, of a teacher's distributions, of preference pairs.

All other parts of an update are the same for all losses (`learner.py`). Each loss has

    objective             whose ratios need old log-probs; None for a loss without ratios
    sequences_per_unit    how many neighbouring sequences must be in the same micro-batch
    is_local              whether a rank of a sequence-parallel group computes the loss of its own positions only
    arrange(sequences)    the training sequences, in the order in which they are split into mini-batches
    denominator(sequences)            the divisor of the loss of a whole mini-batch
    loss(policy, mini, batch, selection)    of one micro-batch; ``selection``, bool [T]: the tokens that train

Preference pairs are made by reward: the best sample of a group is chosen over the worst (RLHF Workflow, arXiv
2405.07863). Two samples with equal rewards are a tie, not a pair. Samples with equal rewards stay in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dapo_kernels import Objective, linear_dapo_loss, linear_distillation_loss, linear_token_logprobs, policy_loss
from dapo_kernels.distillation import DistillationOutput
from dapo_kernels.losses import LossOutput
from dapo_kernels.objectives.table import PROMPT_MEAN
from dapo_kernels.preference import PreferenceOutput, preference_loss_from_logprobs
from dapo_runner.algorithms.advantage import make_sequence
from dapo_runner.algorithms.mini_batch import MiniBatch, head_arguments, loss_tensors, token_stats
from dapo_runner.algorithms.packing import count_training_tokens
from dapo_runner.config import ConfigError, DistillationConfig, PreferenceConfig
from dapo_runner.config.settings import weighs_responses
from dapo_runner.parallel.ulysses import gather_positions, shard_positions
from dapo_runner.policy.model import Policy
from dapo_runner.types import Group, PackedBatch, TrainingSequence

Output = LossOutput | PreferenceOutput


@dataclass(frozen=True)
class PolicyLoss:
    """A row of `dapo_kernels.OBJECTIVES` over single responses."""

    objective: Objective
    temperature: float = 1.0
    sequences_per_unit: int = 1

    @property
    def is_local(self) -> bool:
        return self.objective.per_sequence is None

    def arrange(self, sequences: Sequence[TrainingSequence]) -> Sequence[TrainingSequence]:
        """Raise ConfigError if the advantages of a response differ and the objective weighs it as a whole."""
        if weighs_responses(self.objective):
            for sequence in sequences:
                advantages = sequence.advantages[sequence.mask]
                if bool((advantages != advantages[:1]).any()):
                    raise ConfigError(
                        "advantage.kind: expected one advantage for all tokens of a response with this loss.objective, "
                        "got several. Set loss.objective to ppo or gspo_token."
                    )
        return sequences

    def denominator(self, sequences: Sequence[TrainingSequence]) -> int:
        if self.objective.aggregate == "token-mean":
            return count_training_tokens(sequences)
        trained = [sequence.group_id for sequence in sequences if sequence.mask[1:].any()]
        return len(set(trained) if self.objective.aggregate == PROMPT_MEAN else trained)

    def __call__(self, policy: Policy, mini: MiniBatch, batch: PackedBatch, selection: Tensor | None) -> LossOutput:
        group = policy.world.sequence_group
        if group is not None and not self.is_local:
            return self._from_logprobs(policy, mini, batch, selection)
        arguments = {  # before the forward pass: the copies to the device would wait for its end
            **head_arguments(policy, batch, self.temperature),
            **self._arguments(policy, mini, batch, loss_tensors(batch, policy, group)),
            "cu_seqlens": batch.cu_seqlens.to(policy.device) if group is None else None,
            "selection": None if selection is None else shard_positions(selection, group),
        }
        out = linear_dapo_loss(policy.hidden_states(batch), **arguments, entropy=True)
        assert out.entropy is not None
        logprobs, entropy = gather_positions(out.logprobs, group), gather_positions(out.entropy, group)
        return out._replace(logprobs=logprobs, entropy=entropy)

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
        on_policy = mini.on_policy and not batch.stale  # the policy's current log-probs are the old ones
        group_tokens = None
        if self.objective.aggregate == PROMPT_MEAN:
            assert mini.group_tokens is not None
            group_tokens = mini.group_tokens[batch.group_ids].to(policy.device)  # padding gets those of any group
        return {
            "objective": self.objective,
            "denominator": mini.denominator_on(policy.world),
            "old_logprobs": None if on_policy else tensors["old_logprobs"],
            "advantages": tensors["advantages"],
            "mask": tensors["mask"],
            "ref_logprobs": tensors.get("ref_logprobs") if self.objective.needs_reference else None,
            "importance_weights": tensors.get("importance_weights"),
            "group_tokens": group_tokens,
        }


@dataclass(frozen=True)
class DistillationLoss:
    """The divergence from a teacher's distributions over the vocabulary, averaged over training tokens."""

    settings: DistillationConfig
    teacher: Policy
    temperature: float = 1.0
    objective: None = None
    sequences_per_unit: int = 1
    is_local: bool = True

    def arrange(self, sequences: Sequence[TrainingSequence]) -> Sequence[TrainingSequence]:
        return sequences

    def denominator(self, sequences: Sequence[TrainingSequence]) -> int:
        return count_training_tokens(sequences)

    def __call__(self, policy: Policy, mini: MiniBatch, batch: PackedBatch, selection: Tensor | None) -> LossOutput:
        group, outs = policy.world.sequence_group, list[DistillationOutput]()
        mask = shard_positions(batch.mask, group).to(policy.device)
        head, hidden = head_arguments(policy, batch, self.temperature), policy.hidden_states(batch)
        with torch.no_grad():
            stats = linear_token_logprobs(hidden, mask=mask, entropy=True, **head)
        assert stats.entropy is not None
        unused = ("target_ids", "sampling_mask")
        options = {name: value for name, value in head.items() if name not in unused}

        def compute() -> None:  # returns nothing: FSDP2 would gather the teacher again for a backward pass
            with torch.no_grad():
                teacher_hidden = self.teacher.hidden_states(batch)
            ref = self.teacher.head
            out = linear_distillation_loss(
                hidden,
                ref_hidden=teacher_hidden,
                ref_weight=ref.weight,
                ref_bias=ref.bias,
                ref_softcap=ref.softcap,
                # Rows of a head beyond the shared vocabulary are padding.
                valid_vocab=min(len(head["weight"]), len(ref.weight)),
                beta=self.settings.beta,
                mask=mask,
                denominator=mini.denominator_on(policy.world),
                **options,
            )
            outs.append(out)

        self.teacher.run(compute)
        live = torch.where(mask, stats.logprobs, 0.0)
        metrics = {"tokens": mask.sum(), "nonfinite": (~live.isfinite()).sum(), "entropy": stats.entropy.sum()}
        logprobs, entropy = gather_positions(stats.logprobs, group), gather_positions(stats.entropy, group)
        return LossOutput(outs[0].loss, logprobs, entropy, metrics)


CHOSEN, REJECTED = 1.0, -1.0  # stored in place of advantages


def make_pair(group: Group) -> tuple[tuple[int, int] | None, bool]:
    """Return the indices of the best and the worst training sample, or None, and whether their rewards tie."""
    rewards = {i: sample.reward for i, sample in enumerate(group.samples) if sample.trains}
    best = sorted(rewards, key=lambda i: -rewards[i])
    is_tie = len(best) > 1 and rewards[best[0]] == rewards[best[-1]]
    return (None if is_tie or len(best) < 2 else (best[0], best[-1])), is_tie


def pair_sequences(groups: Sequence[Group], step: int = 0) -> list[TrainingSequence]:
    """Return the training sequences of ``step``, in the order of their groups. Those without a pair do not train."""
    sequences: list[TrainingSequence] = []
    n_pairs = 0
    for group_id, group in enumerate(groups):
        pair = make_pair(group)[0] or ()
        labels = dict(zip(pair, (CHOSEN, REJECTED), strict=False))  # of the two samples of a pair
        for index, sample in enumerate(group.samples):
            sequence = make_sequence(group, sample, labels.get(index, 0.0), group_id, step - group.step)
            pair_id = n_pairs if index in pair else -1
            sequences.append(replace(sequence, pair=pair_id, mask=sequence.mask & (index in pair)))
        n_pairs += bool(pair)
    return sequences


def pair_metrics(groups: Sequence[Group], config: PreferenceConfig | None) -> dict[str, float]:
    """Return the number of ties, or nothing without preference training."""
    return {} if config is None else {"ties": sum(make_pair(group)[1] for group in groups)}


@dataclass(frozen=True)
class PreferenceLoss:
    """DPO and its variants, over pairs of responses. Both responses of a pair are in one micro-batch on one rank."""

    settings: PreferenceConfig
    temperature: float = 1.0
    objective: None = None
    sequences_per_unit: int = 2
    is_local: bool = False

    def arrange(self, sequences: Sequence[TrainingSequence]) -> Sequence[TrainingSequence]:
        """Return the sequences that have a pair, ordered: chosen and rejected of the first pair, of the second, …"""
        paired = [sequence for sequence in sequences if sequence.pair >= 0]
        return sorted(paired, key=lambda sequence: (sequence.pair, -float(sequence.advantages[-1])))

    def denominator(self, sequences: Sequence[TrainingSequence]) -> int:
        return len(sequences) // 2

    def __call__(
        self, policy: Policy, mini: MiniBatch, batch: PackedBatch, selection: Tensor | None
    ) -> PreferenceOutput:
        stats = token_stats(policy, batch, self.temperature, entropy=True)
        tensors = loss_tensors(batch, policy, None)
        n_sequences = int((batch.group_ids >= 0).sum())  # the rest is padding
        return preference_loss_from_logprobs(
            stats.logprobs,
            stats.logprobs.detach() if mini.on_policy else tensors["ref_logprobs"],
            entropy=stats.entropy,
            pairs=torch.arange(n_sequences, device=policy.device).view(-1, 2),
            mask=tensors["mask"],
            cu_seqlens=batch.cu_seqlens.to(policy.device),
            denominator=mini.denominator_on(policy.world),
            beta=self.settings.beta,
            loss_type=self.settings.loss_type,
        )


Loss = PolicyLoss | DistillationLoss | PreferenceLoss
