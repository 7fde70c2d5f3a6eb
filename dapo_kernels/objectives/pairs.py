"""Preference losses: the loss of a pair from the log-ratios of its chosen and rejected response. O(pairs).

With r = Σ (ℓ − ℓ_ref) over the n tokens of a response, w the chosen one, l the rejected one and h = β(r_w − r_l)::

    sigmoid   −(1 − ε) log σ(h) − ε log σ(−h)       DPO, Rafailov et al. 2023, arXiv 2305.18290, eq. 7; with ε, the
                                                    assumed share of wrong labels, Mitchell 2023 (conservative DPO)
    hinge     max(0, 1 − h)                         Liu et al. 2023 (RSO), arXiv 2309.06657, after SLiC, 2305.10425
    ipo       (r_w / n_w − r_l / n_l − 1 / (2β))²   IPO, Azar et al. 2023, arXiv 2310.12036, eq. 17; per token, as its
                                                    authors and TRL do, because sums would grow with the lengths
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from dapo_kernels.objectives.table import is_number

PAIR_LOSSES = ("sigmoid", "hinge", "ipo")


@dataclass(frozen=True)
class PairLoss:
    """One of the losses above, with its parameters. Raises ValueError."""

    loss_type: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.loss_type not in PAIR_LOSSES:
            raise ValueError(f"loss_type must be one of {', '.join(PAIR_LOSSES)}; got {self.loss_type!r}")
        if not (is_number(self.beta) and 0 < self.beta < math.inf):
            raise ValueError(f"beta must be positive and finite, got {self.beta!r}")
        if not (is_number(self.label_smoothing) and 0 <= self.label_smoothing < 0.5):
            raise ValueError(f"label_smoothing must be in [0, 0.5), got {self.label_smoothing!r}")
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise ValueError(f"label_smoothing requires loss_type='sigmoid', got {self.loss_type!r}")

    def __call__(self, log_ratios: Tensor, lengths: Tensor) -> Tensor:
        """Return losses [P] from log-ratios and token counts [P, 2], with the chosen response first."""
        if self.loss_type == "ipo":
            chosen, rejected = (log_ratios / lengths.clamp(min=1)).unbind(1)
            return (chosen - rejected - 1 / (2 * self.beta)) ** 2
        h = self.beta * (log_ratios[:, 0] - log_ratios[:, 1])
        if self.loss_type == "hinge":
            return torch.relu(1 - h)
        if self.label_smoothing == 0:
            return -logsigmoid(h)
        return -(1 - self.label_smoothing) * logsigmoid(h) - self.label_smoothing * logsigmoid(-h)
