"""Two controls of the 80/20 rule (Wang et al. 2025, arXiv 2506.01939): train the four fifths of the tokens with the
lowest entropy, as in the paper, or a random fifth. For `advantage.kind` in the study `search-questions`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dapo_kernels import select
from dapo_runner.algorithms.advantage import ADVANTAGES
from dapo_runner.types import Group

SHARE = 0.2


def group_std(groups: Sequence[Group]) -> list[list[float]]:
    """Return DAPO's advantage of each response."""
    rewards = [torch.tensor([sample.reward for sample in group.samples], dtype=torch.float64) for group in groups]
    return [ADVANTAGES["group_std"](row, row).tolist() for row in rewards]


def random_fifth(groups: Sequence[Group]) -> list[list[Tensor]]:
    """Return DAPO's advantage for a random fifth of the tokens and 0, which trains nothing, for the others."""
    return [
        [value * (torch.rand(x.completion.length) < SHARE) for x, value in zip(group.samples, row, strict=True)]
        for group, row in zip(groups, group_std(groups), strict=True)
    ]


def lowest_entropy(groups: Sequence[Group]) -> list[list[float]]:
    """Return DAPO's advantages, and let the objective `top_entropy` train the share of lowest entropy from now on.

    The runner has no setting for this selection, so its function is replaced.
    """
    select.top_entropy = lowest
    return group_std(groups)


def lowest(entropy: Tensor, live: Tensor, share: float) -> Tensor:
    """Return bool [N]: the live tokens that are not among the ``1 − share`` of highest entropy, rounded up."""
    count = torch.tensor(math.ceil(int(live.sum()) * (1 - share) - 1e-9))
    return live & ~select.highest(entropy, live, count)
