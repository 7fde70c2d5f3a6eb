"""Select the tokens that train, for objectives that need the whole batch to decide. All tensors [N], no gradients.

A selection can be made once over the full batch and passed to every micro-batch (``selection=``). Then it does not
depend on how the batch is split. ``live`` is bool: the tokens that train.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dapo_kernels.objectives.surrogate import ObjectiveScalars, token_objective
from dapo_kernels.objectives.table import Objective

__all__ = ["clip_cov", "clip_hits", "covariance", "highest", "kl_cov", "share_of", "top_entropy"]


def covariance(logprobs: Tensor, advantages: Tensor, live: Tensor) -> Tensor:
    """Return (A − mean A)(ℓ − mean ℓ) over live tokens (Cui et al. 2025, eq. 10); −inf on masked tokens.

    Example:
        >>> import torch
        >>> from dapo_kernels import select
        >>> live = torch.tensor([True, True, False])
        >>> select.covariance(torch.tensor([-1.0, -3.0, -9.0]), torch.tensor([1.0, -1.0, 0.0]), live).tolist()
        [1.0, 1.0, -inf]
    """
    count = live.sum().clamp(min=1)

    def centred(x: Tensor) -> Tensor:
        x = torch.where(live, x, 0.0)
        return x - x.sum() / count

    return torch.where(live, centred(logprobs) * centred(advantages), -math.inf)


def highest(scores: Tensor, live: Tensor, count: Tensor) -> Tensor:
    """Return bool [N]: the ``count`` live tokens with the highest scores; of ties the earlier. No host sync.

    Example:
        >>> import torch
        >>> from dapo_kernels import select
        >>> live = torch.tensor([True, True, True, False])
        >>> select.highest(torch.tensor([0.3, 0.9, 0.9, 5.0]), live, torch.tensor(1)).tolist()
        [False, True, False, False]
    """
    order = torch.where(live, scores, -math.inf).argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=order.device)
    return live & (rank < count)


def share_of(live: Tensor, share: float, *, rounding: str) -> Tensor:
    """Return the number of tokens that is ``share`` of the live ones, 0-d; at least one, as in the papers' code.

    ``rounding``: ``"up"`` or ``"down"``.

    Example:
        >>> import torch
        >>> from dapo_kernels import select
        >>> live = torch.ones(7, dtype=torch.bool)
        >>> int(select.share_of(live, 0.2, rounding="up")), int(select.share_of(live, 0.2, rounding="down"))
        (2, 1)
    """
    count = live.sum().double() * share
    # A share such as 0.2 is not exact in binary: 0.2 · 10 must not be rounded up to 3.
    count = torch.ceil(count - 1e-9) if rounding == "up" else torch.floor(count + 1e-9)
    return count.clamp(min=1)


def top_entropy(entropy: Tensor, live: Tensor, share: float) -> Tensor:
    """Return bool [N]: the live tokens with the highest entropy, as a share of the live tokens, rounded up.

    Example:
        >>> import torch
        >>> from dapo_kernels import policy_loss, select
        >>> entropy, live = torch.tensor([0.1, 2.0, 0.5, 1.5]), torch.ones(4, dtype=torch.bool)
        >>> chosen = select.top_entropy(entropy, live, 0.5)  # once, over the whole batch
        >>> chosen.tolist()
        [False, True, False, True]
        >>> logprobs = torch.full((4,), -1.0)
        >>> for part in (slice(0, 2), slice(2, 4)):  # micro-batches
        ...     options = {"entropy": entropy[part], "selection": chosen[part], "denominator": 4.0}
        ...     policy_loss(logprobs[part], None, torch.ones(2), objective="top_entropy", **options).loss.item()
        -0.25
        -0.25
    """
    return highest(entropy, live, share_of(live, share, rounding="up"))


def clip_hits(
    objective: Objective, logprobs: Tensor, log_ratio: Tensor | None, advantages: Tensor, live: Tensor
) -> Tensor:
    """Return int8 [N]: the clip bound that the surrogate hits, 0 for none or a masked token.

    Args:
        log_ratio: with ratio ``"sequence"`` or ``"sequence_token"`` the mean of ℓ − ℓ_old over the live tokens of the
            token's sequence, otherwise (also with ``"sequence_clipped"``) ℓ − ℓ_old; None: on-policy.

    Example:
        >>> import torch
        >>> from dapo_kernels import OBJECTIVES, select
        >>> logprobs, log_ratio = torch.full((3,), -1.0), torch.tensor([0.7, -0.5, 0.0])
        >>> live = torch.ones(3, dtype=torch.bool)
        >>> (select.clip_hits(OBJECTIVES["clip_cov"], logprobs, log_ratio, torch.ones(3), live) != 0).tolist()
        [True, False, False]
    """
    delta = torch.zeros_like(logprobs) if log_ratio is None else log_ratio
    scalars = ObjectiveScalars.of(objective)
    *_, hit, _ = token_objective(logprobs, delta, advantages, None, None, **scalars.per_token)
    return torch.where(live, hit, 0).to(torch.int8)


def clip_cov(
    logprobs: Tensor,
    advantages: Tensor,
    live: Tensor,
    clip_hit: Tensor,
    clip_cov: tuple[float, float, float],
    generator: torch.Generator | None,
) -> Tensor:
    """Return bool [N]: random live tokens with a covariance in (low, high) that the ratio clip does not affect.

    Args:
        clip_hit: what ``clip_hits`` returns.
        clip_cov: (share, low, high), as in ``Objective``.
        generator: for the random choice; None is torch's own.

    Example:
        >>> import torch
        >>> from dapo_kernels import select
        >>> logprobs, advantages = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([3.0, 0.0, 0.0])
        >>> live, no_hit = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int8)
        >>> select.clip_cov(logprobs, advantages, live, no_hit, (0.2, 1.5, 5.0), None).tolist()
        [True, False, False]
    """
    share, low, high = clip_cov
    scores = covariance(logprobs, advantages, live)
    candidates = live & (clip_hit == 0) & (scores > low) & (scores < high)
    if generator is None:  # torch.compile refuses generator=None with a dynamic shape
        lots = torch.rand(scores.shape, dtype=torch.float32, device=scores.device)
    else:
        lots = torch.rand(scores.shape, generator=generator, dtype=torch.float32, device=scores.device)
    return highest(lots, candidates, share_of(live, share, rounding="down"))


def kl_cov(logprobs: Tensor, advantages: Tensor, live: Tensor, kl_cov: tuple[float, float]) -> Tensor:
    """Return bool [N]: the live tokens with the highest covariance, as a share of the live tokens, rounded down.

    ``kl_cov``: (share, coef), as in ``Objective``; coef is not read.

    Example:
        >>> import torch
        >>> from dapo_kernels import select
        >>> logprobs, advantages = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([3.0, 0.0, 0.0])
        >>> select.kl_cov(logprobs, advantages, torch.ones(3, dtype=torch.bool), (0.4, 1.0)).tolist()
        [True, False, False]
    """
    return highest(covariance(logprobs, advantages, live), live, share_of(live, kl_cov[0], rounding="down"))
