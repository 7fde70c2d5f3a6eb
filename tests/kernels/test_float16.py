"""float16 gradients formed before the loss scaler's factor is known must not vanish."""

from __future__ import annotations

import pytest
import torch
from oracle import Flat, dapo_paper
from torch import Tensor

from dapo_kernels import dapo_loss, linear_dapo_loss

T, V, H = 1024, 257, 16
SCALE = 65536.0  # a loss scaler's usual start


@pytest.fixture
def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator).half()
    weight = (0.4 * torch.randn(V, H, generator=generator)).half()
    targets = torch.randint(V, (T,), generator=generator)
    logits = hidden.double() @ weight.double().T
    old = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    old = (old + 0.1 * torch.randn(T, generator=generator)).float()
    advantages = torch.randn(T, generator=generator)
    return {"hidden": hidden, "weight": weight, "targets": targets, "old": old, "advantages": advantages}


def truth(batch: dict[str, Tensor], logits: Tensor) -> Tensor:
    logprobs = torch.log_softmax(logits, -1).gather(1, batch["targets"][:, None])[:, 0]
    old, advantages = batch["old"].double(), batch["advantages"].double()
    return SCALE * dapo_paper(Flat(logprobs, old, advantages, old, [True] * T, [(0, T)]))


def test_inplace_logits(batch: dict[str, Tensor]) -> None:
    logits = (batch["hidden"] @ batch["weight"].T).detach()
    wide = logits.double().requires_grad_()
    (expected,) = torch.autograd.grad(truth(batch, wide), wide)
    logits.requires_grad_()
    out = dapo_loss(logits, batch["targets"], batch["old"], batch["advantages"], inplace_backward=True)
    (got,) = torch.autograd.grad(SCALE * out.loss, logits)
    assert float((got.double() - expected).norm() / expected.norm()) < 1e-3
    vanished = (got == 0) & (expected.abs() > 1e-3)
    assert not bool(vanished.any())


@pytest.mark.parametrize("chunk_bytes", [None, 100 * V * 2])
def test_linear(batch: dict[str, Tensor], chunk_bytes: int | None) -> None:
    wide = [batch[name].double().requires_grad_() for name in ("hidden", "weight")]
    expected = torch.autograd.grad(truth(batch, wide[0] @ wide[1].T), wide)
    inputs = [batch[name].requires_grad_() for name in ("hidden", "weight")]
    out = linear_dapo_loss(*inputs, batch["targets"], batch["old"], batch["advantages"], chunk_bytes=chunk_bytes)
    for got, true in zip(torch.autograd.grad(SCALE * out.loss, inputs), expected, strict=True):
        assert float((got.double() - true).norm() / true.norm()) < 2e-3
