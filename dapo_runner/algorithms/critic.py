"""The critic: values of positions, and its clipped loss.

With V a value, V_old that before the step's updates and R the return, the loss of a token is

    ½ max((V − R)², (clip(V, V_old − c, V_old + c) − R)²)        Schulman et al. 2017's code; Ouyang et al. 2022

divided by the tokens of the whole mini-batch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dapo_runner.algorithms.mini_batch import MiniBatch, NonFiniteUpdateError
from dapo_runner.algorithms.optimizer import TrainedModel, learning_rate
from dapo_runner.config import Config
from dapo_runner.parallel.ulysses import gather_positions, shard_positions
from dapo_runner.policy.model import Policy
from dapo_runner.types import PackedBatch

SCALE_METRICS = {"loss_scale": "value_loss_scale", "skipped_updates": "value_skipped_updates"}


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return sums over the training tokens, 0-d: the differentiable loss, and the number of tokens stopped by the clip.

    Tensors are [T], ``mask`` bool. Masked positions may hold anything, also NaN.
    """
    error = (values - returns).masked_fill(~mask, 0.0).square()
    if clip is None:
        return 0.5 * error.sum(), torch.zeros_like(error).sum()
    clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).masked_fill(~mask, 0.0).square()
    outside = (values - old_values).abs() > clip  # inside, the two errors differ only by rounding
    return 0.5 * torch.maximum(error, clipped).sum(), (outside & (clipped > error)).sum()


class Critic:
    """A model with a value head and its own optimizer."""

    def __init__(self, model: Policy, config: Config) -> None:
        assert config.critic is not None
        self.model, self.config, self.settings = model, config, config.critic
        self.world, self.trained = model.world, TrainedModel(model, config, "critic.")

    @torch.no_grad()
    def add_values(self, mini: MiniBatch) -> None:
        """Compute the values of the micro-batches, float32 [T]. Collective."""
        found = [self.model.run(partial(self._local_values, batch)) for batch in mini.micro_batches]
        for index, (batch, local) in enumerate(zip(mini.micro_batches, found, strict=True)):
            values = gather_positions(local, self.world.sequence_group)
            mini.micro_batches[index] = replace(batch, values=values.cpu())

    def _local_values(self, batch: PackedBatch) -> Tensor:
        return self.model.model.value_head(self.model.hidden_states(batch))

    def update(self, mini: MiniBatch, step: int) -> dict[str, float]:
        """Take one optimizer step and return its metrics. Raises NonFiniteUpdateError."""
        rate = learning_rate(self.config, step) * self.settings.lr / self.config.optimizer.lr
        losses: list[tuple[Tensor, Tensor]] = []

        def compute_loss(index: int) -> Tensor:
            loss, clipped = self.model.run(partial(self._loss, mini.micro_batches[index]))
            losses.append((loss.detach(), clipped))
            # FSDP2 averages over ranks; the denominator turns the mean into a sum.
            return loss * (self.world.size / mini.n_tokens * mini.loss_scale)

        self.trained.accumulate_gradients(mini, compute_loss)
        norm = float(self.trained.clip_gradients())
        if not math.isfinite(norm) and mini.loss_scale <= 1:
            raise NonFiniteUpdateError(
                f"step {step + 1}: expected a finite gradient of the critic, got norm {norm:g}. The weights are those "
                "before this update. Try a lower critic.lr"
            )
        scale = {SCALE_METRICS[name]: value for name, value in self.trained.step(rate).items()}
        local = [float(sum(column)) for column in zip(*losses, strict=True)]
        loss, clipped = (sum(column) for column in zip(*self.world.all_gather_object(local), strict=True))
        means = {"value_loss": loss / mini.n_tokens, "value_clip": clipped / mini.n_tokens}
        return {**means, "value_grad_norm": norm, "value_lr": rate, **scale}

    def _loss(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        assert batch.values is not None
        assert batch.returns is not None
        values, group = self._local_values(batch), self.world.sequence_group
        old_values, returns, mask = (
            shard_positions(tensor, group).to(values.device) for tensor in (batch.values, batch.returns, batch.mask)
        )
        return value_loss(values, old_values, returns, mask, self.settings.clip)
