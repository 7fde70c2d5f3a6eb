"""The update: old log-probs, the fused loss over packed micro-batches, AdamW.

Every sum is divided by the count of the whole mini-batch, never by a micro-batch's own: how a mini-batch is
split and packed does not change its gradient.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dapo_kernels import linear_dapo_loss, linear_token_logprobs, policy_loss, reduce_metrics
from dapo_kernels.logprobs import TokenStats
from dapo_kernels.losses import LossOutput
from dapo_kernels.metrics import COUNTS
from dapo_kernels.preference import PreferenceOutput
from dapo_runner.algorithms.correction import Mismatch, measure
from dapo_runner.algorithms.mini_batch import MiniBatch, NonFiniteUpdateError, positions_of, sampling_mask_of
from dapo_runner.algorithms.objective import resolve_objective, uses_reference
from dapo_runner.algorithms.packing import Share, split_mini_batches
from dapo_runner.algorithms.reference import MovingReference
from dapo_runner.algorithms.schedule import learning_rate
from dapo_runner.algorithms.selection import Scores, select_tokens
from dapo_runner.algorithms.token_values import TokenValues, token_values
from dapo_runner.algorithms.weights import MasterWeights, Part, make_optimizer
from dapo_runner.config import Config
from dapo_runner.parallel.sharding import add_up_over_replicas, whole, whole_until_backward
from dapo_runner.parallel.ulysses import gather_positions, own_positions
from dapo_runner.parallel.world import SINGLE_PROCESS, World
from dapo_runner.policy.lora import adapters_off, has_adapters
from dapo_runner.policy.model import Policy
from dapo_runner.timing import StepClock
from dapo_runner.types import PackedBatch
from dapo_runner.types import Sequence as TrainingSequence

Loss = LossOutput | PreferenceOutput


class Learner:
    """Owns the optimizer of a policy. ``step`` is the rollout step that the learning rate goes by.

    ``reference`` is what a KL penalty refers to; a policy with adapters is its own, with them switched off. ``clock``
    is told which part of an update is under way. ``token_values`` has, under `logging.rollouts.per_token`, what the
    updates of the step made of single tokens, by the place of their sequence in the step.
    """

    def __init__(
        self, policy: Policy, config: Config, reference: Policy | None = None, clock: StepClock | None = None
    ) -> None:
        self.policy = policy
        self.world = policy.world
        self.config = config
        self.clock = clock if clock is not None else StepClock()
        self.objective = resolve_objective(config)
        self.reference = reference
        self.token_values: dict[int, TokenValues] = {}
        if uses_reference(config) and reference is None and not has_adapters(policy.model):
            raise ValueError("Learner: a KL penalty, or a preference loss, needs a reference policy, got none")
        # Whether a token's loss needs nothing of other tokens: ranks that share positions then need nothing either.
        self.by_token = self.objective.per_sequence is None
        world, text = self.world, policy.model.config.get_text_config(decoder=True)
        self.share = Share(world.data_rank, world.data_size, world.layout.sequence, text.hidden_size)
        self.master = MasterWeights(policy.model)
        self.optimizer = make_optimizer(self.master, config.optimizer)
        self.moving: MovingReference | None = None
        if config.loss.reference_ema is not None and reference is not None:
            self.moving = MovingReference(reference.model, self.master.tensors, config.loss.reference_ema)
        # What a critic on the policy's trunk adds to the loss of a micro-batch, of its hidden states.
        self.value_term: Callable[[Tensor, PackedBatch, MiniBatch], Tensor] | None = None

    def prepare(self, sequences: Sequence[TrainingSequence]) -> list[MiniBatch]:
        """The mini-batches of a step, packed, with the log-probs of the policy as it is now, before any
        update.
        """
        self.token_values = {}
        with self.clock.phase("pack"):
            size = self._part_size(len(sequences))
            minis = [
                self._mini_batch(part, number, number * size)
                for number, part in enumerate(split_mini_batches(sequences, size))
            ]
        for mini in minis:
            self._take_logprobs(mini)
        return [mini for mini in minis if mini.micro_batches]

    def _mini_batch(self, part: Sequence[TrainingSequence], number: int, first: int) -> MiniBatch:
        return MiniBatch(part, self.config.optimizer.token_budget, self.objective, number, first, self.share)

    def _take_logprobs(self, mini: MiniBatch) -> None:
        """What its loss compares the policy with."""
        correction = self.config.rollout.correction
        unknown = self.world.any(any(bool(batch.old_logprobs.isnan().any()) for batch in mini.micro_batches))
        of_engine, experts = self.config.loss.old_logprobs == "rollout", self.policy.chosen_experts
        if not of_engine:
            # The first update's forward pass gives the old log-probs as well; a correction wants them before it.
            asked = correction.enabled or self.config.reward.kl or self.objective.max_old_prob is not None
            mini.on_policy = mini.number == 0 and not asked and not unknown
        if unknown or not (of_engine or mini.on_policy):
            with self.clock.phase("old_logprobs"):
                chosen = (lambda: None) if of_engine else experts
                mini.take_old_logprobs(self.logprobs, correction, chosen, of_engine=of_engine)
        if uses_reference(self.config):
            with self.clock.phase("ref_logprobs"):
                mini.take_ref_logprobs(self.ref_logprobs)

    def _part_size(self, n_sequences: int) -> int:
        """Mini-batches of at most the configured size and as equal as they can be: a step that dynamic
        sampling left short must not end in an update made from the few responses that were left over. Without a
        size one, also where trees of earlier steps make the step larger than its own responses.
        """
        if self.config.optimizer.mini_batch_size is None:
            return max(1, n_sequences)
        n_parts = max(1, -(-n_sequences // self.config.mini_batch_size))
        return max(1, -(-n_sequences // n_parts))

    def follow(self) -> None:
        """Once the policy has taken the updates of a step: a reference that moves does."""
        if self.moving is not None:
            self.moving.follow()

    def parts(self) -> list[Part]:
        """All that a checkpoint holds beside model, adapters and the sampler."""
        master = self.master
        parts = [Part("", master.tensors, master.publish, self.optimizer)]
        if self.moving is not None:
            parts.append(Part("reference.", self.moving.tensors, self.moving.publish))
        return parts

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """Log-probs of the targets under the policy, float32 [T] on its device; 0 where the mask is False."""
        return self._stats(self.policy, batch).logprobs

    def ref_logprobs(self, batch: PackedBatch) -> Tensor:
        """The same under the reference policy."""
        if self.reference is not None:
            return self._stats(self.reference, batch).logprobs
        with adapters_off(self.policy.model):
            return self._stats(self.policy, batch.without_experts()).logprobs

    @torch.no_grad()
    def _stats(self, policy: Policy, batch: PackedBatch, entropy: bool = False) -> TokenStats:
        logprobs, entropies = policy.run(lambda: self._own_stats(policy, batch, entropy))
        group = policy.world.sequence_group
        return TokenStats(
            gather_positions(logprobs, group), None if entropies is None else gather_positions(entropies, group)
        )

    def _own_stats(self, policy: Policy, batch: PackedBatch, entropy: bool) -> TokenStats:
        """Of this rank's positions, differentiable."""
        own, head = positions_of(batch, policy), policy.head
        return linear_token_logprobs(
            policy.hidden_states(batch),
            head.weight,
            own["target_ids"],
            bias=head.bias,
            lora=head.lora,
            softcap=head.softcap,
            temperature=self.config.rollout.temperature,
            sampling_mask=sampling_mask_of(batch, policy),
            mask=own["mask"],
            entropy=entropy,
        )

    def update(self, mini: MiniBatch, step: int) -> dict[str, float]:
        """One optimizer step; returns the means of its metrics, and completes ``mini.mismatch``. Raises
        NonFiniteUpdateError.
        """
        rate = learning_rate(self.config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        outs = []
        with self.clock.phase("forward_backward"):
            selections = self._selections(mini, step)
            with whole_until_backward(self.policy.root, not self.config.parallel.reshard_after_forward):
                for place, selection in enumerate(selections):
                    add_up_over_replicas(self.policy.root, place == len(mini.micro_batches) - 1)
                    outs.append(self._forward_backward(mini.micro_batches[place], mini, selection))
        with self.clock.phase("optimizer"):
            clip = self.config.optimizer.grad_clip
            norm = torch.nn.utils.clip_grad_norm_(self.master.gradients(), float("inf") if clip is None else clip)
        figures = self._figures(outs, whole(norm), rate)
        if mini.number == 0 and not mini.mismatch.tokens:
            for batch, out in zip(mini.micro_batches, outs, strict=True):
                mini.mismatch += measure(out.logprobs.to(batch.mask.device), batch.old_logprobs, batch.mask)
        self._check_finite(figures, step, mini)
        if self.config.logging.rollouts.per_token:
            self._look_at_tokens(mini, outs, selections)
        with self.clock.phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.master.publish()
        return figures

    def _selections(self, mini: MiniBatch, step: int) -> Sequence[Tensor | None]:
        """For each micro-batch, the tokens that the objective selects by a look at the whole mini-batch."""
        batches = mini.micro_batches
        if self.objective.batch_selection is None:
            return [None] * len(batches)
        own = []
        for batch in batches:
            stats = self._stats(self.policy, batch, entropy=True)
            assert stats.entropy is not None
            own.append((batch.without_experts(), Scores(stats.logprobs, stats.entropy)))
        # Lots of its own for every update, the same ones after a resume.
        seed = random.Random(f"{self.config.run.seed}:{step}:{mini.number}").getrandbits(63)
        device = self.policy.device
        generator = torch.Generator(device).manual_seed(seed)
        parts = self.world.all_gather_object(
            own if self.world.is_single_process else [(b.to("cpu"), s.to("cpu")) for b, s in own]
        )
        parts = parts[:: self.world.layout.sequence]
        everywhere = [pair for part in parts for pair in part]
        chosen = select_tokens(
            self.objective,
            [batch for batch, _ in everywhere],
            [scores.to(device) for _, scores in everywhere],
            generator,
            on_policy=mini.on_policy,
        )
        first = self.world.data_rank * len(batches)  # every rank has as many
        return chosen[first : first + len(batches)]

    def _look_at_tokens(self, mini: MiniBatch, outs: Sequence[Loss], selections: Sequence[Tensor | None]) -> None:
        looked_at = []
        for batch, out, selection in zip(mini.micro_batches, outs, selections, strict=True):
            assert out.entropy is not None
            chosen = None if selection is None else selection.cpu()
            looked_at.append((batch.without_experts().to("cpu"), Scores(out.logprobs, out.entropy).to("cpu"), chosen))
        parts = self.world.all_gather_object(looked_at)[:: self.world.layout.sequence]
        batches, scores, chosen_tokens = zip(*(one for part in parts for one in part), strict=True)
        groups = self.config.logging.rollouts.groups
        values = token_values(self.objective, batches, scores, chosen_tokens, on_policy=mini.on_policy, groups=groups)
        self.token_values |= {mini.first + index: found for index, found in values.items()}

    def _forward_backward(self, batch: PackedBatch, mini: MiniBatch, selection: Tensor | None = None) -> Loss:
        out = self.loss(batch, mini, selection)
        out.loss.backward()
        return out

    def loss(self, batch: PackedBatch, mini: MiniBatch, selection: Tensor | None = None) -> Loss:
        """Of one micro-batch of ``mini``. Collective."""
        return self.policy.run(lambda: self._loss(batch, mini, selection))

    def _loss(self, batch: PackedBatch, mini: MiniBatch, selection: Tensor | None) -> Loss:
        """Of one micro-batch, or of this rank's positions of it; FSDP2 takes the mean over ranks, which the denominator
        makes a sum.
        """
        group, head = self.policy.world.sequence_group, self.policy.head
        options: dict[str, Any] = {"objective": self.objective, "denominator": mini.denominator / self.world.size}
        if group is not None and not self.by_token:
            # A ratio or a mean over a sequence wants all of its positions: log-probs travel, hidden states do not.
            logprobs, entropy = self._own_stats(self.policy, batch, entropy=True)
            assert entropy is not None
            every = positions_of(batch, self.policy, own=False)
            return policy_loss(
                gather_positions(logprobs, group),
                None if mini.on_policy and not batch.stale else every["old_logprobs"],
                every["advantages"],
                entropy=gather_positions(entropy, group),
                cu_seqlens=batch.cu_seqlens.to(self.policy.device),
                selection=selection,
                **options,
                **_given(every),
            )
        own, hidden = positions_of(batch, self.policy), self.policy.hidden_states(batch)
        out = linear_dapo_loss(
            hidden,
            head.weight,
            own["target_ids"],
            None if mini.on_policy and not batch.stale else own["old_logprobs"],
            own["advantages"],
            bias=head.bias,
            lora=head.lora,
            softcap=head.softcap,
            cu_seqlens=batch.cu_seqlens.to(self.policy.device) if group is None else None,
            selection=None if selection is None else own_positions(selection, group),
            temperature=self.config.rollout.temperature,
            sampling_mask=sampling_mask_of(batch, self.policy),
            entropy=True,
            **options,
            **_given(own),
        )
        if self.value_term is not None:
            out = out._replace(loss=out.loss + self.value_term(hidden, batch, mini))
        assert out.entropy is not None
        return out._replace(
            logprobs=gather_positions(out.logprobs, group), entropy=gather_positions(out.entropy, group)
        )

    def _figures(self, outs: Sequence[Loss], norm: Tensor, rate: float) -> dict[str, float]:
        """Of an update, over the micro-batches of all ranks."""
        loss_sum, grad_norm = torch.stack([torch.stack([out.loss.detach() for out in outs]).sum(), norm]).tolist()
        # Ranks that share positions have a part of the loss each, or all of them the same.
        counts = self.by_token or self.world.sequence_rank == 0
        loss = math.fsum(self.world.all_gather_object(loss_sum if counts else 0.0)) / self.world.size
        metrics = reduce_metrics([out.metrics for out in outs] if counts else [])
        return {"loss": loss, "grad_norm": grad_norm, "lr": rate, **metrics}

    def _check_finite(self, figures: dict[str, float], step: int, mini: MiniBatch) -> None:
        loss, norm, nonfinite = figures["loss"], figures["grad_norm"], figures["nonfinite"]
        if math.isfinite(loss) and math.isfinite(norm) and not nonfinite:
            return
        raise NonFiniteUpdateError(
            f"step {step + 1}: expected a finite loss and gradient, got loss {loss:g}, gradient norm {norm:g}, "
            f"{nonfinite:.0f} tokens with a log-prob that is not finite; the weights are those before this "
            "update. Look at the ratio and the entropy of the steps before; a lower optimizer.lr is the usual cure",
            mini,
        )


def _given(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: tensors.get(name) for name in ("mask", "ref_logprobs", "importance_weights")}


def step_figures(
    minis: Iterable[MiniBatch], updates: Sequence[dict[str, float]], world: World = SINGLE_PROCESS
) -> dict[str, float]:
    """``mean_of`` the updates and their count; learner against engine over all measured tokens of the step."""
    own = sum((mini.mismatch for mini in minis), Mismatch())
    mismatch = sum(world.all_gather_object(own)[:: world.layout.sequence], Mismatch())
    return mean_of(updates) | mismatch.figures() | {"updates": len(updates)}


def mean_of(updates: Iterable[dict[str, float]]) -> dict[str, float]:
    """The figures of a step: means over the updates that have them, but the largest of maxima and the sum of counts."""
    table = list(updates)
    combined: dict[str, float] = {}
    for key in dict.fromkeys(key for figures in table for key in figures):
        values = [figures[key] for figures in table if key in figures]
        if key.endswith("_max"):
            combined[key] = max(values)
        else:
            total = sum(values)
            combined[key] = total if key in COUNTS else total / len(values)
    return combined
