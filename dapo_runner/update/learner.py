"""The update: old log-probs, the fused loss over packed micro-batches, AdamW.

Every sum is divided by the count of the whole mini-batch, never by a micro-batch's own: how a mini-batch is
split and packed does not change its gradient.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dapo_kernels import Objective, linear_dapo_loss, linear_token_logprobs, objectives, summarize
from dapo_kernels.logprobs import TokenStats
from dapo_kernels.losses import LossOutput
from dapo_kernels.metrics import COUNTS
from dapo_runner.config import Config, ConfigError, CorrectionConfig
from dapo_runner.policy.lora import adapters_off, has_adapters
from dapo_runner.policy.model import Policy
from dapo_runner.timing import StepClock
from dapo_runner.types import PackedBatch
from dapo_runner.types import Sequence as TrainingSequence
from dapo_runner.update import schedule
from dapo_runner.update.correction import Mismatch, correct, measure
from dapo_runner.update.packing import count_training_tokens, pack, split_mini_batches
from dapo_runner.update.selection import Scores, select_tokens


class NonFiniteUpdateError(RuntimeError):
    """A loss or gradient that is not a number. Raised before the weights are touched; ``mini`` is what did it."""

    def __init__(self, message: str, mini: MiniBatch) -> None:
        super().__init__(message)
        self.mini = mini


class MiniBatch:
    """Packed micro-batches that make one update, and the count that all of them are divided by.

    ``mismatch``: learner against engine on the training tokens, before any update of the step. It stays at the
    rounding of the two unless the engine sampled from other weights: groups carried over, or an update that never
    arrived. Empty where nobody asked the learner before an update.
    ``on_policy``: the policy of the update is the one before the step, so its own log-probs are the old ones; but for
    micro-batches that an earlier step sampled, whose old ones are the engine's, from when it sampled them.
    """

    def __init__(
        self, sequences: Sequence[TrainingSequence], token_budget: int, objective: Objective, number: int = 0
    ) -> None:
        """``number`` counts the mini-batches of a step."""
        self.number = number
        self.micro_batches = pack(sequences, token_budget)
        self.n_tokens = count_training_tokens(sequences)
        n_live = sum(bool(sequence.mask[1:].any()) for sequence in sequences)
        self.denominator = self.n_tokens if objective.aggregate == "token-mean" else n_live
        self.mismatch = Mismatch()
        self.on_policy = False

    def take_old_logprobs(self, logprobs: Callable[[PackedBatch], Tensor], correction: CorrectionConfig) -> None:
        """Let ``logprobs(micro-batch)``, float32 [T], be what its ratios are taken against.

        Where an earlier step sampled it, the ratio is that to the policy which did, as long as no importance weight
        holds that already.
        """
        replaced = []
        for batch in self.micro_batches:
            engine = batch.old_logprobs
            old = logprobs(batch).to(engine.device)
            weights = correct(old, engine, batch.mask, batch.cu_seqlens, correction)
            self.mismatch += measure(old, engine, batch.mask, weights)
            if batch.stale and correction.weights is None:
                old = engine
            replaced.append(batch.with_old_logprobs(old, weights))
        self.micro_batches = replaced

    def take_ref_logprobs(self, logprobs: Callable[[PackedBatch], Tensor]) -> None:
        """Let ``logprobs(micro-batch)``, float32 [T], be what its KL penalty refers to."""
        self.micro_batches = [
            batch.with_ref_logprobs(logprobs(batch).to(batch.old_logprobs.device)) for batch in self.micro_batches
        ]


class Learner:
    """Owns the optimizer of a policy. ``step`` is the rollout step that the learning rate goes by.

    ``reference`` is what a KL penalty refers to; a policy with adapters is its own, with them switched off. ``clock``
    is told which part of an update is under way.
    """

    def __init__(
        self, policy: Policy, config: Config, reference: Policy | None = None, clock: StepClock | None = None
    ) -> None:
        self.policy = policy
        self.config = config
        self.clock = clock if clock is not None else StepClock()
        self.objective = resolve_objective(config)
        self.reference = reference
        if self.objective.kl_coef != 0 and reference is None and not has_adapters(policy.model):
            raise ValueError(f"Learner: kl_coef={self.objective.kl_coef:g} needs a reference policy, got none")
        self.master = MasterWeights(policy.model)
        settings = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.master.tensors.values(),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def prepare(self, sequences: Sequence[TrainingSequence]) -> list[MiniBatch]:
        """The mini-batches of a step, packed, with the log-probs of the policy as it is now, before any
        update.
        """
        with self.clock.phase("pack"):
            minis = [
                MiniBatch(part, self.config.optimizer.token_budget, self.objective, number)
                for number, part in enumerate(split_mini_batches(sequences, self._part_size(len(sequences))))
            ]
        correction = self.config.rollout.correction
        for mini in minis:
            if self.config.loss.old_logprobs == "learner":
                # The first update's forward pass gives the old log-probs as well; a correction wants them before it.
                mini.on_policy = mini.number == 0 and not correction.enabled and self.objective.max_old_prob is None
                if not mini.on_policy:
                    with self.clock.phase("old_logprobs"):
                        mini.take_old_logprobs(self.logprobs, correction)
            if self.objective.kl_coef != 0:
                with self.clock.phase("ref_logprobs"):
                    mini.take_ref_logprobs(self.ref_logprobs)
        return [mini for mini in minis if mini.micro_batches]

    def _part_size(self, n_sequences: int) -> int:
        """Mini-batches of at most the configured size and as equal as they can be: a step that dynamic
        sampling left short must not end in an update made from the few responses that were left over.
        """
        n_parts = max(1, -(-n_sequences // self.config.mini_batch_size))
        return max(1, -(-n_sequences // n_parts))

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """Log-probs of the targets under the policy, float32 [T] on its device; 0 where the mask is False."""
        return self._stats(self.policy, batch).logprobs

    def ref_logprobs(self, batch: PackedBatch) -> Tensor:
        """The same under the reference policy."""
        if self.reference is not None:
            return self._stats(self.reference, batch).logprobs
        with adapters_off(self.policy.model):
            return self._stats(self.policy, batch).logprobs

    @torch.no_grad()
    def _stats(self, policy: Policy, batch: PackedBatch, entropy: bool = False) -> TokenStats:
        hidden, head, device = policy.hidden_states(batch), policy.head, policy.device
        return linear_token_logprobs(
            hidden,
            head.weight,
            batch.target_ids.to(device),
            bias=head.bias,
            softcap=head.softcap,
            temperature=self.config.rollout.temperature,
            mask=batch.mask.to(device),
            entropy=entropy,
            chunk_bytes=self.config.loss.chunk_bytes,
        )

    def update(self, mini: MiniBatch, step: int) -> dict[str, float]:
        """One optimizer step; returns the means of its metrics, and completes ``mini.mismatch``. Raises
        NonFiniteUpdateError.
        """
        learning_rate = schedule.learning_rate(self.config, step, mini.number)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        metrics, losses, logprobs = [], [], []
        with self.clock.phase("forward_backward"):
            for batch, selection in zip(mini.micro_batches, self._selections(mini, step), strict=True):
                out = self._forward_backward(batch, mini, selection)
                metrics.append(out.metrics)
                losses.append(out.loss.detach())
                logprobs.append(out.logprobs)
        with self.clock.phase("optimizer"):
            clip = self.config.optimizer.grad_clip
            norm = torch.nn.utils.clip_grad_norm_(self.master.gradients(), float("inf") if clip is None else clip)
        loss_sum, grad_norm = torch.stack([torch.stack(losses).sum(), norm.to(losses[0])]).tolist()
        figures = {"loss": loss_sum, "grad_norm": grad_norm, "lr": learning_rate, **summarize(metrics)}
        if mini.number == 0 and not mini.mismatch.tokens:
            for batch, own in zip(mini.micro_batches, logprobs, strict=True):
                mini.mismatch += measure(own.to(batch.mask.device), batch.old_logprobs, batch.mask)
        self._check_finite(figures, step, mini)
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
        scores = []
        for batch in batches:
            stats = self._stats(self.policy, batch, entropy=True)
            assert stats.entropy is not None
            scores.append(Scores(stats.logprobs, stats.entropy))
        # Lots of its own for every update, the same ones after a resume.
        seed = random.Random(f"{self.config.run.seed}:{step}:{mini.number}").getrandbits(63)
        generator = torch.Generator(self.policy.device).manual_seed(seed)
        return select_tokens(self.objective, batches, scores, generator, on_policy=mini.on_policy)

    def _forward_backward(self, batch: PackedBatch, mini: MiniBatch, selection: Tensor | None = None) -> LossOutput:
        hidden, head = self.policy.hidden_states(batch), self.policy.head
        moved = batch.to(self.policy.device)
        out = linear_dapo_loss(
            hidden,
            head.weight,
            moved.target_ids,
            None if mini.on_policy and not batch.stale else moved.old_logprobs,
            moved.advantages,
            bias=head.bias,
            softcap=head.softcap,
            chunk_bytes=self.config.loss.chunk_bytes,
            objective=self.objective,
            mask=moved.mask,
            cu_seqlens=moved.cu_seqlens,
            ref_logprobs=moved.ref_logprobs,
            importance_weights=moved.importance_weights,
            selection=selection,
            temperature=self.config.rollout.temperature,
            denominator=float(mini.denominator),
            entropy=True,
        )
        out.loss.backward()
        return out

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


class MasterWeights:
    """Float32 copies of half-precision parameters, with gradients added up in float32.

    AdamW at the learning rates of RL moves a bfloat16 weight by less than its rounding, and micro-batch
    gradients added up in bfloat16 depend on their order. For float32 parameters this is the parameters
    themselves.
    """

    def __init__(self, model: Any) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.copied = {name: p for name, p in trained.items() if p.dtype != torch.float32}
        self.tensors: dict[str, Tensor] = {
            name: p.detach().float().requires_grad_() if name in self.copied else p for name, p in trained.items()
        }
        for name, parameter in self.copied.items():
            parameter.register_post_accumulate_grad_hook(_Collect(self.tensors[name]))

    def gradients(self) -> list[Tensor]:
        """The parameters whose gradients a mini-batch has filled."""
        return [tensor for tensor in self.tensors.values() if tensor.grad is not None]

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        for name, parameter in self.copied.items():
            parameter.copy_(self.tensors[name])


class _Collect:
    """Moves a parameter's gradient into its master's as soon as the backward pass has made it."""

    def __init__(self, master: Tensor) -> None:
        self.master = master

    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        self.master.grad = gradient if self.master.grad is None else self.master.grad.add_(gradient)
        parameter.grad = None


def resolve_objective(config: Config) -> Objective:
    """The objective the configuration names, with its overrides. Raises ConfigError where it cannot be
    trained here.
    """
    loss = config.loss
    try:
        objective = objectives.resolve_objective("loss", loss.objective, loss.overrides)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if objective.aggregate == "seq-mean-token-sum-norm" and objective.length_norm is None:
        objective = replace(objective, length_norm=float(config.rollout.max_response_tokens))
    if objective.kl_coef == 0 and loss.reference is not None:
        raise ConfigError(
            f"loss.reference: {loss.objective!r} has no KL penalty, so {loss.reference!r} would go unused; set "
            "loss.overrides.kl_coef, or leave the reference out"
        )
    return objective


def step_figures(minis: Iterable[MiniBatch], updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """``mean_of`` the updates and their count; learner against engine over all measured tokens of the step."""
    mismatch = sum((mini.mismatch for mini in minis), Mismatch())
    return mean_of(updates) | mismatch.figures() | {"updates": len(updates)}


def mean_of(updates: Iterable[dict[str, float]]) -> dict[str, float]:
    """The figures of a step: means over its updates, but the largest of maxima and the sum of counts."""
    table = list(updates)
    combined: dict[str, float] = {}
    for key in table[0] if table else ():
        values = [figures[key] for figures in table if key in figures]
        if key.endswith("_max"):
            combined[key] = max(values)
        else:
            total = sum(values)
            combined[key] = total if key in COUNTS else total / len(values)
    return combined
