"""A learner whose advantages are those of single tokens: PPO with a critic, REINFORCE++.

Once the old log-probs, the reference's and the values of a whole step are there, before its first update, every token
has a reward, a return and an advantage (`dapo_runner.algorithms.returns`). The update itself is the learner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dapo_kernels.objectives.surrogate import kl_term
from dapo_runner.algorithms.critic import Critic
from dapo_runner.algorithms.learner import Learner
from dapo_runner.algorithms.mini_batch import MiniBatch
from dapo_runner.algorithms.returns import discounted_sums, gae, moments, whiten
from dapo_runner.algorithms.weights import Part
from dapo_runner.config import Config, ConfigError
from dapo_runner.policy.model import Policy
from dapo_runner.timing import StepClock
from dapo_runner.types import PackedBatch
from dapo_runner.types import Sequence as TrainingSequence


class TokenLearner(Learner):
    """``critic`` is a model with a value head, the policy itself where they share a trunk; None without values."""

    def __init__(
        self,
        policy: Policy,
        config: Config,
        reference: Policy | None = None,
        clock: StepClock | None = None,
        critic: Policy | None = None,
    ) -> None:
        super().__init__(policy, config, reference, clock)
        if critic is not None and critic.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
            raise ConfigError(
                "critic.path: expected a model with the policy's tokenizer, got one with another vocabulary"
            )
        self.critic = None if critic is None else Critic(critic, config)
        if self.critic is not None and self.critic.shared:
            self.value_term = self.critic.term
        self.estimates: dict[str, float] = {}  # figures of the step

    def parts(self) -> list[Part]:
        return super().parts() + ([] if self.critic is None else self.critic.parts())

    def prepare(self, sequences: Sequence[TrainingSequence]) -> list[MiniBatch]:
        minis = super().prepare(sequences)
        if self.critic is not None:
            with self.clock.phase("values"):
                for mini in minis:
                    mini.micro_batches = [
                        replace(batch, values=self.critic.values(batch).to(batch.mask.device))
                        for batch in mini.micro_batches
                    ]
        with self.clock.phase("pack"):
            if minis:
                self._estimate(minis)
                self._show(minis, sequences)
        return minis

    def update(self, mini: MiniBatch, step: int) -> dict[str, float]:
        if self.critic is None:
            return super().update(mini, step) | self.estimates
        if self.critic.shared:
            return super().update(mini, step) | self.critic.figures(mini) | self.estimates
        with self.clock.phase("critic"):
            figures = self.critic.update(mini, step) | self.estimates
        if step - self.config.run.forked_at < self.critic.settings.warmup_steps:
            return figures
        return super().update(mini, step) | figures

    def _estimate(self, minis: Sequence[MiniBatch]) -> None:
        """Give the micro-batches of a step their advantages and returns. Collective."""
        settings = self.config.advantage
        tokens = [_Tokens(batch) for mini in minis for batch in mini.micro_batches]
        lengths = torch.cat([one.lengths for one in tokens])
        rewards = torch.cat([one.rewards() for one in tokens])
        self.estimates = {}
        if (kl := self.config.reward.kl) is not None:
            own = [logprobs for mini in minis for logprobs in mini.own_logprobs]
            penalties = torch.cat([one.kl(logprobs, kl.estimator) for one, logprobs in zip(tokens, own, strict=True)])
            rewards = rewards - kl.coef * penalties
            self.estimates["reward_kl"] = moments(penalties, self.world)[0]
        if self.critic is None:
            advantages = returns = discounted_sums(rewards, lengths, settings.gamma)
        else:
            values = torch.cat([one.of(one.batch.values) for one in tokens])
            advantages, returns = gae(rewards, values, lengths, settings.gamma, settings.lam)
            unexplained, spread = (moments(x, self.world)[1] for x in (returns - values, returns))
            self.estimates["explained_variance"] = 1 - unexplained / spread if spread else 0.0
        self.estimates["return"] = moments(returns, self.world)[0]
        if settings.whiten:
            advantages = whiten(advantages, self.world)
        sizes = [int(one.lengths.sum()) for one in tokens]
        batches = iter(map(_Tokens.estimated, tokens, advantages.split(sizes), returns.split(sizes)))
        for mini in minis:
            mini.micro_batches = [next(batches) for _ in mini.micro_batches]
            if not self.objective.needs_reference:
                mini.micro_batches = [replace(batch, ref_logprobs=None) for batch in mini.micro_batches]

    def _show(self, minis: Sequence[MiniBatch], sequences: Sequence[TrainingSequence]) -> None:
        """Let the records of the responses that the log keeps have their tokens' advantages. Collective."""
        groups = self.config.logging.rollouts.groups
        found = {
            mini.first + index: advantages
            for mini in minis
            for batch in mini.micro_batches
            for index, group, advantages in zip(
                batch.sequence_ids.tolist(),
                batch.group_ids.tolist(),
                batch.advantages.split(batch.lengths),
                strict=True,
            )
            if group >= 0 and (groups is None or group < groups)
        }
        for part in self.world.all_gather_object(found):
            for index, advantages in part.items():
                sequences[index].advantages[1:] = advantages


class _Tokens:
    """The tokens of a micro-batch that train, those of a sequence side by side: N of its T positions, in float64."""

    def __init__(self, batch: PackedBatch) -> None:
        self.batch = batch
        before = torch.cat([torch.zeros(1, dtype=torch.int64), batch.mask.cumsum(0)])
        counts = before[batch.cu_seqlens.long()].diff()
        self._trains = counts > 0
        self.lengths = counts[self._trains]  # int64 [S'], of sequences that have such tokens

    def of(self, tensor: Tensor | None) -> Tensor:
        assert tensor is not None
        return tensor[self.batch.mask].double()

    def rewards(self) -> Tensor:
        """What a response has earned, on its last token."""
        rewards = torch.zeros(int(self.lengths.sum()), dtype=torch.float64)
        if self.batch.rewards is not None:  # a rank with nothing but padding
            rewards[self.lengths.cumsum(0) - 1] = self.batch.rewards[self._trains].double()
        return rewards

    def kl(self, logprobs: Tensor, estimator: str) -> Tensor:
        """Of a policy that gives these ``logprobs``, float32 [T], to the reference."""
        value: Tensor = kl_term(self.of(logprobs), self.of(self.batch.ref_logprobs), estimator)[0]
        return value

    def estimated(self, advantages: Tensor, returns: Tensor) -> PackedBatch:
        return replace(self.batch, advantages=self._spread(advantages), returns=self._spread(returns))

    def _spread(self, values: Tensor) -> Tensor:
        return torch.zeros(self.batch.n_positions).masked_scatter_(self.batch.mask, values.float())
