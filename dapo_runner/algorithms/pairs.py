"""Iterated DPO: preference pairs made from the groups of a step by reward, trained on by a preference loss.

The best sample of a group is chosen over the worst, the second best over the second worst, and so on (Dong et al. 2024,
RLHF Workflow, arXiv 2405.07863, best of n against worst of n). Where the two have earned the same there is no pair but
a tie, which is counted. Of equal samples the earlier one counts as better: they come in the order of their seeds.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch
from torch import Tensor

from dapo_kernels import preference_loss_from_logprobs
from dapo_kernels.preference import PreferenceOutput
from dapo_runner.algorithms.advantage import sequence_of
from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.mini_batch import MiniBatch, positions_of
from dapo_runner.algorithms.objective import uses_reference
from dapo_runner.config import Config, PreferenceConfig
from dapo_runner.parallel.ulysses import gather_positions
from dapo_runner.policy.model import Policy
from dapo_runner.timing import StepClock
from dapo_runner.types import Group, PackedBatch, Sequence

CHOSEN, REJECTED = 1.0, -1.0  # where other algorithms have an advantage


def make_pairs(group: Group, most: int) -> tuple[list[tuple[int, int]], int]:
    """Chosen and rejected, by their places in the group: at most ``most`` pairs of samples that train; and the ties."""
    samples = group.samples
    best = sorted((i for i, sample in enumerate(samples) if sample.trains), key=lambda i: -samples[i].reward)
    facing = list(zip(best, reversed(best), strict=True))[: min(most, len(best) // 2)]
    pairs = [(chosen, rejected) for chosen, rejected in facing if samples[chosen].reward > samples[rejected].reward]
    return pairs, len(facing) - len(pairs)


def pair_sequences(groups: SequenceOf[Group], config: PreferenceConfig, step: int = 0) -> list[Sequence]:
    """The training records of a step's samples, group by group in order. Of those in no pair nothing trains. ``step``
    is the one that groups count their own by.
    """
    sequences: list[Sequence] = []
    pairs = 0
    for group_id, group in enumerate(groups):
        label, pair_of = [0.0] * len(group.samples), [-1] * len(group.samples)
        for chosen, rejected in make_pairs(group, config.pairs_per_group)[0]:
            label[chosen], label[rejected] = CHOSEN, REJECTED
            pair_of[chosen] = pair_of[rejected] = pairs
            pairs += 1
        for sample, value, pair in zip(group.samples, label, pair_of, strict=True):
            sequence = sequence_of(group, sample, value, group_id, step - group.step)
            sequences.append(replace(sequence, pair=pair, mask=sequence.mask & (pair >= 0)))
    return sequences


def in_pairs(sequences: SequenceOf[Sequence]) -> list[Sequence]:
    """Those that are in a pair: the chosen and the rejected one of the first, of the second, …"""
    paired = [sequence for sequence in sequences if sequence.pair >= 0]
    return sorted(paired, key=lambda sequence: (sequence.pair, -float(sequence.advantages[-1])))


def pair_figures(groups: SequenceOf[Group], config: PreferenceConfig | None) -> dict[str, float]:
    """Beside what updates say of their pairs, how many were none."""
    return {} if config is None else {"ties": sum(make_pairs(group, config.pairs_per_group)[1] for group in groups)}


class PairLearner(Learner):
    """Trains on pairs. Both responses of a pair lie in one micro-batch, on one rank."""

    def __init__(
        self, policy: Policy, config: Config, reference: Policy | None = None, clock: StepClock | None = None
    ) -> None:
        super().__init__(policy, config, reference, clock)
        assert config.preference is not None
        self.preference = config.preference
        self.by_token = False

    def prepare(self, sequences: SequenceOf[Sequence]) -> list[MiniBatch]:
        return super().prepare(in_pairs(sequences))

    def _part_size(self, n_sequences: int) -> int:
        size = super()._part_size(n_sequences)
        return size + size % 2

    def _mini_batch(self, part: SequenceOf[Sequence], number: int, first: int) -> MiniBatch:
        budget = self.config.optimizer.token_budget
        mini = MiniBatch(part, budget, self.objective, number, first, self.share, together=2)
        mini.denominator = len(part) // 2
        return mini

    def _take_logprobs(self, mini: MiniBatch) -> None:
        if uses_reference(self.config):
            with self.clock.phase("ref_logprobs"):
                mini.take_ref_logprobs(self.ref_logprobs)
        elif mini.number:
            with self.clock.phase("ref_logprobs"):
                mini.take_ref_logprobs(self.logprobs)
        else:  # the first update's forward pass gives them as well
            mini.on_policy = True

    def _loss(self, batch: PackedBatch, mini: MiniBatch, selection: Tensor | None) -> PreferenceOutput:
        group, settings, device = self.policy.world.sequence_group, self.preference, self.policy.device
        own = self._own_stats(self.policy, batch, entropy=True)
        assert own.entropy is not None
        logprobs, every = gather_positions(own.logprobs, group), positions_of(batch, self.policy, own=False)
        n_sequences = int((batch.group_ids >= 0).sum())  # padding comes behind them
        return preference_loss_from_logprobs(
            logprobs,
            logprobs.detach() if mini.on_policy else every["ref_logprobs"],
            entropy=gather_positions(own.entropy, group),
            pairs=torch.arange(n_sequences, device=device).view(-1, 2),
            mask=every["mask"],
            cu_seqlens=batch.cu_seqlens.to(device),
            denominator=mini.denominator / self.world.size,
            beta=settings.beta,
            loss_type=settings.loss_type,
            label_smoothing=settings.label_smoothing,
        )
