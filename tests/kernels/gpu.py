"""What the tests on a CUDA device share: where they run, problems made there, one call of a loss."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vocab_parallel import options_of

from dapo_kernels import dapo_loss, linear_dapo_loss, token_logprobs

DEVICE = "cuda"
GIB = 2**30
NEEDS_DEVICE = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no CUDA device here; run `make gpu` on one"
)


def poison() -> None:
    """Fill what the allocator hands out next with NaN: the CPU tests' deterministic mode changes what a device runs."""
    large = torch.full((256 * 2**20,), 255, dtype=torch.uint8, device=DEVICE)
    small = [torch.full((512 << k,), 255, dtype=torch.uint8, device=DEVICE) for k in range(10) for _ in range(8)]
    del large, small


def needs_memory(gib: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of device memory, {free / GIB:.1f} are free")


def batch(n: int, vocab: int, hidden: int = 0, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, Tensor]:
    """A problem made on the device: four sequences, a fifth of the tokens masked, ratios on both sides of the clip."""
    g = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g, device=DEVICE) * scale).to(dtype)

    made = {
        "target_ids": torch.randint(vocab, (n,), generator=g, device=DEVICE),
        "advantages": torch.randn(n, generator=g, device=DEVICE),
        "mask": torch.rand(n, generator=g, device=DEVICE) > 0.2,
        "cu_seqlens": torch.tensor([0, n // 4, n // 2, n - 1, n], dtype=torch.int32, device=DEVICE),
        "ref_logprobs": -10 - torch.rand(n, generator=g, device=DEVICE),
    }
    if hidden:
        made |= {"hidden": normal(n, hidden), "weight": normal(vocab, hidden, scale=2 * hidden**-0.5)}
        logits = made["hidden"] @ made["weight"].t()
    else:
        logits = made["logits"] = normal(n, vocab, scale=2.0)
    logprobs = token_logprobs(logits, made["target_ids"]).logprobs
    return {**made, "old_logprobs": logprobs - 0.6 * torch.randn(n, generator=g, device=DEVICE)}


def keywords_of(name: str, b: dict[str, Tensor]) -> dict[str, Any]:
    """Arguments that an objective asks for."""
    case: Any = SimpleNamespace(**b)
    return {"objective": name, **options_of(name, case)}


def step(b: dict[str, Tensor], name: str = "dapo", **kwargs: Any) -> tuple[Tensor, ...]:
    """Loss, log-probs and gradients of one call, from logits or from hidden states."""
    per_token = (b["target_ids"], b["old_logprobs"], b["advantages"])
    said = {**keywords_of(name, b), **kwargs}
    if "hidden" in b:
        leaves = [b["hidden"].detach().requires_grad_(), b["weight"].detach().requires_grad_()]
        out = linear_dapo_loss(*leaves, *per_token, **said)
    else:
        leaves = [b["logits"].detach().requires_grad_()]
        out = dapo_loss(*leaves, *per_token, **said)
    return out.loss.detach(), out.logprobs, *torch.autograd.grad(out.loss, leaves)


def same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def near(got: Tensor, expected: Tensor) -> bool:
    """Up to the order of float32 sums."""
    got, expected = got.detach(), expected.detach()
    return float((got - expected).norm()) <= 1e-4 * float(expected.norm())
