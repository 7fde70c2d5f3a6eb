"""The weights that are trained: float32 masters, optimizer and learning rate, and how a checkpoint holds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dapo_runner.config import Config, ConfigError
from dapo_runner.parallel.sharding import add_up_over_replicas, whole, whole_until_backward
from dapo_runner.policy.model import Policy


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
        """Return the parameters whose gradients a mini-batch has filled."""
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


class TrainedModel:
    """A model, its master weights and the optimizer that moves them."""

    def __init__(self, model: Policy, config: Config) -> None:
        self.model, self.config = model, config
        self.master = MasterWeights(model.model)
        settings = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.master.tensors.values(),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def accumulate_gradients(self, n_micro_batches: int, compute_loss: Callable[[int], Tensor]) -> None:
        """Add up the gradients of ``compute_loss(index)`` over the micro-batches."""
        root = self.model.root
        with whole_until_backward(root, not self.config.parallel.reshard_after_forward):
            for index in range(n_micro_batches):
                add_up_over_replicas(root, index == n_micro_batches - 1)
                compute_loss(index).backward()

    def clip_gradients(self) -> Tensor:
        """Clip the gradients to `optimizer.grad_clip`, and return their norm from before."""
        limit = self.config.optimizer.grad_clip
        return whole(torch.nn.utils.clip_grad_norm_(self.master.gradients(), float("inf") if limit is None else limit))

    def step(self, rate: float) -> None:
        """Move the weights at a learning rate, and forget the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.master.publish()


class MovingReference:
    """A reference that follows the policy: θ_ref ← α·θ_ref + (1 − α)·θ after each step (arXiv 2404.10719).

    It keeps the average in float32: in half precision a step of 1 − α of the way would be rounded away.
    """

    def __init__(self, model: Any, policy: Mapping[str, Tensor], alpha: float) -> None:
        """``policy``: its float32 weights by name, sharded as the model's. Raises ConfigError where they are others."""
        self.policy, self.alpha = policy, alpha
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        if any(name not in policy or policy[name].shape != tensor.shape for name, tensor in self.parameters.items()):
            raise ConfigError(
                "loss.reference_ema: expected a reference with the same weights as the policy, got others"
            )
        self.tensors = {
            name: p if p.dtype == torch.float32 else p.detach().float() for name, p in self.parameters.items()
        }

    @torch.no_grad()
    def follow(self) -> None:
        for name, tensor in self.tensors.items():
            tensor.mul_(self.alpha).add_(self.policy[name].detach(), alpha=1 - self.alpha)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the average into the model."""
        for name, tensor in self.tensors.items():
            if tensor is not self.parameters[name]:
                self.parameters[name].copy_(tensor)


def learning_rate(config: Config, step: int) -> float:
    """Return the rate of the updates of a rollout ``step``, counted from 0: a checkpoint need not hold it.

    Over a warm-up of w steps (at least one) it rises linearly to `lr`. From there to the last step T = `run.steps` it
    falls with x = (step + 1 − w) / (T − w + 1) and r = `min_lr_ratio`, which is reached one step after T:

        linear   lr · (r + (1 − r) · (1 − x))
        cosine   lr · (r + (1 − r) · (1 + cos πx) / 2)
    """
    settings, count = config.optimizer, step + 1
    warmup = max(settings.warmup_steps, 1)
    warmed = settings.lr * min(1.0, count / warmup)
    if settings.schedule == "constant" or count <= warmup:
        return warmed
    x = min(1.0, (count - warmup) / (config.run.steps - warmup + 1))
    shape = 1 - x if settings.schedule == "linear" else (1 + math.cos(math.pi * x)) / 2
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * shape)


class Part(NamedTuple):
    """Weights as a checkpoint has them: float32 ``tensors`` by name, each with what the optimizer keeps of it."""

    prefix: str  # of the names in a checkpoint
    tensors: dict[str, Tensor]
    publish: Callable[[], None]  # after new values
    optimizer: torch.optim.Optimizer | None = None

    def state_of(self, tensor: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {} if self.optimizer is None else self.optimizer.state.get(tensor, {})
        return state
