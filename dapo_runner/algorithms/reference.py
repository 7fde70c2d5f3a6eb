"""A reference that follows the policy: θ_ref ← α·θ_ref + (1 − α)·θ after each step (arXiv 2404.10719)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dapo_runner.config import ConfigError


class MovingReference:
    """Keeps the average in float32: in half precision a step of 1 − α of the way would be rounded away."""

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
