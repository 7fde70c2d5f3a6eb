"""A critic's head on a causal language model: for every position the value of what lies before its target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NAME = "value_head"  # the attribute of the model that it is


class ValueHead(nn.Module):
    """hidden [T, H] → values float32 [T]. Zeros at first: a critic knows nothing before its first update."""

    def __init__(self, hidden_size: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.float() @ self.weight.float()


def add_value_head(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """It becomes a part of the model: sharded, trained and clipped with it, but not of what an engine is given."""
    setattr(model, NAME, ValueHead(model.config.get_text_config(decoder=True).hidden_size, device, dtype))


def has_value_head(model: Any) -> bool:
    return hasattr(model, NAME)


def is_of_value_head(name: str) -> bool:
    """Whether a parameter's name is one of the head's."""
    return name.startswith(f"{NAME}.")
