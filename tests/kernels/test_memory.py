"""A gradient in fresh pages: zeros that nobody writes, and memory only for the tokens that train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dapo_kernels import dapo_loss, use_backend
from dapo_kernels.memory import fresh_pages


def resident() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["VmRSS"].split()[0])


def call(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    n, vocab = logits.shape
    g = torch.Generator().manual_seed(2)
    ids, old = torch.randint(vocab, (n,), generator=g), torch.randn(n, generator=g) - 11
    advantages = torch.randn(n, generator=g)
    out = dapo_loss(logits, ids, old, advantages, mask=mask)
    return torch.autograd.grad(out.loss, logits)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("live", ["first", "scattered", "none"])
def test_a_large_gradient_is_that_of_the_reference(live: str, dtype: torch.dtype) -> None:
    n, vocab = 64, 50257
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    numbers = torch.arange(n)
    mask = {"first": numbers < 5, "scattered": numbers % 7 == 3, "none": numbers < 0}[live]
    grad = call(logits, mask)
    with use_backend("torch"):
        expected = call(logits, mask)
    assert grad.is_contiguous()
    assert grad.shape == logits.shape
    assert not grad[~mask].any()
    torch.testing.assert_close(grad.double(), expected.double(), rtol=2**-7, atol=1e-9)
    grad.add_(1.0)  # memory like any other
    assert (grad[~mask] == 1).all()


def test_rows_without_a_gradient_take_no_memory() -> None:
    n, vocab = 256, 151936
    logits = torch.zeros(n, vocab, dtype=torch.bfloat16).requires_grad_()
    before = resident()
    grad = call(logits, torch.arange(n) < n // 8)
    assert resident() - before < grad.nbytes / 4
    del grad
    assert resident() - before < 2**22  # given back


def test_small_tensors_are_left_to_torch() -> None:
    assert fresh_pages(torch.Size((4, 100)), torch.float32) is None
