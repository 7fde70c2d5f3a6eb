"""The critic: values of positions, and the clipped loss that it learns by.

With V a value, V_old that before the step's updates and R the return, a token's loss is

    ½ max((V − R)², (clip(V, V_old − c, V_old + c) − R)²)        Schulman et al. 2017's code; Ouyang et al. 2022

divided by the tokens of the whole mini-batch, as a token-mean policy loss is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dapo_runner.algorithms.mini_batch import MiniBatch, NonFiniteUpdateError
from dapo_runner.algorithms.schedule import learning_rate
from dapo_runner.algorithms.weights import MasterWeights, Part, make_optimizer
from dapo_runner.config import Config
from dapo_runner.parallel.sharding import add_up_over_replicas, whole, whole_until_backward
from dapo_runner.parallel.ulysses import gather_positions, own_positions
from dapo_runner.policy.model import Policy
from dapo_runner.policy.value_head import ValueHead
from dapo_runner.types import PackedBatch


class ValueLoss(NamedTuple):
    """Sums over the tokens that train, 0-d: the loss with its gradient, and how many the clip holds back."""

    loss: Tensor
    clipped: Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> ValueLoss:
    """Of float32 [T]; ``mask`` bool [T]. What is masked may hold anything."""
    error = (values - returns).masked_fill(~mask, 0.0).square()
    if clip is None:
        return ValueLoss(0.5 * error.sum(), torch.zeros_like(error).sum())
    held = (old_values + (values - old_values).clamp(-clip, clip) - returns).masked_fill(~mask, 0.0).square()
    outside = (values - old_values).abs() > clip  # inside, held differs from error by a rounding
    return ValueLoss(0.5 * torch.maximum(error, held).sum(), (outside & (held > error)).sum())


class Critic:
    """A model with a value head that trains on its own; ``shared``: the head on a policy, which trains with it."""

    def __init__(self, model: Policy, config: Config) -> None:
        assert config.critic is not None
        self.model, self.config, self.settings = model, config, config.critic
        self.world, self.shared = model.world, config.critic.share_trunk
        self._seen: list[ValueLoss] = []  # of the mini-batch under way
        if not self.shared:
            self.master = MasterWeights(model.model)
            self.optimizer = make_optimizer(self.master, config.optimizer)

    @property
    def head(self) -> ValueHead:
        head = self.model.model.value_head
        assert isinstance(head, ValueHead)
        return head

    def parts(self) -> list[Part]:
        if self.shared:
            return []
        return [Part("critic.", self.master.tensors, self.master.publish, self.optimizer)]

    @torch.no_grad()
    def values(self, batch: PackedBatch) -> Tensor:
        """Of every position, float32 [T]. Collective."""
        own: Tensor = self.model.run(lambda: self.head(self.model.hidden_states(batch)))
        return gather_positions(own, self.world.sequence_group)

    def term(self, hidden: Tensor, batch: PackedBatch, mini: MiniBatch) -> Tensor:
        """What the loss of a policy on the same trunk takes along for a micro-batch, given its hidden states."""
        return self.settings.coef * self._loss(hidden, batch, mini)

    def _loss(self, hidden: Tensor, batch: PackedBatch, mini: MiniBatch) -> Tensor:
        """Of this rank's positions; FSDP2 takes the mean over ranks, which the denominator makes a sum."""
        assert batch.values is not None
        assert batch.returns is not None
        group = self.world.sequence_group
        old_values, returns, mask = (
            own_positions(tensor, group).to(hidden.device) for tensor in (batch.values, batch.returns, batch.mask)
        )
        found = value_loss(self.head(hidden), old_values, returns, mask, self.settings.clip)
        self._seen.append(ValueLoss(found.loss.detach(), found.clipped))
        return found.loss * (self.world.size / mini.n_tokens)

    def update(self, mini: MiniBatch, step: int) -> dict[str, float]:
        """Take one optimizer step of a critic of its own. Raises NonFiniteUpdateError."""
        rate = learning_rate(self.config, step) * self.settings.lr / self.config.optimizer.lr
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with whole_until_backward(self.model.root, not self.config.parallel.reshard_after_forward):
            for index, batch in enumerate(mini.micro_batches):
                add_up_over_replicas(self.model.root, index == len(mini.micro_batches) - 1)
                self._backward(batch, mini)
        clip = self.config.optimizer.grad_clip
        total = torch.nn.utils.clip_grad_norm_(self.master.gradients(), math.inf if clip is None else clip)
        norm = float(whole(total))
        if not math.isfinite(norm):
            raise NonFiniteUpdateError(
                f"step {step + 1}: expected a finite gradient of the critic, got norm {norm:g}; its weights are "
                "those before this update. A lower critic.lr is the usual cure",
                mini,
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.master.publish()
        return {**self.figures(mini), "value_grad_norm": norm, "value_lr": rate}

    def _backward(self, batch: PackedBatch, mini: MiniBatch) -> None:
        loss: Tensor = self.model.run(lambda: self._loss(self.model.hidden_states(batch), batch, mini))
        loss.backward()

    def figures(self, mini: MiniBatch) -> dict[str, float]:
        """Of the last pass over a mini-batch, over all ranks: means over its tokens. Collective."""
        own = [float(sum(column)) for column in zip(*self._seen, strict=True)] or [0.0, 0.0]
        self._seen = []
        loss, clipped = (sum(column) for column in zip(*self.world.all_gather_object(own), strict=True))
        return {"value_loss": loss / mini.n_tokens, "value_clip": clipped / mini.n_tokens}
