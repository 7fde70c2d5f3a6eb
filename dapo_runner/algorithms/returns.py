"""Estimate advantages per token: PPO with a critic, REINFORCE++ (`advantage.kind` gae, returns, group_returns).

They are estimated for a whole step before its first update. r_t is the reward of a token, V_t the critic's value before
the token, γ and λ are settings:

    returns     G_t = r_t + γ·G_{t+1}
    gae         δ_t = r_t + γ·V_{t+1} − V_t,  A_t = δ_t + γλ·A_{t+1},  returns A_t + V_t    (arXiv 1506.02438, eq. 16)
    whitened    (A − mean_N) / (std_N + 1e-6)    over the N tokens of a step that train, std unbiased

G, A and V are 0 after the last token, also in a truncated response. Legend: N tokens, sequence after sequence; S
sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dapo_kernels.objectives.surrogate import kl_term
from dapo_runner.algorithms.mini_batch import MiniBatch
from dapo_runner.config import Config
from dapo_runner.parallel.world import SINGLE_PROCESS, World
from dapo_runner.types import PackedBatch, TrainingSequence

EPS = 1e-6  # added to a standard deviation before dividing by it


def discounted_sums(values: Tensor, lengths: Tensor, discount: float) -> Tensor:
    """Return y_t = x_t + discount·y_{t+1} within each sequence, float64 [N], from ``values`` x [N]; ``lengths`` [S]."""
    from scipy.signal import lfilter  # here: the import takes 0.7 s

    backwards = (part.flip(0).numpy() for part in values.double().split(lengths.tolist()))
    sums = [torch.from_numpy(lfilter([1.0], [1.0, -discount], part)).flip(0) for part in backwards]
    return torch.cat(sums) if sums else values.double()


def gae(rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, [N] each, from ``rewards`` and ``values`` [N]. ``lengths`` [S] are positive."""
    following = values.roll(-1)
    following[lengths.cumsum(0) - 1] = 0
    advantages = discounted_sums(rewards + gamma * following - values, lengths, gamma * lam)
    return advantages, advantages + values


def whiten(values: Tensor, world: World = SINGLE_PROCESS) -> Tensor:
    """Return this rank's ``values`` float64 [N], whitened with mean and standard deviation of all ranks. Collective."""
    mean, variance = moments(values, world)
    return (values - mean) / (variance**0.5 + EPS)


def moments(values: Tensor, world: World = SINGLE_PROCESS) -> tuple[float, float]:
    """Return mean and unbiased variance over the values of all ranks; 0 if there are too few. Collective."""
    parts = world.gather_shares((values.numel(), float(values.sum())))
    count = sum(n for n, _ in parts)
    mean = sum(total for _, total in parts) / max(count, 1)
    squares = sum(world.gather_shares(float((values - mean).square().sum())))
    return mean, squares / max(count - 1, 1)


def estimate_advantages(minis: Sequence[MiniBatch], config: Config, world: World) -> dict[str, float]:
    """Set the advantages and returns of a step's micro-batches, and return the step's metrics. Collective."""
    settings, kl = config.advantage, config.reward.kl
    batches = [batch for mini in minis for batch in mini.micro_batches]
    counts = [_count_training_tokens(batch) for batch in batches]
    lengths = torch.cat([count[count > 0] for count in counts])
    rewards = torch.cat([_last_token_rewards(batch, count) for batch, count in zip(batches, counts, strict=True)])
    metrics = {}
    if kl is not None:
        policy = [logprobs for mini in minis for logprobs in mini.policy_logprobs]
        penalties = [
            kl_term(_training_tokens(batch, logprobs), _training_tokens(batch, batch.ref_logprobs), kl.estimator)[0]
            for batch, logprobs in zip(batches, policy, strict=True)
        ]
        penalty = torch.cat(penalties)
        rewards = rewards - kl.coef * penalty
        metrics["reward_kl"] = moments(penalty, world)[0]
    if settings.kind == "gae":
        values = torch.cat([_training_tokens(batch, batch.values) for batch in batches])
        advantages, returns = gae(rewards, values, lengths, settings.gamma, settings.lam)
        unexplained, variance = (moments(x, world)[1] for x in (returns - values, returns))
        metrics["explained_variance"] = 1 - unexplained / variance if variance else 0.0
    else:
        advantages = returns = discounted_sums(rewards, lengths, settings.gamma)
    metrics["return"] = moments(returns, world)[0]
    advantages = whiten(advantages, world)
    sizes = [int(count.sum()) for count in counts]
    estimates = iter(zip(batches, advantages.split(sizes), returns.split(sizes), strict=True))
    for mini in minis:
        mini.micro_batches = [_with_estimates(*next(estimates)) for _ in mini.micro_batches]
    return metrics


def show_advantages(
    minis: Sequence[MiniBatch], sequences: Sequence[TrainingSequence], groups: int | None, world: World
) -> None:
    """Copy token advantages into the sequences of rank 0, for the rollout log: of the first ``groups`` groups, or of
    all with None. Collective.
    """
    found = {
        index: advantages.clone()  # of a view, the whole tensor would be sent
        for mini in minis
        for batch in mini.micro_batches
        for index, group, advantages in zip(
            batch.sequence_ids.tolist(), batch.group_ids.tolist(), batch.advantages.split(batch.lengths), strict=True
        )
        if group >= 0 and (groups is None or group < groups)
    }
    for part in world.run_and_gather_on_rank0(lambda: found if world.is_sequence_leader else {}):
        for index, advantages in part.items():
            sequences[index].advantages[1:] = advantages


def _count_training_tokens(batch: PackedBatch) -> Tensor:
    """Return the number of training tokens of each sequence, int64 [S]."""
    before = torch.cat([torch.zeros(1, dtype=torch.int64), batch.mask.cumsum(0)])
    return before[batch.cu_seqlens.long()].diff()


def _training_tokens(batch: PackedBatch, tensor: Tensor | None) -> Tensor:
    """Return the entries of [T] at training tokens, in float64."""
    assert tensor is not None
    return tensor[batch.mask].double()


def _last_token_rewards(batch: PackedBatch, counts: Tensor) -> Tensor:
    """Return the reward of each token: that of the response at its last token, 0 elsewhere."""
    rewards = torch.zeros(int(counts.sum()), dtype=torch.float64)
    if batch.rewards is not None:  # a rank may have only padding
        trains = counts > 0
        rewards[counts[trains].cumsum(0) - 1] = batch.rewards[trains].double()
    return rewards


def _with_estimates(batch: PackedBatch, advantages: Tensor, returns: Tensor) -> PackedBatch:
    def scatter(values: Tensor) -> Tensor:
        return torch.zeros(batch.n_positions).masked_scatter_(batch.mask, values.float())

    return replace(batch, advantages=scatter(advantages), returns=scatter(returns))
