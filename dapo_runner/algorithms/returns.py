"""What single tokens of a response are worth: returns, generalized advantages (GAE), whitening.

With r_t the reward of a token, V_t the critic's value of what lies before it, γ and λ the settings:

    returns     G_t = r_t + γ·G_{t+1}
    gae         δ_t = r_t + γ·V_{t+1} − V_t,  A_t = δ_t + γλ·A_{t+1},  returns A_t + V_t    (arXiv 1506.02438, eq. 16)
    whitened    (A − mean_N) / (std_N + 1e-6)    over the N tokens of a step that train, std unbiased

G, A and V are 0 behind the last token: a response that was cut off is worth what it earned. Legend: N tokens, those of
a sequence side by side; S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dapo_runner.parallel.world import SINGLE_PROCESS, World

EPS = 1e-6  # added to a standard deviation before it divides
BLOCK = 64  # tokens that one row of a matrix product adds up


def discounted_sums(values: Tensor, lengths: Tensor, discount: float) -> Tensor:
    """y_t = x_t + discount·y_{t+1} within each sequence, [N] in the dtype of ``values`` [N]; ``lengths`` int64 [S].

    Sequences are laid out in blocks. A product with powers of the discount adds up each block, and what follows a block
    is the same sum over the blocks' own, a discount of discount^BLOCK apart: as many levels as the longest sequence has
    digits to that base.
    """
    if not values.numel() or int(lengths.max()) == 1:
        return values
    n_blocks = (lengths + BLOCK - 1) // BLOCK
    gaps = BLOCK * (n_blocks.cumsum(0) - n_blocks) - (lengths.cumsum(0) - lengths)
    place = torch.arange(values.numel(), device=values.device) + gaps.repeat_interleave(lengths)
    blocks = values.new_zeros(int(n_blocks.sum()), BLOCK)
    blocks.view(-1)[place] = values
    steps = torch.arange(BLOCK, dtype=values.dtype, device=values.device)
    sums = blocks @ (discount ** (steps[:, None] - steps)).tril()
    following = discounted_sums(sums[:, 0], n_blocks, discount**BLOCK).roll(-1)
    following[n_blocks.cumsum(0) - 1] = 0  # nothing follows the last block of a sequence
    return sums.addcmul_(following[:, None], discount ** (BLOCK - steps)).view(-1)[place]


def gae(rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns, [N] each; ``rewards`` and ``values`` float [N], ``lengths`` int64 [S], none of them 0."""
    following = values.roll(-1)
    following[lengths.cumsum(0) - 1] = 0
    advantages = discounted_sums(rewards + gamma * following - values, lengths, gamma * lam)
    return advantages, advantages + values


def whiten(values: Tensor, world: World = SINGLE_PROCESS) -> Tensor:
    """``values`` float64 [N], the share of this rank, by mean and standard deviation of all. Collective."""
    mean, variance = moments(values, world)
    return (values - mean) / (variance**0.5 + EPS)


def moments(values: Tensor, world: World = SINGLE_PROCESS) -> tuple[float, float]:
    """Mean and unbiased variance over the shares of all ranks; 0 where there are too few. Collective."""
    count, total = _added_up((values.numel(), float(values.sum())), world)
    mean = total / max(count, 1)
    (squares,) = _added_up((float((values - mean).square().sum()),), world)
    return mean, squares / max(count - 1, 1)


def _added_up(own: tuple[float, ...], world: World) -> list[float]:
    """Over the ranks, of those that share positions one."""
    return [sum(column) for column in zip(*world.all_gather_object(own)[:: world.layout.sequence], strict=True)]
