"""Large gradients: in fresh pages zeros that nobody writes, in kept ones nothing of the call before."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dapo_kernels import dapo_loss, linear_dapo_loss, memory, use_backend
from dapo_kernels.memory import large_tensor, release_workspace


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


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    release_workspace()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("live", ["first", "scattered", "none"])
def test_a_large_gradient_is_that_of_the_reference(live: str, dtype: torch.dtype) -> None:
    n, vocab = 64, 50257
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    numbers = torch.arange(n)
    mask = {"first": numbers < 5, "scattered": numbers % 7 == 3, "none": numbers < 0}[live]
    call(logits, ~mask).fill_(torch.nan)  # what the next one may be given
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
    release_workspace()
    assert resident() - before < 2**22


def take(n_rows: int) -> tuple[torch.Tensor, bool]:
    found = large_tensor(torch.Size((n_rows, 2**20)), torch.float32, torch.device("cpu"), "logits")
    assert found is not None
    return found


def test_pages_are_used_again_once_nobody_holds_them() -> None:
    first, zeroed = take(4)
    assert zeroed
    address = first.data_ptr()
    view = first[1:]
    del first
    other, zeroed = take(4)  # a view is a holder too
    assert zeroed
    assert other.data_ptr() != view.data_ptr() - 2**22
    address = other.data_ptr()
    del other
    again, zeroed = take(3)
    assert not zeroed
    assert again.data_ptr() == address
    assert again.shape == (3, 2**20)
    assert again.untyped_storage().nbytes() == again.nbytes  # what torch.save writes


def test_a_small_one_does_not_sit_on_many_pages() -> None:
    first, _ = take(16)
    del first
    _, zeroed = take(3)
    assert zeroed


def test_the_heads_gradient_is_not_that_of_another_call() -> None:
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(8, 64, generator=g), torch.randn(40000, 64, generator=g)
    found = []
    for ids in (torch.arange(8), torch.arange(8, 16), torch.arange(8)):
        head = weight.clone().requires_grad_()
        linear_dapo_loss(hidden, head, ids, None, torch.ones(8)).loss.backward()
        assert head.grad is not None
        found.append(head.grad if len(found) == 0 else head.grad.clone())
    assert torch.equal(found[0], found[2])  # held while the others were made
    assert not torch.equal(found[0], found[1])


def test_very_large_ones_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "KEPT_BYTES", 2**23)
    for _ in range(2):
        gradient, zeroed = take(4)
        assert zeroed
        gradient.fill_(1.0)
        del gradient


def test_threads_share_one_bound_and_one_release() -> None:
    """Pool threads that have gone on to other work must not sit on memory, nor must it add up over them."""
    logits = torch.randn(64, 50257, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(64, dtype=torch.bool)
    with ThreadPoolExecutor(6) as pool:
        started = threading.Barrier(6)

        def work(_: int) -> None:
            started.wait()
            for _ in range(3):
                call(logits.clone().requires_grad_(), mask)

        list(pool.map(work, range(6)))
        kept, before = memory.kept_bytes(), resident()
        assert 0 < kept <= 6 * logits.nbytes
        release_workspace()
        assert memory.kept_bytes() == 0
        assert before - resident() > 0.9 * kept


def test_the_bound_holds_over_purposes_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "KEPT_BYTES", 2**26)
    for i in range(8):
        found = memory.large_tensor(torch.Size((4, 2**20)), torch.float32, torch.device("cpu"), f"purpose {i}")
        assert found is not None
        del found
        assert memory.kept_bytes() <= 2**26
    assert memory.kept_bytes() == 2**26  # four of them


def test_small_tensors_are_left_to_torch() -> None:
    assert large_tensor(torch.Size((4, 100)), torch.float32, torch.device("cpu"), "logits") is None
