"""On a CUDA device: the backends' suite, golden values, losses from hidden states, sizes past 2³¹, memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import test_backends
import torch
from closeness import as_accurate, elementwise
from gpu import DEVICE, GIB, NEEDS_DEVICE, batch, needs_memory, poison, same, step
from test_golden import CASES, check_case, name_of
from test_sampling_mask import CHUNKS, TEMPERATURE, kept_by, rows_case
from torch import Tensor

from dapo_kernels import (
    SamplingMask,
    dapo_loss,
    linear_dapo_loss,
    linear_distillation_loss,
    token_logprobs,
    use_backend,
)
from dapo_kernels.backends import registry
from dapo_kernels.engine.kept import KeptTokens
from dapo_kernels.records import RowRequest, Slopes

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


# --- tokens sampled from a part of the vocabulary ---------------------------------------------------------


def step_with_lists(made: dict[str, Tensor], to: Any, **how: Any) -> tuple[Tensor, ...]:
    """Loss, log-probs, entropies and gradients, on a device or in a dtype of the CPU."""
    leaves = [made[x].to(to, copy=True).requires_grad_() for x in ("hidden", "weight", "logits") if x in made]
    moved = {name: x.to(leaves[0].device) for name, x in made.items()}
    ids, advantages, mask = (moved[name] for name in ("target_ids", "advantages", "mask"))
    lists = SamplingMask(moved["ids"], moved["offsets"]) if "ids" in made else None
    function = linear_dapo_loss if "hidden" in made else dapo_loss
    how |= {"mask": mask, "sampling_mask": lists, "entropy_coef": 0.1, "entropy": True}
    out = function(*leaves, ids, None, advantages, **how)
    values = (out.loss.detach(), out.logprobs, out.entropy, *torch.autograd.grad(out.loss, leaves))
    return tuple(value.cpu() for value in values)


@pytest.mark.parametrize("option", [True, False])
@pytest.mark.parametrize("level", ["logits", "hidden"])
def test_sampling_masks(gpu_backend: str, level: str, option: bool) -> None:
    """In bfloat16 against float64 on the CPU, twice the same bits. The first chunk has no lists. ``option``: in place,
    or whether the host waits. No list at all is no mask; and no tokens.
    """
    n, vocab, g = 700, 1031, torch.Generator().manual_seed(47)
    shapes = {"hidden": (n, 64), "weight": (vocab, 64)} if level == "hidden" else {"logits": (n, vocab)}
    made = {name: torch.randn(*shape, generator=g).bfloat16() for name, shape in shapes.items()}
    made |= {"target_ids": torch.randint(vocab, (n,), generator=g), "advantages": torch.randn(n, generator=g)}
    made["mask"] = torch.rand(n, generator=g) > 0.2
    kept = torch.rand(n, vocab, generator=g) < 0.3
    kept[:350], kept[torch.arange(n), made["target_ids"]] = True, True
    made |= SamplingMask.from_kept(kept)._asdict()
    in_chunks = {"chunk_bytes": 256 * 1040 * 2, "host_sync": option}
    how: dict[str, Any] = in_chunks if level == "hidden" else {"inplace_backward": option}
    with use_backend("torch"):
        truth, eager = (step_with_lists(made, dtype) for dtype in (torch.float64, torch.bfloat16))
    found = step_with_lists(made, DEVICE, **how)
    assert same(step_with_lists(made, DEVICE, **how), found)
    names = ("loss", "log-probs", "entropies", *shapes)
    for name, got, exact, near_it in zip(names, found, truth, eager, strict=True):
        as_accurate(got, exact, near_it, what=name, multiple=3.0)
    empty = SamplingMask.from_kept(torch.ones_like(kept))._asdict()
    plain = {name: x for name, x in made.items() if name not in empty}
    assert same(*(step_with_lists({**plain, **lists}, DEVICE, **how) for lists in (empty, {})))
    nothing = {name: x if name == "weight" else x[:0] for name, x in made.items()}
    loss, *_ = step_with_lists({**nothing, "offsets": torch.zeros(1).int()}, DEVICE, **how)
    assert loss == 0


def test_lists_of_rows_in_any_order(gpu_backend: str) -> None:
    case = rows_case(seed=18)
    of, ids = (kept := kept_by(case)).nonzero().unbind(1)
    live = torch.ones(len(kept), dtype=torch.bool)
    offsets = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
    request = RowRequest(case.target_ids, live, 1.0, TEMPERATURE, True, False, live, ids, of, offsets)
    results = []
    for device, by in (("cpu", registry.backend("torch")), (DEVICE, registry.backend(gpu_backend))):
        moved = RowRequest(*(x.to(device) if isinstance(x, Tensor) else x for x in request))
        chunk = moved.at(CHUNKS[2].to(device))
        logits, lists = case.leaves["logits"][CHUNKS[2]].to(device), KeptTokens(by, chunk)
        stats, gradient = lists.row_stats(logits.clone(), chunk), torch.empty_like(logits)
        slopes = Slopes(*torch.ones(2, len(logits), device=device))
        lists.row_grad(gradient, logits.clone(), chunk, stats, slopes)
        results.append((stats.logprobs.cpu(), stats.entropy.cpu(), gradient.cpu()))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


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
