"""The weights that are trained: float32 masters, optimizer and learning rate, and how a checkpoint holds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dapo_runner.config import Config, ConfigError
from dapo_runner.parallel.sharding import add_up_over_replicas, whole, whole_until_backward
from dapo_runner.policy.model import Policy


class MasterWeights:
    """Float32 copies of a model's parameters. A parameter that is float32 is its own.

    AdamW at the learning rates of RL moves a bfloat16 weight by less than its rounding. The gradients of micro-batches
    add up in float32 too, where their order does not matter. ``prefix`` begins their names in a checkpoint.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], prefix: str = "") -> None:
        self.parameters, self.prefix, self.tensors = parameters, prefix, dict[str, Tensor]()
        self.optimizer: torch.optim.Optimizer | None = None
        for name, parameter in parameters.items():
            self.tensors[name] = parameter
            if parameter.dtype != torch.float32:
                self.tensors[name] = master = parameter.detach().float().requires_grad_(parameter.requires_grad)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(partial(_collect, master))

    def state_of(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return what the optimizer keeps of a master."""
        return {} if self.optimizer is None else self.optimizer.state.get(tensor, {})

    def gradients(self) -> list[Tensor]:
        """Return the masters whose gradients a mini-batch has filled."""
        return [tensor for tensor in self.tensors.values() if tensor.grad is not None]

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        for name, parameter in self.parameters.items():
            if self.tensors[name] is not parameter:
                parameter.copy_(self.tensors[name])


def _collect(master: Tensor, parameter: Tensor) -> None:
    """Move a parameter's gradient to its master as soon as the backward pass has made it."""
    assert parameter.grad is not None
    gradient = parameter.grad.float()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    parameter.grad = None


class TrainedModel:
    """A model, its master weights and the optimizer that moves them."""

    def __init__(self, model: Policy, config: Config, prefix: str = "") -> None:
        self.model, self.config = model, config
        self.master = MasterWeights({name: p for name, p in model.model.named_parameters() if p.requires_grad}, prefix)
        settings = config.optimizer
        self.optimizer = self.master.optimizer = torch.optim.AdamW(
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
        """Update the weights at a learning rate, and drop the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.master.publish()


class MovingReference(MasterWeights):
    """A reference that follows the policy: θ_ref ← α·θ_ref + (1 − α)·θ after each step (arXiv 2404.10719).

    It keeps the average in float32: in half precision a step of 1 − α of the way would be rounded away.
    """

    def __init__(self, model: Any, policy: Mapping[str, Tensor], alpha: float) -> None:
        """``policy``: its float32 weights by name, sharded as the model's. Raises ConfigError where they differ."""
        super().__init__(dict(model.named_parameters()), "reference.")
        self.policy, self.alpha = policy, alpha
        if any(name not in policy or policy[name].shape != tensor.shape for name, tensor in self.tensors.items()):
            raise ConfigError("loss.reference_ema: requires a reference with the same weights as the policy")

    @torch.no_grad()
    def follow(self) -> None:
        for name, tensor in self.tensors.items():
            tensor.mul_(self.alpha).add_(self.policy[name].detach(), alpha=1 - self.alpha)
        self.publish()


def learning_rate(config: Config, step: int) -> float:
    """Return the rate of the updates of a rollout ``step``, counted from 0.

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
