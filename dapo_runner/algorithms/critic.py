"""The critic: values of positions, and its clipped loss.

With V a value, V_old that before the step's updates and R the return, the loss of a token is

    ½ max((V − R)², (clip(V, V_old − c, V_old + c) − R)²)        Schulman et al. 2017's code; Ouyang et al. 2022

divided by the tokens of the whole mini-batch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dapo_runner.algorithms.mini_batch import MiniBatch, NonFiniteUpdateError
from dapo_runner.algorithms.optimizer import TrainedModel, learning_rate
from dapo_runner.config import Config
from dapo_runner.parallel.ulysses import gather_positions, shard_positions
from dapo_runner.policy.model import Policy, ValueHead
from dapo_runner.types import PackedBatch

SCALE_METRICS = {"loss_scale": "value_loss_scale", "skipped_updates": "value_skipped_updates"}


class ValueLoss(NamedTuple):
    """Sums over the training tokens, 0-d: the differentiable loss, and the number of tokens stopped by the clip."""

    loss: Tensor
    clipped: Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> ValueLoss:
    """Return the value loss. Tensors are [T], ``mask`` bool. Masked positions may hold anything, also NaN."""
    error = (values - returns).masked_fill(~mask, 0.0).square()
    if clip is None:
        return ValueLoss(0.5 * error.sum(), torch.zeros_like(error).sum())
    clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).masked_fill(~mask, 0.0).square()
    outside = (values - old_values).abs() > clip  # inside, the two errors differ only by rounding
    return ValueLoss(0.5 * torch.maximum(error, clipped).sum(), (outside & (clipped > error)).sum())


class Critic:
    """A model with a value head and its own optimizer, or, if ``shared``, a value head on the policy."""

    def __init__(self, model: Policy, config: Config) -> None:
        assert config.critic is not None
        self.model, self.config, self.settings = model, config, config.critic
        self.world, self.shared = model.world, config.critic.share_trunk
        self.trained = None if self.shared else TrainedModel(model, config, "critic.")
        self._losses: list[ValueLoss] = []  # of the micro-batches since ``metrics``, detached

    @property
    def head(self) -> ValueHead:
        head = self.model.model.value_head
        assert isinstance(head, ValueHead)
        return head

    @torch.no_grad()
    def add_values(self, mini: MiniBatch) -> None:
        """Compute the values of the micro-batches, float32 [T]. Collective."""
        for index, batch in enumerate(mini.micro_batches):
            local = self.model.run(partial(self._local_values, batch))
            values = gather_positions(local, self.world.sequence_group)
            mini.micro_batches[index] = replace(batch, values=values.to(batch.mask.device))

    def _local_values(self, batch: PackedBatch) -> Tensor:
        return self.head(self.model.hidden_states(batch))

    def loss(self, hidden: Tensor, batch: PackedBatch, mini: MiniBatch) -> Tensor:
        """Return the loss of this rank's positions. FSDP2 averages over ranks; the denominator turns it into a sum."""
        assert batch.values is not None
        assert batch.returns is not None
        group = self.world.sequence_group
        old_values, returns, mask = (
            shard_positions(tensor, group).to(hidden.device) for tensor in (batch.values, batch.returns, batch.mask)
        )
        out = value_loss(self.head(hidden), old_values, returns, mask, self.settings.clip)
        self._losses.append(ValueLoss(out.loss.detach(), out.clipped))
        return out.loss * (self.world.size / mini.n_tokens * mini.loss_scale)

    def update(self, mini: MiniBatch, step: int) -> dict[str, float]:
        """Take one optimizer step and return its metrics. Raises NonFiniteUpdateError."""
        assert self.trained is not None
        rate = learning_rate(self.config, step) * self.settings.lr / self.config.optimizer.lr
        self.trained.accumulate_gradients(mini, partial(self._compute_loss, mini))
        norm = float(self.trained.clip_gradients())
        if not math.isfinite(norm) and mini.loss_scale <= 1:
            raise NonFiniteUpdateError(
                f"step {step + 1}: expected a finite gradient of the critic, got norm {norm:g}. The weights are those "
                "before this update. Try a lower critic.lr"
            )
        scale = {SCALE_METRICS[name]: value for name, value in self.trained.step(rate).items()}
        return {**self.metrics(mini), "value_grad_norm": norm, "value_lr": rate, **scale}

    def _compute_loss(self, mini: MiniBatch, index: int) -> Tensor:
        batch = mini.micro_batches[index]
        return self.model.run(lambda: self.loss(self.model.hidden_states(batch), batch, mini))

    def metrics(self, mini: MiniBatch) -> dict[str, float]:
        """Return the means over the tokens of the last mini-batch, over all ranks. Collective."""
        local = [float(sum(column)) for column in zip(*self._losses, strict=True)] or [0.0, 0.0]
        self._losses = []
        loss, clipped = (sum(column) for column in zip(*self.world.all_gather_object(local), strict=True))
        return {"value_loss": loss / mini.n_tokens, "value_clip": clipped / mini.n_tokens}
