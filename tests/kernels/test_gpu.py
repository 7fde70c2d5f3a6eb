"""On a CUDA device: the backends' suite, golden values, losses from hidden states, sizes past 2³¹, memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import test_backends
import torch
from closeness import as_accurate, elementwise
from gpu import DEVICE, GIB, NEEDS_DEVICE, batch, needs_memory, poison, step
from test_golden import CASES, check_case, name_of
from torch import Tensor

from dapo_kernels import dapo_loss, linear_dapo_loss, linear_distillation_loss, token_logprobs, use_backend

pytestmark = [pytest.mark.gpu, NEEDS_DEVICE]
# The tests of every backend, with the fixtures below.
globals().update({name: x for name, x in vars(test_backends).items() if name.startswith("test_")})


@pytest.fixture(autouse=True)
def poison_uninitialized_memory() -> None:
    poison()


@pytest.fixture
def backend(gpu_backend: str) -> str:
    return gpu_backend


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_golden_values(gpu_backend: str, case: dict[str, Any]) -> None:
    for inplace in (False, True):
        check_case(case, torch.float32, 3e-6, device=DEVICE, inplace_backward=inplace)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [0.0, 0.3, 1.0, "dapo", "gspo"])
def test_from_hidden_states(gpu_backend: str, kind: float | str, dtype: torch.dtype) -> None:
    """A loss, or a divergence at β, over three chunks and masked rows, against float64 on the CPU."""
    g = torch.Generator().manual_seed(46)
    shapes = {"hidden": (700, 64), "weight": (1031, 64), "ref_hidden": (700, 32), "ref_weight": (1031, 32)}
    made = {name: torch.randn(*shape, generator=g).to(dtype) / 3 for name, shape in shapes.items()}
    mask, ids = torch.rand(700, generator=g) > 0.2, torch.randint(1031, (700,), generator=g)
    advantages, bounds = torch.randn(700, generator=g), torch.tensor([0, 300, 700])

    def solve(to: Any) -> tuple[Tensor, ...]:
        leaves = [made[name].to(to).requires_grad_() for name in ("hidden", "weight")]
        device = leaves[0].device
        how: dict[str, Any] = {"mask": mask.to(device), "chunk_bytes": 256 * 1040 * dtype.itemsize}
        if isinstance(kind, float):
            ref = (made[name].to(to) for name in ("ref_hidden", "ref_weight"))
            loss = linear_distillation_loss(*leaves, *ref, beta=kind, ref_softcap=5.0, **how).loss
        else:
            how |= {"objective": kind, "cu_seqlens": bounds.to(device), "softcap": 5.0}
            loss = linear_dapo_loss(*leaves, ids.to(device), None, advantages.to(device), **how).loss
        return tuple(value.cpu() for value in (loss.detach(), *torch.autograd.grad(loss, leaves)))

    with use_backend("torch"):
        truth, eager = solve(torch.float64), solve(dtype)
    for name, found, exact, near in zip(("loss", "hidden", "weight"), solve(DEVICE), truth, eager, strict=True):
        as_accurate(found, exact, near, what=name, multiple=3.0)


# --- sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
def test_more_logits_than_32_bits_count(gpu_backend: str, inplace: bool) -> None:
    """First, middle and last rows of 14,200 × 151,936 logits, those past element 2³¹ among them."""
    n, vocab = 14200, 151936
    assert n * vocab > 2**31
    needs_memory(14)
    g = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.empty(n, vocab, dtype=torch.bfloat16, device=DEVICE).normal_(0, 2, generator=g)
    ids = torch.randint(vocab, (n,), generator=g, device=DEVICE)
    ids[-1] = vocab - 1
    some = torch.tensor([0, 1, n // 2, n - 2, n - 1], device=DEVICE)
    sampled = logits[some].double().cpu().requires_grad_()
    exact = torch.log_softmax(sampled, -1).gather(1, ids[some, None].cpu())[:, 0]
    found = token_logprobs(logits, ids).logprobs
    assert float((found[some].cpu().double() - exact.detach()).abs().max()) < 2e-6 * 16
    advantages = torch.where(torch.arange(n, device=DEVICE) % 2 == 0, 1.0, -1.0)
    leaf = logits.requires_grad_()
    loss = dapo_loss(leaf, ids, found - 0.05, advantages, inplace_backward=inplace).loss
    (grad,) = torch.autograd.grad(loss, leaf)
    # Every ratio is exp 0.05, inside the clip range: the gradient is −A·ρ/N times that of the log-prob.
    ratio = torch.exp(exact.detach() - (found[some].cpu().double() - 0.05))
    (-(ratio * advantages[some].cpu()) / n * exact).sum().backward()
    elementwise(grad[some].cpu(), sampled.grad, what="gradient", slack=1.05)
    assert (grad.data_ptr() == logits.data_ptr()) == inplace


def peak_beyond(run: Callable[[], tuple[Tensor, ...]], owned: tuple[Tensor, ...]) -> int:
    """Most bytes that a warm call took beyond what was there and the results it returned."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run()
    torch.cuda.synchronize()
    inputs = {x.data_ptr() for x in owned}
    return torch.cuda.max_memory_allocated() - before - sum(r.nbytes for r in results if r.data_ptr() not in inputs)


def test_memory_from_hidden_states(gpu_backend: str) -> None:
    needs_memory(16)
    b = batch(8192, 151936, hidden=4096)
    for sync in (True, False):
        assert peak_beyond(functools.partial(step, b, host_sync=sync), ()) <= 3 * GIB


def test_in_place_takes_no_memory_for_logits(gpu_backend: str) -> None:
    b = batch(2048, 49152)
    logits = b["logits"]
    *_, grad = step(b, inplace_backward=True)
    assert grad.data_ptr() == logits.data_ptr()
    assert peak_beyond(lambda: step(b, inplace_backward=True), (logits,)) < logits.nbytes // 50
