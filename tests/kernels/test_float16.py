"""float16 gradients formed before the loss scaler's factor is known must not vanish."""

from __future__ import annotations

import pytest
import torch
from oracle import Flat, dapo_paper
from torch import Tensor

from dapo_kernels import dapo_loss, linear_dapo_loss, use_backend

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


@pytest.mark.parametrize("n_tokens", [20480, 65536])
@pytest.mark.parametrize("objective", ["dapo", "gspo"])
def test_an_outlier_channel_does_not_overflow(n_tokens: int, objective: str) -> None:
    """Hidden states of 70 in one channel, as language models have, over a long response: the sum before the loss is
    scaled back is a power of two larger than the gradient itself.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n_tokens, 4, generator=generator).half()
    hidden[:, 0] = 70.0
    weight = (0.01 * torch.randn(19, 4, generator=generator)).half()
    targets = torch.randint(3, (n_tokens,), generator=generator)
    bounds = torch.tensor([0, n_tokens], dtype=torch.int32)
    ones = torch.ones(n_tokens)

    def gradients(hidden: Tensor, weight: Tensor, **how: int) -> tuple[Tensor, ...]:
        leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
        out = linear_dapo_loss(*leaves, targets, None, 8 * ones, objective=objective, cu_seqlens=bounds, **how)
        return torch.autograd.grad(out.loss, leaves)

    with use_backend("torch"):
        expected = gradients(hidden.double(), weight.double())
    assert float(expected[1].abs().max()) > 100
    for chunk_bytes in (19 * 2 * n_tokens, 19 * 2 * n_tokens // 7):
        got = gradients(hidden, weight, chunk_bytes=chunk_bytes)
        assert all(g.dtype == torch.float16 for g in got)
        torch.testing.assert_close(got[1].double(), expected[1], rtol=2e-3, atol=1e-3)
