"""The weights that are trained: float32 masters, the optimizer over them, and how a checkpoint has both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dapo_runner.config import OptimizerConfig


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


def make_optimizer(master: MasterWeights, settings: OptimizerConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        master.tensors.values(),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


class Part(NamedTuple):
    """Weights as a checkpoint has them: float32 ``tensors`` by name, each with what the optimizer keeps of it."""

    prefix: str  # of the names in a checkpoint
    tensors: dict[str, Tensor]
    publish: Callable[[], None]  # after new values
    optimizer: torch.optim.Optimizer | None = None

    def state_of(self, tensor: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {} if self.optimizer is None else self.optimizer.state.get(tensor, {})
        return state
