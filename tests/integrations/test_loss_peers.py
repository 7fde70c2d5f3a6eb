"""The distillation loss beside TRL's own: same value and gradients."""

from __future__ import annotations

import pytest
import torch

from dapo_kernels import linear_distillation_loss

T, V, H, K = 24, 61, 16, 12


@pytest.mark.parametrize("beta", [0.0, 0.25, 1.0])
def test_distillation(beta: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd", reason="TRL is not installed")
    generator = torch.Generator().manual_seed(1)
    shapes = ((T, H), (V, H), (T, K), (V, K))
    states = [torch.randn(shape, generator=generator) / shape[1] ** 0.25 for shape in shapes]
    labels = torch.randint(V, (T,), generator=generator)
    labels[::3] = -100
    hidden, weight = (x.requires_grad_() for x in states[:2])
    logits, of_ref = states[0] @ states[1].t(), states[2] @ states[3].t()
    expected = gkd.GKDTrainer.generalized_jsd_loss(logits, of_ref, labels, beta=beta, temperature=0.7)
    expected_gradients = torch.autograd.grad(expected, (hidden, weight))
    loss = linear_distillation_loss(*states, mask=labels != -100, beta=beta, temperature=0.7).loss
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    found = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(found, expected_gradients, rtol=1e-4, atol=1e-6)
