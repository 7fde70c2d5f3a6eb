"""The learner: old log-probs, a loss over packed micro-batches, one optimizer step for each mini-batch.

Every sum is divided by the count of the whole mini-batch, never by that of a micro-batch. So the gradient of a
mini-batch does not depend on how it is split and packed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from dapo_kernels import Objective, reduce_metrics
from dapo_kernels.logprobs import TokenStats
from dapo_kernels.metrics import COUNTS
from dapo_runner.algorithms.correction import Mismatch, measure
from dapo_runner.algorithms.critic import Critic
from dapo_runner.algorithms.losses import DistillationLoss, Loss, Output, PolicyLoss, PreferenceLoss
from dapo_runner.algorithms.mini_batch import MiniBatch, NonFiniteUpdateError, token_stats
from dapo_runner.algorithms.optimizer import MasterWeights, MovingReference, TrainedModel, learning_rate
from dapo_runner.algorithms.packing import count_group_tokens, count_training_tokens, pack_shares
from dapo_runner.algorithms.returns import estimate_advantages, show_advantages
from dapo_runner.algorithms.selection import ScoredBatch, TokenValues, select_tokens, token_values
from dapo_runner.config import Config, ConfigError
from dapo_runner.policy.lora import adapters_off
from dapo_runner.policy.model import Policy
from dapo_runner.timing import StepClock
from dapo_runner.types import PackedBatch, TrainingSequence

T = TypeVar("T")


class Learner:
    """Train a policy. ``prepare`` packs the sequences of a step, ``update`` takes one optimizer step.

    With `logging.rollouts.per_token`, ``token_values`` on rank 0 holds what the step's updates computed per token, by
    the index of the sequence in the step.
    """

    def __init__(
        self,
        policy: Policy,
        config: Config,
        reference: Policy | None = None,
        critic_model: Policy | None = None,
        clock: StepClock | None = None,
    ) -> None:
        """Make a policy with adapters its own reference, with the adapters switched off. Raises ConfigError."""
        key = "loss.reference" if config.distillation is None else "distillation.teacher"
        for name, other in ((key, reference), ("critic.path", critic_model)):
            if other is None or other is policy:
                continue
            own, theirs = (one.tokenizer.get_vocab().items() for one in (policy, other))
            if own != theirs and not (name == "critic.path" and own <= theirs):  # a critic may have more tokens
                raise ConfigError(f"{name}: requires a model with the policy's tokenizer, got another vocabulary")
        self.policy, self.config, self.reference, self.world = policy, config, reference, policy.world
        self.clock = StepClock() if clock is None else clock
        self.critic = None if critic_model is None else Critic(critic_model, config)
        temperature = config.rollout.temperature
        self.loss: Loss
        if config.distillation is not None:
            assert reference is not None
            self.loss = DistillationLoss(config.distillation, reference, temperature)
        elif config.preference is not None:
            self.loss = PreferenceLoss(config.preference, temperature)
        else:
            self.loss = PolicyLoss(config.objective, temperature)
        self.token_values: dict[int, TokenValues] = {}
        self.estimates: dict[str, float] = {}  # metrics of the step
        self.trained = TrainedModel(policy, config)
        self.master, self.optimizer = self.trained.master, self.trained.optimizer
        self.moving: MovingReference | None = None
        if config.loss.reference_ema is not None and reference is not None:
            alpha, offload = config.loss.reference_ema, config.optimizer.offload
            self.moving = MovingReference(reference.model, self.master.tensors, alpha, offload=offload)

    def parts(self) -> list[MasterWeights]:
        """Return the weights, with their optimizer state, that a checkpoint saves."""
        critic = None if self.critic is None else self.critic.trained.master
        return [weights for weights in (self.master, self.moving, critic) if weights is not None]

    def scalers(self) -> list[torch.amp.GradScaler]:
        """Return the loss scalers of policy and critic, whose state a checkpoint saves."""
        critic = None if self.critic is None else self.critic.trained
        return [trained.scaler for trained in (self.trained, critic) if trained is not None]

    def prepare(self, sequences: Sequence[TrainingSequence]) -> list[MiniBatch]:
        """Return this rank's share of the mini-batches of a step, with all inputs of their updates: log-probs of the
        policy before the first update, log-probs of the reference, values and advantages of tokens.

        Only the ``sequences`` of rank 0 are used. Collective.
        """
        self.token_values, self.estimates = {}, {}
        with self.clock.phase("pack"):
            shares = self.world.run_on_rank0(lambda: self._split(self.loss.arrange(sequences)))
            minis = self.world.scatter_from_rank0(shares or [], self.world.layout.sequence)
        for mini in minis:
            if self.loss.objective is not None:
                self._add_old_logprobs(mini)
            self._add_ref_logprobs(mini)
        if self.critic is not None:
            with self.clock.phase("values"):
                for mini in minis:
                    self.critic.add_values(mini)
        if self.config.advantage.by_token and minis:
            with self.clock.phase("pack"):
                self.estimates = estimate_advantages(minis, self.config, self.world)
                show_advantages(minis, sequences, self.config.logging.rollouts.groups, self.world)
        return minis

    def _split(self, sequences: Sequence[TrainingSequence]) -> list[list[MiniBatch]]:
        """Split a step into mini-batches of at most the configured number of sequences that train, as equal as
        possible, and each into the shares of the data ranks. Equal sizes avoid a tiny last update if the step is short.
        """
        unit, limit = self.loss.sequences_per_unit, self.config.mini_batch_size
        starts = [i for i in range(0, len(sequences), unit) if count_training_tokens(sequences[i : i + unit])]
        n_parts = 1 if self.config.optimizer.mini_batch_size is None else max(1, math.ceil(unit * len(starts) / limit))
        size, n_larger = divmod(len(starts), n_parts)  # the first parts have one unit more
        bounds = [[*starts, len(sequences)][index * size + min(index, n_larger)] for index in range(n_parts + 1)]
        shares: list[list[MiniBatch]] = [[] for _ in range(self.world.data_size)]
        for index, (first, end) in enumerate(pairwise(bounds)):
            part = sequences[first:end]
            n_tokens, denominator = count_training_tokens(part), self.loss.denominator(part)
            group_tokens = count_group_tokens(part)
            for share, batches in zip(shares, self.pack(part, first), strict=True):
                if batches:
                    share.append(MiniBatch(batches, n_tokens, denominator, index, group_tokens))
        return shares

    def pack(self, sequences: Sequence[TrainingSequence], first_id: int = 0) -> list[list[PackedBatch]]:
        """Return the micro-batches of each data rank. Their ``sequence_ids`` count from ``first_id``."""
        return pack_shares(
            sequences,
            self.config.optimizer.token_budget,
            ranks=self.world.data_size,
            multiple=self.world.layout.sequence,
            hidden_size=self.policy.model.config.get_text_config(decoder=True).hidden_size,
            together=self.loss.sequences_per_unit,
            first_id=first_id,
        )

    def _add_old_logprobs(self, mini: MiniBatch) -> None:
        assert self.loss.objective is not None
        correction, from_engine = self.config.rollout.correction, self.config.loss.old_logprobs == "engine"
        unknown = self.world.any(any(not batch.old_logprobs.isfinite().all() for batch in mini.micro_batches))
        if not from_engine:
            # The first update's forward pass also gives the old log-probs, unless they are needed earlier.
            needed = correction.enabled or self.config.reward.kl or self.loss.objective.max_old_prob is not None
            mini.on_policy = mini.index == 0 and not needed and not unknown
        if not unknown and (from_engine or mini.on_policy):
            return
        routing = self.policy.routing
        with self.clock.phase("old_logprobs"):
            found = []  # all first: the copies of log-probs to the host wait for the device
            for batch in mini.micro_batches:
                found.append((self.logprobs(batch), None if from_engine or routing is None else routing.chosen()))
            for index, (old, experts) in enumerate(found):
                mini.set_old_logprobs(index, old.cpu(), experts, correction, from_engine=from_engine)

    def _add_ref_logprobs(self, mini: MiniBatch) -> None:
        if self.config.distillation is not None:  # its loss uses the teacher's whole distributions
            return
        if self.config.uses_reference:
            compute = self.ref_logprobs
        elif self.loss.objective is not None:
            return
        elif mini.index == 0:  # the first update's forward pass gives the log-probs before the step
            mini.on_policy = True
            return
        else:
            compute = self.logprobs
        with self.clock.phase("ref_logprobs"):
            found = [compute(batch) for batch in mini.micro_batches]
            both = zip(mini.micro_batches, found, strict=True)
            mini.micro_batches = [replace(batch, ref_logprobs=logprobs.cpu()) for batch, logprobs in both]

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """Return the policy's log-probs of the targets, float32 [T] on its device; 0 where the mask is False."""
        return self._token_stats(self.policy, batch).logprobs

    def ref_logprobs(self, batch: PackedBatch) -> Tensor:
        """Return the reference's log-probs of the targets, like ``logprobs``."""
        if self.reference is not None:
            return self._token_stats(self.reference, batch).logprobs
        with adapters_off(self.policy.model):
            return self._token_stats(self.policy, replace(batch, experts=None)).logprobs

    @torch.no_grad()
    def _token_stats(self, policy: Policy, batch: PackedBatch, *, entropy: bool = False) -> TokenStats:
        return policy.run(lambda: token_stats(policy, batch, self.config.rollout.temperature, entropy=entropy))

    def update(self, mini: MiniBatch, step: int) -> dict[str, float]:
        """Take one optimizer step and return its metrics. Raises NonFiniteUpdateError.

        ``step`` is the rollout step, from 0, which sets the learning rate.
        """
        critic = self.critic
        if critic is None:
            return self._update_policy(mini, step) | self.estimates
        with self.clock.phase("critic"):
            metrics = critic.update(mini, step) | self.estimates
        in_warmup = step < critic.settings.warmup_steps  # the policy does not train
        return metrics if in_warmup else self._update_policy(mini, step) | metrics

    def _update_policy(self, mini: MiniBatch, step: int) -> dict[str, float]:
        outs: list[Output] = []
        rate = learning_rate(self.config, step)
        with self.clock.phase("forward_backward"):
            selections = self.select_tokens(mini, step)

            def compute_loss(index: int) -> Tensor:
                outs.append(self.compute_loss(mini, mini.micro_batches[index], selections[index]))
                return outs[-1].loss

            self.trained.accumulate_gradients(mini, compute_loss)
        with self.clock.phase("optimizer"):
            norm = self.trained.clip_gradients()
        metrics = self._reduce_metrics(outs, norm, mini.loss_scale) | {"lr": rate}
        if mini.index == 0 and not mini.policy_logprobs:
            for batch, out in zip(mini.micro_batches, outs, strict=True):
                mini.mismatch += measure(out.logprobs.to(batch.mask.device), batch.old_logprobs, batch.mask)
        _check_finite(metrics, mini, step)
        if self.config.logging.rollouts.per_token:
            self._keep_token_values(mini, outs, selections)
        with self.clock.phase("optimizer"):
            return metrics | self.trained.step(rate)

    def compute_loss(self, mini: MiniBatch, batch: PackedBatch, selection: Tensor | None = None) -> Output:
        """Return the loss of one micro-batch of ``mini``. Collective."""
        return self.policy.run(lambda: self.loss(self.policy, mini, batch, selection))

    def select_tokens(self, mini: MiniBatch, step: int) -> Sequence[Tensor | None]:
        """Return for each micro-batch the tokens, bool [T], that the objective selects from the whole mini-batch, or
        None if the objective does not select tokens. Collective.
        """
        batches, objective = mini.micro_batches, self.loss.objective
        if objective is None or objective.batch_selection is None:
            return [None] * len(batches)
        scored = [_score(batch, self._token_stats(self.policy, batch, entropy=True)) for batch in batches]
        everywhere = self._gather_on_rank0(scored)
        shares = self.world.run_on_rank0(lambda: self._choose_tokens(objective, everywhere, mini, step))
        own = self.world.scatter_from_rank0(shares or [], self.world.layout.sequence)
        return [chosen.to(self.policy.device) for chosen in own]

    def _choose_tokens(
        self, objective: Objective, scored: Sequence[ScoredBatch], mini: MiniBatch, step: int
    ) -> list[list[Tensor]]:
        """Return the selections of each data rank's micro-batches. ``scored`` holds the micro-batches of all ranks."""
        device = self.policy.device
        # Each update has its own random numbers. They are the same after a resume.
        seed = random.Random(f"{self.config.run.seed}:{step}:{mini.index}").getrandbits(63)
        generator = torch.Generator(device).manual_seed(seed)
        found = select_tokens(objective, [one.to(device) for one in scored], generator, on_policy=mini.on_policy)
        chosen, n = [one.cpu().clone() for one in found], len(mini.micro_batches)  # n is the same on every rank
        return [chosen[start : start + n] for start in range(0, len(chosen), n)]

    def _keep_token_values(self, mini: MiniBatch, outs: Sequence[Output], selections: Sequence[Tensor | None]) -> None:
        assert self.loss.objective is not None
        chosen = [None if selection is None else selection.cpu() for selection in selections]
        scored = [_score(batch, out) for batch, out in zip(mini.micro_batches, outs, strict=True)]
        everywhere = self._gather_on_rank0(list(zip(scored, chosen, strict=True)))
        if not everywhere:  # on another rank
            return
        groups = self.config.logging.rollouts.groups
        self.token_values |= token_values(self.loss.objective, everywhere, on_policy=mini.on_policy, groups=groups)

    def _gather_on_rank0(self, local: list[T]) -> list[T]:
        """Return on rank 0 the entries of all ranks' micro-batches. A sequence-parallel group counts once."""
        parts = self.world.run_and_gather_on_rank0(lambda: local if self.world.is_sequence_leader else [])
        return [one for part in parts for one in part]

    def _reduce_metrics(self, outs: Sequence[Output], norm: Tensor, loss_scale: float) -> dict[str, float]:
        """Return the metrics of an update, over the micro-batches of all ranks."""
        loss_sum, grad_norm = torch.stack([torch.stack([out.loss.detach() for out in outs]).sum(), norm]).tolist()
        # The ranks of a sequence-parallel group have parts of a loss, or all of them the whole loss.
        counts = self.loss.is_local or self.world.is_sequence_leader
        losses = self.world.all_gather_object(loss_sum if counts else 0.0)
        total = math.fsum(losses) if all(map(math.isfinite, losses)) else sum(losses)  # fsum refuses ∞ − ∞
        loss = total / self.world.size / loss_scale
        found = reduce_metrics([out.metrics for out in outs] if counts else [])
        if self.loss.objective is not None and not self.loss.objective.kl_coef:
            del found["ref_kl"]  # 0, as if policy and reference were the same
        return {"loss": loss, "grad_norm": grad_norm, **found}

    def step_metrics(self, minis: Iterable[MiniBatch], updates: Sequence[dict[str, float]]) -> dict[str, float]:
        """Return the means over the updates, their number, and the mismatch of engine and policy. Collective."""
        local = sum((mini.mismatch for mini in minis), Mismatch())
        mismatch = sum(self.world.gather_shares(local), Mismatch())
        return mean_of(updates) | mismatch.metrics() | {"updates": len(updates)}

    def move_reference(self) -> None:
        """Move a moving reference toward the policy, after the updates of a step."""
        if self.moving is not None:
            self.moving.follow()


def _score(batch: PackedBatch, found: TokenStats | Output) -> ScoredBatch:
    assert found.entropy is not None
    return ScoredBatch(replace(batch, experts=None), found.logprobs, found.entropy).to("cpu")


def _check_finite(metrics: dict[str, float], mini: MiniBatch, step: int) -> None:
    loss, norm, nonfinite = metrics["loss"], metrics["grad_norm"], metrics["nonfinite"]
    # A float16 gradient that overflows is not an error: the update is skipped and the loss scale halved.
    if math.isfinite(loss) and (math.isfinite(norm) or mini.loss_scale > 1) and not nonfinite:
        return
    raise NonFiniteUpdateError(
        f"step {step + 1}: expected a finite loss and gradient, got loss {loss:g}, gradient norm {norm:g}, "
        f"{nonfinite:.0f} non-finite log-probs. The weights are those before this update. Check ratio and entropy of "
        "the previous steps, or lower optimizer.lr"
    )


def mean_of(updates: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the updates that have it. Take the maximum of maxima and the sum of counts.
    Leave out the infinite gradient norms of skipped updates.
    """
    table = list(updates)
    combined: dict[str, float] = {}
    for key in dict.fromkeys(key for metrics in table for key in metrics):
        values = [metrics[key] for metrics in table if key in metrics]
        if key.endswith("grad_norm"):
            values = [value for value in values if math.isfinite(value)] or values
        if key.endswith("_max"):
            combined[key] = max(values)
        else:
            total = sum(values)
            combined[key] = total if key in COUNTS or key.endswith("skipped_updates") else total / len(values)
    return combined
