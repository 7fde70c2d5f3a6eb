"""Generalized advantages and REINFORCE++ against verl's, whose tensors are padded [B, L]."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_runner.algorithms.critic import value_loss
from dapo_runner.algorithms.returns import discounted_sums, gae, whiten

core_algos = pytest.importorskip(
    "verl.trainer.ppo.core_algos",
    reason="verl's import chain: pip install --no-deps -r tests/integrations/requirements-verl.txt",
    exc_type=ImportError,
)

LENGTHS = torch.tensor([1, 5, 70, 131])
MASK = torch.arange(131) < LENGTHS[:, None]


def draw(seed: int) -> Tensor:
    return torch.randn(MASK.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(ours: Tensor, theirs: Tensor) -> None:
    """verl whitens by √(variance + 1e-8), we by the standard deviation + 1e-6."""
    torch.testing.assert_close(ours, theirs[MASK], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5)])
def test_gae(gamma: float, lam: float) -> None:
    rewards, values = draw(0) * MASK, draw(1)
    theirs = core_algos.compute_gae_advantage_return(rewards, values, MASK.double(), gamma, lam)
    advantages, returns = gae(rewards[MASK], values[MASK], LENGTHS, gamma, lam)
    same(whiten(advantages), theirs[0])
    same(returns, theirs[1])


def test_reinforce_pp() -> None:
    rewards = draw(2) * MASK
    config: Any = SimpleNamespace(gamma=1.0)
    theirs = core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, MASK.double(), config=config)
    returns = discounted_sums(rewards[MASK], LENGTHS, 1.0)
    same(whiten(returns), theirs[0])
    same(returns, theirs[1])


def test_reinforce_pp_baseline() -> None:
    earned, rewards = draw(3)[:, 0], torch.zeros_like(draw(3))
    rewards[torch.arange(4), LENGTHS - 1] = earned
    theirs, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        rewards, MASK.double(), index=torch.tensor([0, 0, 1, 1]).numpy()
    )
    centred = (earned.view(2, 2) - earned.view(2, 2).mean(1, keepdim=True)).flatten()
    last = torch.zeros_like(rewards).scatter_(1, LENGTHS[:, None] - 1, centred[:, None])
    same(whiten(discounted_sums(last[MASK], LENGTHS, 1.0)), theirs)


def test_the_value_loss() -> None:
    values, old, returns = draw(4), draw(5), draw(6)
    loss, clipped = core_algos.compute_value_loss(values, returns, old, MASK.double(), 0.2)
    found = value_loss(*(x[MASK] for x in (values, old, returns)), torch.ones(int(MASK.sum()), dtype=torch.bool), 0.2)
    torch.testing.assert_close(found.loss / MASK.sum(), loss)
    assert float(found.clipped / MASK.sum()) == pytest.approx(float(clipped))
