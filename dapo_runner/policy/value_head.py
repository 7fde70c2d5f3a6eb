"""A value head on a causal language model: for every position, the value of the tokens up to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NAME = "value_head"  # the attribute of the model that it is


class ValueHead(nn.Module):
    """hidden [T, H] → values float32 [T]. Its weights are zeros at first."""

    def __init__(self, hidden_size: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.float() @ self.weight.float()


def add_value_head(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Add a value head to a model. It is sharded, trained and clipped with it; engines do not get it."""
    setattr(model, NAME, ValueHead(model.config.get_text_config(decoder=True).hidden_size, device, dtype))


def is_of_value_head(name: str) -> bool:
    """Return whether a parameter's name is one of the value head."""
    return name.startswith(f"{NAME}.")
