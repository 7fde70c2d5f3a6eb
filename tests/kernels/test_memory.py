"""Large gradients: in fresh pages zeros that nobody writes, in kept ones nothing of the call before."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dapo_kernels import dapo_loss, linear_dapo_loss, memory, use_backend
from dapo_kernels.memory import large_tensor, release_workspace

CPU, MIB = torch.device("cpu"), 2**20


def resident() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["VmRSS"].split()[0])


def call(logits: Tensor, mask: Tensor) -> Tensor:
    n, vocab = logits.shape
    g = torch.Generator().manual_seed(2)
    ids, old = torch.randint(vocab, (n,), generator=g), torch.randn(n, generator=g) - 11
    out = dapo_loss(logits, ids, old, torch.randn(n, generator=g), mask=mask)
    return torch.autograd.grad(out.loss, logits)[0]


def take(mib: int, purpose: str = "logits") -> tuple[Tensor, bool]:
    return large_tensor(torch.Size((mib, MIB // 4)), torch.float32, CPU, purpose)


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    release_workspace()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("live", ["first", "scattered", "none"])
def test_a_large_gradient_is_that_of_the_reference(live: str, dtype: torch.dtype) -> None:
    n, vocab = 24, 50257 if dtype == torch.float32 else 100_003
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    numbers = torch.arange(n)
    mask = {"first": numbers < 5, "scattered": numbers % 7 == 3, "none": numbers < 0}[live]
    call(logits, ~mask).fill_(torch.nan)  # what the next one may be given
    grad = call(logits, mask)
    assert memory.kept_bytes() == grad.nbytes
    with use_backend("torch"):
        expected = call(logits, mask)
    assert grad.is_contiguous()
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
    release_workspace()
    assert resident() - before < 4 * MIB


def test_pages_are_used_again_once_nobody_holds_them() -> None:
    first, zeroed = take(16)
    assert zeroed
    address, view = first.data_ptr(), first[1:]
    del first
    other, zeroed = take(16)  # a view is a holder too
    assert zeroed
    assert other.data_ptr() != address
    address = other.data_ptr()
    del other
    assert take(16, "weight")[1]  # pages of another purpose have been written elsewhere
    again, zeroed = take(12)
    assert not zeroed
    assert again.data_ptr() == address
    assert again.untyped_storage().nbytes() == again.nbytes == 12 * MIB  # what torch.save writes
    assert view.shape == (15, MIB // 4)
    take(64)
    assert take(15)[1]  # a small one does not sit on many pages
    assert large_tensor(torch.Size((4, 100)), torch.float32, CPU, "logits") is None  # left to torch


def test_the_heads_gradient_is_not_that_of_another_call() -> None:
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(8, 64, generator=g), torch.randn(40000, 64, generator=g)
    found = []
    for ids in (torch.arange(8), torch.arange(8, 16), torch.arange(8)):
        head = weight.clone().requires_grad_()
        linear_dapo_loss(hidden, head, ids, None, torch.ones(8)).loss.backward()
        found.append(head.grad if len(found) == 0 else head.grad.clone())
    assert torch.equal(found[0], found[2])  # held while the others were made
    assert not torch.equal(found[0], found[1])


def test_the_bound_holds_over_purposes_and_very_large_ones_are_not_kept() -> None:
    """Pages that nobody touches take no memory."""
    quarter = memory.KEPT_BYTES // 4 // MIB
    for i in range(7):
        take(quarter, f"purpose {i}")
        assert memory.kept_bytes() == min(i + 1, 4) * quarter * MIB
    release_workspace()
    for _ in range(2):
        assert take(4 * quarter + 1)[1]
        assert memory.kept_bytes() == 0


def test_threads_share_one_bound_and_one_release() -> None:
    """Pool threads that have gone on to other work must not sit on memory, nor must it add up over them."""
    logits = torch.randn(64, 50257, generator=torch.Generator().manual_seed(1))
    started, mask = threading.Barrier(4), torch.ones(64, dtype=torch.bool)

    def work(_: int) -> None:
        started.wait()
        for _ in range(2):
            call(logits.clone().requires_grad_(), mask)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
        kept, before = memory.kept_bytes(), resident()
        assert 0 < kept <= 4 * logits.nbytes
        release_workspace()
        assert memory.kept_bytes() == 0
        assert before - resident() > 0.9 * kept
