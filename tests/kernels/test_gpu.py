"""On a CUDA device: results against float64 on the CPU, sizes past 2³¹, memory. ``test_gpu_execution.py``: the rest.

``make gpu`` runs these. The numerical part sends the problems of the CPU suites through the device: inputs are moved
there inside the call, so that gradients come back to leaves on the CPU and the oracle never knows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import entries
import pytest
import torch
from against_oracle import check as check_float32
from against_oracle import options
from cases import linear_case, logits_case, rows_of, selection_mask, solve
from closeness import as_accurate, elementwise
from entries import LOGITS_ENTRIES, call
from gpu import DEVICE, GIB, NEEDS_DEVICE, batch, needs_memory, poison, step
from oracle import batch_selection, share_down
from torch import Tensor
from torch.utils._pytree import tree_map

from dapo_kernels import (
    OBJECTIVES,
    dapo_loss,
    linear_dapo_loss,
    linear_distillation_loss,
    policy_loss,
    token_logprobs,
    use_backend,
)

pytestmark = [pytest.mark.gpu, NEEDS_DEVICE]
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def poison_uninitialized_memory() -> None:
    poison()


# --- against float64 --------------------------------------------------------------------------------------


def _to(tree: Any, device: str) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its tensors moved to the device and its results moved back, differentiably."""

    def there_and_back(*args: Any, **kwargs: Any) -> Any:
        return _to(function(*_to(args, DEVICE), **_to(kwargs, DEVICE)), "cpu")

    return there_and_back


@pytest.fixture
def through_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (dapo_loss, policy_loss, linear_dapo_loss):
        monkeypatch.setattr(entries, function.__name__, on_device(function))


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_in_float32(gpu_backend: str, through_device: None, name: str, layout: str) -> None:
    changes = {"kl_coef": 0.1, "entropy_coef": 0.05}
    case = logits_case(1031, lengths=(5, 1, 9, 4), seed=41)
    for entry in LOGITS_ENTRIES:
        check_float32(entry, case, name, layout=layout, weighted=True, **changes)
        check_float32(entry, case, name, layout=layout, kl_coef=0.0, denominator=6.5)
    linear = linear_case(517, 64, lengths=(5, 1, 9, 4), seed=44)
    check_float32("linear", linear, name, layout=layout, weighted=True, **changes)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_in_half_precision(
    gpu_backend: str, through_device: None, name: str, dtype: torch.dtype
) -> None:
    """Batch selections are handed in: rounded logits would decide ties another way than float64 does."""
    o, keywords = options(name, kl_coef=0.1, entropy_coef=0.05)
    logits = logits_case(1031, lengths=(5, 1, 9, 4), seed=41, dtype=dtype)
    linear = linear_case(517, 64, lengths=(5, 1, 9, 4), seed=44, dtype=dtype)
    for entry, case in (("logits", logits), ("inplace", logits), ("linear", linear)):
        _, x = rows_of(case, o)
        picked = batch_selection(x, o)
        if o.clip_cov is not None:
            picked = set(sorted(picked)[: share_down(x.live, o.clip_cov[0])])
        selects = OBJECTIVES[name].batch_selection is not None
        extra = {"selection": selection_mask(case, picked)} if selects else {}
        truth = solve(case, o, selected=picked)
        eager = solve(case, o, selected=picked, dtype=dtype)
        out, grads = call(entry, case, name, ref_logprobs=case.ref_logprobs, **extra, **keywords)
        as_accurate(out.loss, truth.loss, eager.loss, what=f"{entry} loss", scale=max(1.0, abs(float(truth.loss))))
        for key, grad in grads.items():
            as_accurate(grad, truth.grads[key], eager.grads[key], what=f"{entry} {key}", multiple=3.0)
        if entry == "logits":
            elementwise(grads["logits"], truth.grads["logits"], what="logits gradient", slack=1.05)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_distillation(gpu_backend: str, beta: float, dtype: torch.dtype) -> None:
    """More rows than programs at a time, some of them masked; value and gradients against float64 on the CPU."""
    g = torch.Generator().manual_seed(46)
    shapes = {"hidden": (700, 64), "weight": (1031, 64), "ref_hidden": (700, 32), "ref_weight": (1031, 32)}
    made = {name: torch.randn(*shape, generator=g).to(dtype) / 3 for name, shape in shapes.items()}
    mask = torch.rand(700, generator=g) > 0.2

    def solve(to: Any) -> tuple[Tensor, ...]:
        x = {name: value.to(to) for name, value in made.items()}
        leaves = [x[name].requires_grad_() for name in ("hidden", "weight")]
        out = linear_distillation_loss(*x.values(), mask=mask.to(leaves[0].device), beta=beta, ref_softcap=5.0)
        return tuple(value.cpu() for value in (out.loss.detach(), *torch.autograd.grad(out.loss, leaves)))

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
    assert sampled.grad is not None
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
