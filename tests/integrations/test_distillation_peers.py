"""``linear_distillation_loss`` beside TRL's and Liger's own: the same β, value and gradients."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo_kernels import linear_distillation_loss

T, V, H, K = 24, 61, 16, 12
BETAS = (0.0, 0.25, 0.5, 0.9, 1.0)


def problem() -> tuple[list[Tensor], Tensor]:
    """Hidden states and heads of policy and reference, labels with −100 where a token does not count."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((T, H), (V, H), (T, K), (V, K))
    states = [torch.randn(shape, generator=generator) / shape[1] ** 0.25 for shape in shapes]
    labels = torch.randint(V, (T,), generator=generator)
    labels[::3] = -100
    return states, labels


def ours(states: list[Tensor], labels: Tensor, **how: Any) -> list[Any]:
    hidden, weight = (x.clone().requires_grad_() for x in states[:2])
    loss = linear_distillation_loss(hidden, weight, *states[2:], mask=labels != -100, **how).loss
    loss.backward()
    return [loss.detach(), hidden.grad, weight.grad]


def same(mine: list[Any], theirs: list[Any]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_trl(beta: float) -> None:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    gkd = pytest.importorskip("trl.experimental.gkd", reason="TRL is not installed")
    states, labels = problem()
    hidden, weight = (x.clone().requires_grad_() for x in states[:2])
    logits, of_ref = hidden @ weight.t(), states[2] @ states[3].t()
    loss = gkd.GKDTrainer.generalized_jsd_loss(logits, of_ref, labels, beta=beta, temperature=0.7)
    loss.backward()
    same(ours(states, labels, beta=beta, temperature=0.7), [loss.detach(), hidden.grad, weight.grad])


@pytest.mark.parametrize("beta", BETAS)
def test_liger(beta: float) -> None:
    liger = pytest.importorskip("liger_kernel.chunked_loss", reason="Liger is not installed (liger-kernel)")
    states, labels = problem()
    hidden, weight = (x.clone().requires_grad_() for x in states[:2])
    loss_of = liger.LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, temperature=0.7, compiled=False, chunk_size=7
    )
    loss = loss_of(hidden, weight, *states[2:], labels)
    loss.backward()
    same(ours(states, labels, beta=beta, temperature=0.7), [loss.detach(), hidden.grad, weight.grad])
